"""GLM-4-0414 and GLM-Z1: norms before and after attention and MLP, biases on queries, keys and values.

Gate and up are one matrix; rope turns neighbouring pairs of the first half of each head.
"""

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
            "attention_bias": True, "partial_rotary_factor": 0.5,
            "eos_token_id": [151329, 151336, 151338]}  # fmt: skip
IMPLIED = {"output_bias": False, "mlp_bias": False, "layers.window": ()}
HF_NAMES = replace(HF_LLAMA, up=("mlp.gate_up_proj",))
GGUF_NAMES = replace(GGUF_LLAMA, up=("ffn_up",))

FAMILY = Family(
    name="glm4",
    network={"post_norms": True},
    hf_types=("glm4",),
    hf_class="Glm4ForCausalLM",
    hf_defaults=DEFAULTS,
    hf_implied=IMPLIED,
    hf_always=("attention_bias", "partial_rotary_factor"),
    hf_written={"pad_token_id": None},
    hf_names=replace(HF_NAMES, post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"),
    hf_interleaved=True,
    gguf_architectures=("glm4",),
    gguf_refused={".rope.dimension_sections": "GLM models of images (rope with sections) are not supported"},
    gguf_names=GGUF_NAMES,
    gguf_interleaved=True,
)
