"""Qwen2 and Qwen2.5: biases on queries, keys and values; windows on the upper layers of some models."""

from bifolio.model.families.family import Family
from bifolio.model.window_fields import UPPER_LAYERS

FAMILY = Family(
    name="qwen2",
    fields=(UPPER_LAYERS,),
    hf_types=("qwen2",),
    hf_class="Qwen2ForCausalLM",
    hf_implied={"qkv_bias": True, "output_bias": False},
    gguf_architectures=("qwen2",),
)
