"""Command R and Aya 23 (Cohere 1): attention and MLP side by side on one layer norm without a bias.

All layers have rope on neighbouring pairs and no window. Logits are scaled.
"""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.cohere2 import NETWORK
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf

DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "max_position_embeddings": 8192, "rope_theta": 500000.0,
            "tie_word_embeddings": True, "bos_token_id": 5, "eos_token_id": 255001}  # fmt: skip
HEAD_NORMS = "Command R+, whose heads have layer norms of their own, is not supported"


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    """`model_max_length` is the context of models that were trained on more tokens than the older field says."""
    raw = {**DEFAULTS, **raw}
    if raw.get("use_qk_norm"):
        raise UnsupportedModelError(HEAD_NORMS)
    return decoder_from_hf(
        raw,
        name,
        max_position=int(raw.get("model_max_length") or raw["max_position_embeddings"]),
        norm_eps=float(raw["layer_norm_eps"]),
        mlp_bias=False,
        layer_window=(),
        logit_scale=float(raw["logit_scale"]),
        **NETWORK,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "layer_norm_eps": config.norm_eps,
        "attention_bias": config.qkv_bias,
        "logit_scale": config.logit_scale,
        "use_qk_norm": False,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    if "blk.0.attn_q_norm.weight" in file.entries:
        raise UnsupportedModelError(f"{file.path}: {HEAD_NORMS}")
    scale = metadata.number(".logit_scale", 1.0) or 1.0
    return decoder_from_gguf(file, metadata, name, logit_scale=scale, **NETWORK)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    return {"logit_scale": config.logit_scale}


FAMILY = Family(
    name="cohere",
    hf_types=("cohere",),
    hf_class="CohereForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_interleaved=True,
    gguf_architectures=("command-r",),
    written_as="command-r",
    config_from_gguf=config_from_gguf,
    gguf_interleaved=True,
    gguf_entries=gguf_entries,
)
