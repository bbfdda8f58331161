"""InternLM3: Llama with biases of its own names. Its GGUF files have the architecture `llama`."""

from bifolio.model.families.family import Family
from bifolio.model.fields import Field
from bifolio.model.huggingface.rope_fields import NOT_DYNAMIC

FAMILY = Family(
    name="internlm3",
    fields=(
        Field("qkv_bias", hf="qkv_bias", optional=False),
        Field("output_bias", hf="bias", default=False),
        Field("mlp_bias", hf=None, default=lambda v: v["output_bias"]),
        Field("ropes", hf=NOT_DYNAMIC),
    ),
    hf_types=("internlm3",),
    hf_class="InternLM3ForCausalLM",
    written_as="llama",
    gguf_interleaved=True,
)
