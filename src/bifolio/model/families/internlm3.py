"""InternLM3: Llama with biases of its own names. Its GGUF files have the architecture `llama`."""

from bifolio.model.families.family import Family
from bifolio.model.fields import Field

FAMILY = Family(
    name="internlm3",
    fields=(
        Field("qkv_bias", hf="qkv_bias", optional=False),
        Field("output_bias", hf="bias", default=False),
        Field("mlp_bias", hf=None, default=lambda v: v["output_bias"]),
    ),
    hf_types=("internlm3",),
    hf_class="InternLM3ForCausalLM",
    written_as="llama",
    gguf_interleaved=True,
)
