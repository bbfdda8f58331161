"""GLM-4-9B of 2024: GLM-4 without norms on the outputs of attention and MLP. GGUF files call it `chatglm`."""

from bifolio.model.families import glm4
from bifolio.model.families.family import Family
from bifolio.model.stored_form import either_qkv

FAMILY = Family(
    name="glm",
    hf_types=("glm",),
    hf_class="GlmForCausalLM",
    hf_defaults=glm4.DEFAULTS,
    hf_implied=glm4.IMPLIED,
    hf_always=("attention_bias", "partial_rotary_factor"),
    hf_written={"pad_token_id": None},
    hf_names=glm4.HF_NAMES,
    hf_interleaved=True,
    gguf_architectures=("chatglm",),
    gguf_names=glm4.GGUF_NAMES,
    gguf_source=either_qkv,
    gguf_interleaved=True,
)
