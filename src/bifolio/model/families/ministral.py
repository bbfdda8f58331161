"""Ministral 8B: Mistral with a window on some layers. Its GGUF files have the architecture `llama`."""

from bifolio.model.families.family import Family
from bifolio.model.fields import Field
from bifolio.model.window_fields import BY_TYPE

FAMILY = Family(
    name="ministral",
    hf_types=("ministral",),
    hf_class="MinistralForCausalLM",
    fields=(Field("layers.window", hf=BY_TYPE),),
    written_as="llama",
    gguf_interleaved=True,
)
