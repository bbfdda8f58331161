"""GLM-4-9B of 2024: GLM-4 without norms on the outputs of attention and MLP. GGUF files call it `chatglm`."""

from __future__ import annotations

from bifolio.config import ModelConfig
from bifolio.model.families import glm4
from bifolio.model.families.family import Family
from bifolio.model.model_file import TensorSource
from bifolio.model.stored_form import joined_heads

JOINED = "attn_qkv"


def gguf_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    """Files that were converted from the first folders have queries, keys and values in one matrix."""
    if not source.has(f"blk.0.{JOINED}.weight"):
        return source
    return joined_heads(config, JOINED, glm4.GGUF_NAMES.qkv).source(source)


FAMILY = Family(
    name="glm",
    hf_types=("glm",),
    hf_class="GlmForCausalLM",
    config_from_hf=glm4.half_rotated_from_hf,
    config_to_hf=glm4.config_to_hf,
    hf_names=glm4.HF_NAMES,
    hf_interleaved=True,
    gguf_architectures=("chatglm",),
    written_as="chatglm",
    gguf_names=glm4.GGUF_NAMES,
    gguf_source=gguf_source,
    gguf_interleaved=True,
)
