"""dots.llm1: sigmoid routing with a bias, shared experts, plain MLPs in the first layers, norms of heads."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.families.glm4moe import experts_from_hf, experts_to_hf, sigmoid_experts
from bifolio.model.families.qwen2 import read_windows, write_windows
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf

DEFAULTS = {"num_key_value_heads": 32, "moe_intermediate_size": 1408, "first_k_dense_replace": 0,
            "norm_topk_prob": False, "topk_group": 1, "sliding_window": 4096, "max_window_layers": 62}  # fmt: skip


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw, "use_sliding_window": True}
    windows = read_windows(raw)
    return decoder_from_hf(
        raw,
        name,
        mlp_bias=False,
        qk_norm=True,
        layer_window=windows if any(windows) else (),
        moe=experts_from_hf(raw),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    windows = write_windows(config) or {"sliding_window": None}
    return {**decoder_to_hf(config), "attention_bias": config.qkv_bias, **windows, **experts_to_hf(config)}


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    return decoder_from_gguf(file, metadata, name, qk_norm=True, moe=sigmoid_experts(file, metadata))


FAMILY = Family(
    name="dots1",
    hf_types=("dots1",),
    hf_class="Dots1ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("dots1",),
    written_as="dots1",
    config_from_gguf=config_from_gguf,
)
