"""OLMo 2: norms on the outputs of attention and MLP only, and on all query and key heads of a token together.

GGUF files of OLMo 3 have the same architecture, with windows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf
from bifolio.model.tensor_names import HF_LLAMA

NETWORK: dict[str, Any] = {"qk_norm": True, "qk_norm_all_heads": True, "pre_norms": False, "post_norms": True}
HF_NAMES = replace(HF_LLAMA, post_attention_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm")
WINDOW_PERIOD = 4  # of OLMo 3


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    return decoder_from_hf({"rms_norm_eps": 1e-5, **raw}, name, **NETWORK)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {**decoder_to_hf(config), "attention_bias": config.qkv_bias}


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    config = decoder_from_gguf(file, metadata, name, window_period=WINDOW_PERIOD, **NETWORK)
    return local_rope(config)


def local_rope(config: ModelConfig) -> ModelConfig:
    """Layers with a window rotate without scaling."""
    rope = config.ropes[0]
    if not config.layer_window or rope.scaling == "none":
        return config
    layer_rope = tuple(int(window is not None) for window in config.layer_window)
    return replace(config, ropes=(rope, RopeConfig(rope.theta, rope.rotary_dim)), layer_rope=layer_rope)


FAMILY = Family(
    name="olmo2",
    hf_types=("olmo2",),
    hf_class="Olmo2ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    folder_family=lambda config: "olmo3" if config.layer_window else "olmo2",
    gguf_architectures=("olmo2",),
    written_as="olmo2",
    config_from_gguf=config_from_gguf,
    gguf_window_period=WINDOW_PERIOD,
)
