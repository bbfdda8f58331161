"""GLM-4-0414 and GLM-Z1: GLM-4-9B of 2024 with norms on the outputs of attention and MLP."""

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.families.glm import FAMILY as GLM

FAMILY = Family(
    name="glm4",
    network={"post_norms": True},
    hf_types=("glm4",),
    hf_class="Glm4ForCausalLM",
    hf_defaults=GLM.hf_defaults,
    hf_implied=GLM.hf_implied,
    hf_always=GLM.hf_always,
    hf_written=GLM.hf_written,
    hf_names=replace(GLM.hf_names, post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"),
    hf_interleaved=True,
    gguf_architectures=("glm4",),
    gguf_refused={".rope.dimension_sections": "GLM models of images (rope with sections) are not supported"},
    gguf_names=GLM.gguf_names,
    gguf_interleaved=True,
)
