"""Nemotron-H: each layer is a Mamba-2 layer, attention without positions, an MLP with a squared ReLU, or experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, MoeConfig, RecurrentConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.families.granitehybrid import (
    GGUF_MAMBA,
    dt_limits,
    mamba_entries,
    mamba_from_gguf,
    mamba_names,
)
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.gguf.recurrent_entries import attention_entries, attention_layers
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    expert_count,
    read_activation,
)
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.quant.tensor import QuantizedTensor

GROUP_BEST = 2  # experts that rank a group
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
    moe = _experts_from_hf(raw, _of_kind(kinds, "mlp")) if "moe" in kinds else None
    if raw.get("attention_bias"):
        raise UnsupportedModelError("Nemotron-H with biases in attention is not supported")
    heads, size = int(raw.get("mamba_num_heads", 128)), int(raw.get("mamba_head_dim", 64))
    groups = int(raw.get("mamba_n_groups", raw.get("n_groups", 8)))
    state, bias = int(raw.get("ssm_state_size", 128)), bool(raw.get("use_bias", False))
    recurrent = RecurrentConfig(
        "mamba",
        layers=_of_kind(kinds, "mamba"),
        attention_layers=_of_kind(kinds, "attention"),
        mlp_layers=_of_kind(kinds, "mlp", "moe"),
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
        moe=moe,
    )


def _experts_from_hf(raw: Raw, plain: tuple[int, ...]) -> MoeConfig:
    if raw.get("moe_latent_size") is not None:
        raise UnsupportedModelError("Nemotron-H with experts over latents (moe_latent_size) is not supported")
    if raw.get("mlp_bias"):
        raise UnsupportedModelError("Nemotron-H with biases in its experts is not supported")
    groups = int(raw.get("n_group") or 1)
    return MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(raw["num_experts_per_tok"]),
        expert_size=int(raw["moe_intermediate_size"]),
        scoring="sigmoid",
        renormalise=bool(raw.get("norm_topk_prob", True)),
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        selection_bias=True,
        num_groups=groups,
        top_groups=int(raw.get("topk_group") or groups),
        group_best=GROUP_BEST if groups > 1 else 1,
        shared_size=int(raw["moe_shared_expert_intermediate_size"]),
        dense_layers=plain,
    )


def _layer_kinds(raw: Raw) -> list[str]:
    """'mamba', 'attention', 'mlp' or 'moe' for every layer."""
    pattern: Sequence[str] | None = raw.get("layers_block_type") or raw.get("layer_types")
    pattern = pattern or raw.get("hybrid_override_pattern")
    if not pattern:
        raise UnsupportedModelError("config.json does not say which layers are recurrent: it needs layers_block_type")
    kinds = [KINDS.get(kind, kind) for kind in pattern]
    if unknown := set(kinds) - set(KINDS.values()):
        raise UnsupportedModelError(f"layers of the kind {unknown.pop()!r} are not supported in Nemotron-H")
    return kinds


def _of_kind(kinds: Sequence[str], *wanted: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind in wanted)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    own = config.recurrent
    if own is None or own.mlp_layers is None:
        raise UnsupportedModelError("a folder of Nemotron-H describes layers with one part each")
    fields, layers = decoder_to_hf(config), range(config.num_layers)
    for name in ("hidden_act", "rms_norm_eps", "num_hidden_layers"):
        del fields[name]

    def kind(layer: int) -> str:
        if config.has_mlp(layer):
            return "moe" if config.has_experts(layer) else "mlp"
        return "mamba" if layer in own.layers else "attention"

    return {
        **fields,
        **_experts_to_hf(config.moe),
        "layers_block_type": [kind(layer) for layer in layers],
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


def _experts_to_hf(moe: MoeConfig | None) -> dict[str, Any]:
    return {} if moe is None else {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "moe_shared_expert_intermediate_size": moe.shared_size,
        "norm_topk_prob": moe.renormalise,
        "routed_scaling_factor": moe.scale,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
    }  # fmt: skip


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
    count = metadata.count(".block_count") - metadata.count(".nextn_predict_layers", 0)
    if metadata.has(".moe_latent_size"):
        raise UnsupportedModelError(f"{file.path}: Nemotron-H with experts over latents is not supported")
    widths = metadata.by_layer(".feed_forward_length", count)
    attention = attention_layers(metadata, count)
    mlps = [layer for layer in range(count) if widths[layer]]
    layers = [layer for layer in range(count) if not widths[layer] and layer not in attention]
    sigmoid: dict[str, Any] = {"scoring": "sigmoid", "group_best": 1, "num_groups": 1, "top_groups": 1}
    return decoder_from_gguf(
        file,
        metadata.without_zeros(".attention.head_count_kv", ".attention.head_count", ".feed_forward_length"),
        name,
        num_layers=count,
        activation="relu2",
        gated_mlp=False,
        ropes=(),
        moe=experts_from_gguf(file, metadata, **sigmoid),
        recurrent=mamba_from_gguf(file, metadata, layers, attention, mlp_layers=tuple(mlps)),
    )


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    size = config.intermediate_size if config.moe is None else config.moe.expert_size
    if config.moe is not None and config.moe.num_groups > 1:
        raise UnsupportedModelError("GGUF cannot describe Nemotron-H with groups of experts")
    widths = [size * config.has_mlp(layer) for layer in range(config.num_layers)]
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
        router="mixer.gate",
        selection_bias="mixer.gate.e_score_correction_bias",
        expert_up=("mixer.experts.{}.up_proj",),
        expert_down="mixer.experts.{}.down_proj",
        shared_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
        final_norm="backbone.norm_f",
        recurrent=mamba_names("mixer"),
    ),
    folder_source=EitherPrefix,
    gguf_architectures=("nemotron_h", "nemotron_h_moe"),
    written_as="nemotron_h",
    written_with_experts="nemotron_h_moe",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(
        GGUF_LLAMA,
        mlp_norm="attn_norm",
        up=("ffn_up",),
        expert_up=("ffn_up_exps",),
        shared_up=("ffn_up_shexp",),
        recurrent=GGUF_MAMBA,
    ),
    gguf_activation="relu2",
    gguf_entries=gguf_entries,
)
