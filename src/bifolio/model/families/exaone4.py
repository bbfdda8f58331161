"""EXAONE 4: norms on the outputs of attention and MLP only, and on each query and key head.

Large models have a window on three of four layers, and no rope on the fourth.
"""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.cohere2 import local_positions
from bifolio.model.families.family import Family
from bifolio.model.families.olmo2 import HF_NAMES
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    largest_window,
    windows_by_type,
    written_layer_types,
)

NETWORK: dict[str, Any] = {"qk_norm": True, "pre_norms": False, "post_norms": True}
DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
WINDOW_PERIOD = 4


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    config = decoder_from_hf(raw, name, layer_window=_windows(raw), **NETWORK)
    return local_positions(config) if config.layer_window else config


def _windows(raw: Raw) -> tuple[int | None, ...]:
    """By `layer_types`, a period, or letters for local and global layers such as LLLG, which repeat."""
    letters = raw.get("sliding_window_pattern")
    if raw.get("layer_types") is not None or not isinstance(letters, str):
        return windows_by_type(raw, WINDOW_PERIOD)
    window = raw.get("sliding_window")
    layers = range(int(raw["num_hidden_layers"]))
    return tuple(int(window) if letters[layer % len(letters)] == "L" else None for layer in layers) if window else ()


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "sliding_window": largest_window(config),
        "layer_types": written_layer_types(config),
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    config = decoder_from_gguf(file, metadata, name, window_period=WINDOW_PERIOD, **NETWORK)
    return local_positions(config) if config.layer_window else config


FAMILY = Family(
    name="exaone4",
    hf_types=("exaone4",),
    hf_class="Exaone4ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("exaone4",),
    written_as="exaone4",
    config_from_gguf=config_from_gguf,
    gguf_window_period=WINDOW_PERIOD,
)
