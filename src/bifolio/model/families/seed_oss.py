"""Seed-OSS: Llama with biases on queries, keys and values."""

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.fields import Field
from bifolio.model.tensor_names import GGUF_LLAMA

FAMILY = Family(
    name="seed_oss",
    fields=(Field("output_bias", hf="attention_out_bias", default=False),),
    hf_types=("seed_oss",),
    hf_class="SeedOssForCausalLM",
    hf_defaults={"attention_bias": True},
    hf_always=("attention_bias", "mlp_bias"),
    gguf_architectures=("seed_oss",),
    gguf_names=replace(GGUF_LLAMA, mlp_norm="post_attention_norm"),
)
