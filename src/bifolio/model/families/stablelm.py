"""StableLM: layer norms, rope on a quarter of each head; some models run attention and MLP side by side."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf

DEFAULTS = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}
HEAD_NORMS = "StableLM models whose heads have layer norms of their own (StableLM 2 12B) are not supported"


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    if raw.get("qk_layernorm"):
        raise UnsupportedModelError(HEAD_NORMS)
    return decoder_from_hf(
        raw,
        name,
        norm="layer",
        norm_eps=float(raw["layer_norm_eps"]),
        qkv_bias=bool(raw.get("use_qkv_bias", False)),
        output_bias=False,
        parallel_block=bool(raw.get("use_parallel_residual", False)),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "layer_norm_eps": config.norm_eps,
        "partial_rotary_factor": config.ropes[0].rotary_dim / config.head_dim,
        "use_qkv_bias": config.qkv_bias,
        "use_parallel_residual": config.parallel_block,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    if "blk.0.attn_q_norm.weight" in file.entries:
        raise UnsupportedModelError(f"{file.path}: {HEAD_NORMS}")
    parallel = "blk.0.ffn_norm.weight" not in file.entries
    return decoder_from_gguf(file, metadata, name, norm="layer", parallel_block=parallel)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    return {"use_parallel_residual": config.parallel_block}


FAMILY = Family(
    name="stablelm",
    hf_types=("stablelm",),
    hf_class="StableLmForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("stablelm",),
    written_as="stablelm",
    config_from_gguf=config_from_gguf,
    gguf_entries=gguf_entries,
)
