"""Tiny hybrid models with random weights: attention in some layers, a recurrence in the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio.config import CacheConfig, ModelConfig, RecurrentConfig, RopeConfig, layers_of
from bifolio.model.keyed_tensors import KeyedNames
from bifolio.model.loaded import LoadedModel
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.rwkv_tensors import LowRankNames, RwkvNames
from bifolio.model.tensor_names import HF_LLAMA, assemble
from bifolio.model.unit_tensors import UnitNames

VOCABULARY = 61
NAMES = {
    "conv": RecurrentNames((("conv.in", 3),), "conv.conv", "conv.out"),
    "delta": RecurrentNames(
        (("mix.qkvz", 4), ("mix.ba", 2)), "mix.conv", "mix.out", "mix.a", "mix.dt", norm="mix.norm"
    ),
    "keyed": RecurrentNames(
        (("mix.qkv", 3), ("mix.beta", 1), ("mix.low", 2)),
        "mix.conv",
        "mix.out",
        "mix.a",
        "mix.dt",
        norm="mix.norm",
        keyed=KeyedNames("mix.decay", "mix.gate"),
    ),
    "wide conv": RecurrentNames((("conv.in", 3),), "conv.conv", "conv.out"),
    "lightning": RecurrentNames((("light.in", 4),), "", "light.out", norm="light.norm"),
    "lru": RecurrentNames(
        (("unit.in", 2),), "unit.conv", "unit.out", units=UnitNames("unit.recurrent", "unit.input", "unit.a")
    ),
    "rwkv": RecurrentNames(
        rwkv=RwkvNames(
            tuple(f"mix.{name}" for name in "rwkvag"),
            query="mix.query",
            key="mix.key",
            value="mix.value",
            output="mix.out",
            factors=("mix.removed", "mix.added", "mix.bonus"),
            norm="mix.norm",
            decay=LowRankNames("decay.down", "decay.up", "decay.bias"),
            rate=LowRankNames("rate.down", "rate.up", "rate.bias"),
            gate=LowRankNames("gate.down", "gate.up"),
            mix=LowRankNames("values.down", "values.up", "values.bias"),
            mlp_shift="mlp.mix",
        )
    ),
    "mamba": RecurrentNames((("ssm.in", 5),), "ssm.conv", "ssm.out", "ssm.a", "ssm.dt", "ssm.d", norm="ssm.norm"),
}


def recurrent_config(kind: str) -> RecurrentConfig:
    common: dict[str, Any] = {"width": 3}
    if kind in ("conv", "wide conv"):
        width = 3 if kind == "conv" else 7
        return RecurrentConfig("conv", channels=32, has_norm=False, **{**common, "width": width})
    if kind == "lightning":
        return RecurrentConfig(kind, width=1, channels=96, heads=4, groups=4, key_size=8, value_size=8)
    if kind == "lru":
        one = {"heads": 1, "groups": 1, "key_size": 1, "has_norm": False, "conv_bias": True}
        return RecurrentConfig(kind, channels=40, value_size=40, gate_blocks=4, **one, **common)
    if kind == "rwkv":
        square = {"heads": 4, "groups": 4, "key_size": 8, "value_size": 8, "ranks": (6, 5, 9, 4), "norm_eps": 64e-5}
        return RecurrentConfig(kind, width=2, channels=64, has_norm=False, **square)
    sizes = {"heads": 4, "groups": 2, "key_size": 8, "value_size": 8, "channels": 64}
    if kind == "delta":
        return RecurrentConfig("delta", **sizes, **common)
    if kind == "keyed":
        return RecurrentConfig("keyed", **{**sizes, "groups": 4, "channels": 96}, step_rank=6, **common)
    return RecurrentConfig("mamba", conv_bias=True, norm_first=False, norm_groups=2, **sizes, **common)


def hybrid_config(kind: str, **changes: Any) -> ModelConfig:
    """A recurrence in layers 0 and 2 of three."""
    config = ModelConfig(
        "hybrid", VOCABULARY, 32, 3, 4, 2, 8, 48, 512, ropes=(RopeConfig(1e4, 8),), recurrent=recurrent_config(kind),
        eos_token_ids=(2,), layers=layers_of(3, attention=(False, True, False), recurrent=(True, False, True)),
    )  # fmt: skip
    gates = {"attention_gate": True, "gate_by_head": True} if kind == "wide conv" else {}
    return replace(config, **{**gates, **changes})


@cache
def tiny_hybrid(kind: str, seed: int = 0) -> LoadedModel:
    """A model of one kind of recurrence (`NAMES`); "wide conv" also has gates on the heads (LFM3)."""
    generator, config = np.random.default_rng(seed), hybrid_config(kind)

    def matrix(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return (generator.standard_normal(shape) * 0.2).astype(np.float32)

    def vector(name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = generator.standard_normal(shape)
        if "norm" in name:
            return (1 + 0.1 * values).astype(np.float32)
        if name.endswith(".a"):
            return (-0.1 - np.abs(values)).astype(np.float32)  # states that are remembered for some tokens
        return (0.3 * values).astype(np.float32)

    names = replace(HF_LLAMA, recurrent=NAMES[kind], gate="self_attn.gate_proj")
    weights = assemble(config, names, matrix, vector)
    return LoadedModel(Path(f"hybrid-{kind}"), config, weights=weights)


@contextmanager
def spaced_checkpoints(tokens: int | None) -> Iterator[None]:
    """Models that are opened here have checkpoints of their states at this distance; None: by their size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bifolio.api.engine_options.CacheConfig", partial(CacheConfig, checkpoint_tokens=tokens))
        yield
