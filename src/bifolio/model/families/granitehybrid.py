"""Granite 4 (hybrid): Mamba-2 layers, attention without positions in a few, an MLP or experts beside a shared MLP.

Folders whose layers all have attention are read, too; they have rope. GGUF files of Bamba have this architecture, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, MoeConfig, RecurrentConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.families.granitemoe import HF_NAMES
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf, in_any_layer
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.gguf.recurrent_entries import (
    attention_entries,
    attention_layers,
    recurrent_entries,
    recurrent_from_gguf,
)
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, kinds_of_layers
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.tensor_names import GGUF_LLAMA

ATTENTION = ("attention", "full_attention")  # as old and new folders name it
NO_LIMITS = (0.0, float("inf"))
GGUF_MAMBA = RecurrentNames(
    (("ssm_in", 5),),
    conv="ssm_conv1d",
    output="ssm_out",
    decay="ssm_a",
    bias="ssm_dt.bias",
    skip="ssm_d",
    norm="ssm_norm",
    column_vectors=True,
    grouped_norm=True,
)


def mamba_names(prefix: str) -> RecurrentNames:
    """The names in folders."""
    return RecurrentNames(
        ((f"{prefix}.in_proj", 5),),
        conv=f"{prefix}.conv1d",
        output=f"{prefix}.out_proj",
        decay=f"{prefix}.A_log",
        bias=f"{prefix}.dt_bias",
        skip=f"{prefix}.D",
        norm=f"{prefix}.norm",
        conv_axis=True,
        decay_log=True,
    )


def dt_limits(raw: Raw) -> tuple[float, float]:
    limits = raw.get("time_step_limit")
    if limits is None:
        return NO_LIMITS
    low, high = (float(end["__float__"] if isinstance(end, dict) else end) for end in limits)
    return low, high


# -- folders ----------------------------------------------------------------------------------------------------------
def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    layers = range(int(raw["num_hidden_layers"]))
    kinds = kinds_of_layers(raw, raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * len(layers))
    attention = tuple(layer for layer in layers if kinds[layer] in ATTENTION)
    shared, moe = int(raw.get("shared_intermediate_size", 1024)), None
    if raw.get("num_local_experts"):
        moe = MoeConfig(
            num_experts=int(raw["num_local_experts"]),
            top_k=int(raw["num_experts_per_tok"]),
            expert_size=int(raw["intermediate_size"]),
            renormalise=True,
            shared_size=shared,
        )
    sizes = {} if moe is not None else {"intermediate_size": shared}
    positions: dict[str, Any] = {} if raw.get("position_embedding_type") == "rope" else {"ropes": ()}
    mamba = tuple(layer for layer in layers if layer not in attention)
    if not mamba and positions:
        raise UnsupportedModelError("a Granite model without recurrent layers and without positions is not supported")
    return decoder_from_hf(
        {**raw, **sizes},
        name,
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        attention_scale=float(raw.get("attention_multiplier", 1.0)),
        logit_scale=1 / float(raw.get("logits_scaling", 1.0)),
        recurrent=mamba_from_hf(raw, mamba, attention) if mamba else None,
        moe=moe,
        **positions,
    )


def mamba_from_hf(raw: Raw, layers: tuple[int, ...], attention: tuple[int, ...]) -> RecurrentConfig:
    inner, heads = int(raw.get("mamba_expand", 2)) * int(raw["hidden_size"]), int(raw.get("mamba_n_heads", 128))
    groups, state = int(raw.get("mamba_n_groups", 1)), int(raw.get("mamba_d_state", 256))
    return RecurrentConfig(
        "mamba",
        layers=layers,
        attention_layers=attention,
        width=int(raw.get("mamba_d_conv", 4)),
        channels=inner + 2 * groups * state,
        heads=heads,
        groups=groups,
        key_size=state,
        value_size=inner // heads,
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        projection_bias=bool(raw.get("mamba_proj_bias", False)),
        norm_first=False,
        norm_groups=groups,
        dt_limits=dt_limits(raw),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    own, moe = config.recurrent, config.moe
    layers = range(config.num_layers)
    fields = {
        **decoder_to_hf(config),
        "attention_bias": config.qkv_bias,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.scale,
        "logits_scaling": 1 / config.logit_scale,
        "position_embedding_type": "rope" if config.ropes else None,
        "layer_types": ["attention" if layer in config.attention_layers else "mamba" for layer in layers],
        "num_local_experts": 0 if moe is None else moe.num_experts,
        "num_experts_per_tok": 0 if moe is None else moe.top_k,
        "intermediate_size": config.intermediate_size if moe is None else moe.expert_size,
        "shared_intermediate_size": config.intermediate_size if moe is None else moe.shared_size,
    }
    return fields if own is None else fields | mamba_to_hf(config, own)


def mamba_to_hf(config: ModelConfig, own: RecurrentConfig) -> dict[str, Any]:
    return {
        "mamba_expand": own.inner_size // config.hidden_size,
        "mamba_n_heads": own.heads,
        "mamba_d_head": own.value_size,
        "mamba_n_groups": own.groups,
        "mamba_d_state": own.key_size,
        "mamba_d_conv": own.width,
        "mamba_conv_bias": own.conv_bias,
        "mamba_proj_bias": own.projection_bias,
        **({} if own.dt_limits == NO_LIMITS else {"time_step_limit": list(own.dt_limits)}),
    }


def folder_family(config: ModelConfig) -> str:
    """Heads that are rotated in part are those of Bamba."""
    return "bamba" if any(rope.rotary_dim < config.head_dim for rope in config.ropes) else config.architecture


# -- GGUF files -------------------------------------------------------------------------------------------------------
def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    count = metadata.count(".block_count")
    attention = attention_layers(metadata, count)
    recurrent = mamba_from_gguf(file, metadata, [layer for layer in range(count) if layer not in attention], attention)
    positions: dict[str, Any] = {} if metadata.flag(".rope.scaling.finetuned", True) else {"ropes": ()}
    moe = experts_from_gguf(file, metadata, renormalise=True)
    return decoder_from_gguf(
        file,
        metadata.without_zeros(".attention.head_count_kv"),
        name,
        recurrent=recurrent,
        moe=moe,
        embedding_scale=metadata.number(".embedding_scale", 1.0) or 1.0,
        residual_scale=metadata.number(".residual_scale", 1.0) or 1.0,
        logit_scale=1 / (metadata.number(".logit_scale", 1.0) or 1.0),
        **positions,
    )


def mamba_from_gguf(
    file: GgufFile, metadata: Metadata, layers: list[int], attention: list[int], **overrides: Any
) -> RecurrentConfig:
    """Mamba-2 as files of every architecture describe it: the gate comes before a norm of each group."""
    count = metadata.count(".block_count")
    fields: dict[str, Any] = {
        "conv_bias": in_any_layer(file, count, "ssm_conv1d.bias"),
        "has_norm": in_any_layer(file, count, "ssm_norm.weight"),
        "norm_first": False,
        "norm_groups": metadata.count(".ssm.group_count"),
    }
    return recurrent_from_gguf(metadata, "mamba", layers, attention, **{**fields, **overrides})


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    return {
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1 / config.logit_scale,
        "rope.scaling.finetuned": bool(config.ropes),
        **attention_entries(config),
        **mamba_entries(config),
    }


def mamba_entries(config: ModelConfig) -> dict[str, Value]:
    own = config.recurrent
    if own is not None and not own.conv_bias:
        raise UnsupportedModelError("GGUF cannot describe Mamba layers whose convolution has no bias")
    if own is not None and own.has_norm and (own.norm_first or own.norm_groups != own.groups):
        raise UnsupportedModelError("GGUF describes Mamba layers only with a norm of each group behind the gate")
    return recurrent_entries(config)


FAMILY = Family(
    name="granitehybrid",
    hf_types=("granitemoehybrid",),
    hf_class="GraniteMoeHybridForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(
        HF_NAMES,
        up=HF_NAMES.shared_up,
        down=HF_NAMES.shared_down,
        recurrent=mamba_names("mamba"),
    ),
    folder_family=folder_family,
    gguf_architectures=("granitehybrid",),
    written_as="granitehybrid",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(GGUF_LLAMA, recurrent=GGUF_MAMBA),
    gguf_interleaved=True,
    gguf_entries=gguf_entries,
)
