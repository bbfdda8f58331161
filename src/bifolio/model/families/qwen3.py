"""Qwen3: norms on each query and key head; the windows of Qwen2."""

from bifolio.model.families.family import Family
from bifolio.model.window_fields import UPPER_LAYERS

FAMILY = Family(
    name="qwen3",
    network={"qk_norm": True},
    fields=(UPPER_LAYERS,),
    hf_types=("qwen3", "qwen3_vl_text", "qwen3_vl"),
    hf_text_part=True,
    hf_class="Qwen3ForCausalLM",
    hf_always=("attention_bias",),
    gguf_architectures=("qwen3", "qwen3vl"),
)
