"""Nemotron-H: each layer is a Mamba-2 layer, attention without positions, or an MLP with a squared ReLU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RecurrentConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.families.granitehybrid import (
    GGUF_MAMBA,
    dt_limits,
    mamba_entries,
    mamba_from_gguf,
    mamba_names,
)
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.gguf.recurrent_entries import attention_entries, attention_layers
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, read_activation
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.quant.tensor import QuantizedTensor

KINDS = {
    "M": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "E": "moe",
}


# -- folders ----------------------------------------------------------------------------------------------------------
def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    kinds = _layer_kinds(raw)
    if raw.get("attention_bias"):
        raise UnsupportedModelError("Nemotron-H with biases in attention is not supported")
    heads, size = int(raw.get("mamba_num_heads", 128)), int(raw.get("mamba_head_dim", 64))
    groups = int(raw.get("mamba_n_groups", raw.get("n_groups", 8)))
    state, bias = int(raw.get("ssm_state_size", 128)), bool(raw.get("use_bias", False))
    recurrent = RecurrentConfig(
        "mamba",
        layers=_of_kind(kinds, "mamba"),
        attention_layers=_of_kind(kinds, "attention"),
        mlp_layers=_of_kind(kinds, "mlp"),
        width=int(raw.get("mamba_d_conv", raw.get("conv_kernel", 4))),
        channels=heads * size + 2 * groups * state,
        heads=heads,
        groups=groups,
        key_size=state,
        value_size=size,
        conv_bias=bool(raw.get("mamba_conv_bias", raw.get("use_conv_bias", True))),
        projection_bias=bias,
        norm_first=False,
        norm_groups=groups,
        dt_limits=dt_limits({"time_step_limit": raw.get("mamba_dt_limit", raw.get("time_step_limit"))}),
    )
    return decoder_from_hf(
        {**raw, "num_hidden_layers": len(kinds), "head_dim": raw.get("head_dim") or raw.get("attention_head_dim", 128)},
        name,
        norm_eps=float(raw.get("layer_norm_epsilon", raw.get("rms_norm_eps", 1e-5))),
        activation=read_activation(raw.get("mlp_hidden_act", "relu2")),
        gated_mlp=False,
        ropes=(),
        layer_window=(),
        recurrent=recurrent,
    )


def _layer_kinds(raw: Raw) -> list[str]:
    """'mamba', 'attention' or 'mlp' for every layer."""
    pattern: Sequence[str] | None = raw.get("layers_block_type") or raw.get("layer_types")
    pattern = pattern or raw.get("hybrid_override_pattern")
    if not pattern:
        raise UnsupportedModelError("config.json does not say which layers are recurrent: it needs layers_block_type")
    kinds = [KINDS.get(kind, kind) for kind in pattern]
    if "moe" in kinds:
        raise UnsupportedModelError("Nemotron-H with experts is not supported: its experts have no gates")
    if unknown := set(kinds) - set(KINDS.values()):
        raise UnsupportedModelError(f"layers of the kind {unknown.pop()!r} are not supported in Nemotron-H")
    return kinds


def _of_kind(kinds: Sequence[str], wanted: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind == wanted)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    own = config.recurrent
    if own is None or own.mlp_layers is None:
        raise UnsupportedModelError("a folder of Nemotron-H describes layers with one part each")
    fields, layers = decoder_to_hf(config), range(config.num_layers)
    for name in ("hidden_act", "rms_norm_eps", "num_hidden_layers"):
        del fields[name]
    kinds = ["mamba" if n in own.layers else "mlp" if n in own.mlp_layers else "attention" for n in layers]
    return {
        **fields,
        "layers_block_type": kinds,
        "layer_norm_epsilon": config.norm_eps,
        "mlp_hidden_act": config.activation,
        "mlp_bias": config.mlp_bias,
        "use_bias": own.projection_bias,
        "mamba_num_heads": own.heads,
        "mamba_head_dim": own.value_size,
        "n_groups": own.groups,
        "ssm_state_size": own.key_size,
        "conv_kernel": own.width,
        "use_conv_bias": own.conv_bias,
        "time_step_limit": list(own.dt_limits),
        "time_step_min": 1e-30,  # transformers takes it as the lower limit
    }


@dataclass(frozen=True, slots=True)
class EitherPrefix:
    """The tensors of a folder whose names begin with `backbone.` or `model.`."""

    source: TensorSource
    config: ModelConfig

    def _name(self, name: str) -> str:
        other = name.replace("backbone.", "model.", 1)
        return other if not self.source.has(name) and self.source.has(other) else name

    def has(self, name: str) -> bool:
        return self.source.has(self._name(name))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        return self.source.view(self._name(name), shape)


# -- GGUF files -------------------------------------------------------------------------------------------------------
def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    count = metadata.count(".block_count")
    widths = metadata.by_layer(".feed_forward_length", count)
    attention = attention_layers(metadata, count)
    mlps = [layer for layer in range(count) if widths[layer]]
    layers = [layer for layer in range(count) if not widths[layer] and layer not in attention]
    return decoder_from_gguf(
        file,
        metadata.without_zeros(".attention.head_count_kv", ".attention.head_count", ".feed_forward_length"),
        name,
        activation="relu2",
        gated_mlp=False,
        ropes=(),
        recurrent=mamba_from_gguf(file, metadata, layers, attention, mlp_layers=tuple(mlps)),
    )


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    widths = [config.intermediate_size * config.has_mlp(layer) for layer in range(config.num_layers)]
    return {
        "attention.layer_norm_epsilon": config.norm_eps,
        "feed_forward_length": np.array(widths, np.int32),
        **attention_entries(config),
        **mamba_entries(config),
    }


FAMILY = Family(
    name="nemotron_h",
    hf_types=("nemotron_h",),
    hf_class="NemotronHForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(
        HF_LLAMA,
        embedding="backbone.embeddings",
        layer="backbone.layers.{}.",
        attention_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        mlp_norm="norm",
        up=("mixer.up_proj",),
        down="mixer.down_proj",
        final_norm="backbone.norm_f",
        recurrent=mamba_names("mixer"),
    ),
    folder_source=EitherPrefix,
    gguf_architectures=("nemotron_h",),
    written_as="nemotron_h",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(GGUF_LLAMA, mlp_norm="attn_norm", up=("ffn_up",), recurrent=GGUF_MAMBA),
    gguf_activation="relu2",
    gguf_entries=gguf_entries,
)
