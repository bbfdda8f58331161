"""Cases of recurrent layers: every kind, in passes of any size, with states that are shared and written anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from case_table import Outputs, activations, case, normal

from bifolio.kernels.interface import Batch, KernelSet, Norm, Recurrence, StateUse
from bifolio.kernels.storage import CacheLayout, KVStorage, StateLayout


def new_recurrence(rng: np.random.Generator, kind: str, **changes: object) -> Recurrence:
    """Random parameters; the sizes are no multiples of a vector unless `changes` says so."""
    sizes = {"heads": 6, "groups": 2, "key_size": 12, "value_size": 20, "width": 4, **changes}
    heads, groups, key, value = (int(sizes[name]) for name in ("heads", "groups", "key_size", "value_size"))
    if kind == "conv":
        channels, width = int(changes.get("channels", 37)), int(changes.get("width", 3))
        conv = Recurrence("conv", 1, width, channels, conv_weight=normal(rng, channels, width, scale=0.5))
        return replace(conv, conv_bias=normal(rng, channels)) if changes.get("conv_bias") else conv
    if kind == "selective":
        channels, width = int(changes.get("channels", 150)), int(sizes["width"])
        return Recurrence(
            kind, 1, width, channels, 1, 1, key, channels,
            conv_weight=normal(rng, channels, width, scale=0.5),
            conv_bias=normal(rng, channels, scale=0.5),
            decay=-np.exp(rng.uniform(-2, 1, (key, channels))).astype(np.float32),
            skip=normal(rng, channels),
        )  # fmt: skip
    if kind == "lru":
        channels, width = int(changes.get("channels", 150)), int(sizes["width"])
        return Recurrence(
            kind, 1, width, channels, 1, 1, 1, channels,
            conv_weight=normal(rng, channels, width, scale=0.5),
            conv_bias=normal(rng, channels, scale=0.5),
            decay=-np.exp(rng.uniform(-6, 1, channels)).astype(np.float32),
            bias=normal(rng, 2 * channels),
        )  # fmt: skip
    if kind == "shift":
        mixes, channels = int(changes.get("mixes", 6)), int(changes.get("channels", 37))
        factors = rng.uniform(0, 1, (mixes, channels)).astype(np.float32)
        return Recurrence(kind, 1, 2, channels, factors=factors, column=channels, window=2 * channels)
    if kind == "rwkv":
        inner, centred = heads * value, normal(rng, heads * value, scale=0.5)
        return Recurrence(
            kind, 1, 2, 2 * inner, heads, heads, key, value, factors=normal(rng, 3, heads * key),
            norm=Norm(1 + normal(rng, inner, scale=0.25), centred, 64e-5, True),
            mixes_values=bool(changes.get("mixes_values", True)),
        )  # fmt: skip
    if kind == "keyed":
        groups = heads
    channels = 2 * groups * key + heads * value
    norm_size = value if kind in ("delta", "keyed") else heads * value
    recurrence = Recurrence(
        kind, 1, int(sizes["width"]), channels, heads, groups, key, value,
        conv_weight=normal(rng, channels, int(sizes["width"]), scale=0.5),
        conv_bias=normal(rng, channels, scale=0.5) if kind == "mamba" else None,
        decay=-np.exp(rng.uniform(-2, 1, heads)).astype(np.float32),
        bias=normal(rng, heads * (key if kind == "keyed" else 1)),
        skip=normal(rng, heads) if kind == "mamba" else None,
        norm=Norm(1 + normal(rng, norm_size, scale=0.25), None, 1e-5),
        norm_first=kind != "mamba",
    )  # fmt: skip
    if kind == "lightning":
        recurrence = replace(
            recurrence, width=1, conv_weight=np.ones((channels, 1), np.float32), bias=None, norm_first=True
        )
    options = {name: value for name, value in changes.items() if name not in sizes or name == "width"}
    return replace(recurrence, **options)  # type: ignore[arg-type]


KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "conv": ("conv", {}),
    "conv of even sizes, biased": ("conv", {"channels": 64, "conv_bias": True}),
    "conv of width 7": ("conv", {"width": 7}),
    "delta": ("delta", {}),
    "delta of even sizes": ("delta", {"heads": 4, "key_size": 32, "value_size": 32}),
    "delta of larger rates": ("delta", {"rate_scale": 2.0}),
    "delta, tiled": ("delta", {"tiled": True, "heads": 4, "key_size": 16, "value_size": 48}),
    "keyed": ("keyed", {}),
    "keyed of even sizes": ("keyed", {"heads": 4, "key_size": 32, "value_size": 32}),
    "keyed, bounded": ("keyed", {"decay_bound": 5.0, "rate_scale": 1.5}),
    "mamba": ("mamba", {"dt_limits": (0.05, 1.0)}),
    "mamba of even sizes": ("mamba", {"heads": 4, "key_size": 32, "value_size": 16, "norm_groups": 2}),
    "mamba of width 7": ("mamba", {"width": 7}),
    "mamba, norm first": ("mamba", {"norm_first": True, "norm_groups": 2}),
    "selective": ("selective", {}),
    "selective of even sizes": ("selective", {"channels": 64, "key_size": 16}),
    "lightning": ("lightning", {}),
    "lightning of even sizes": ("lightning", {"heads": 4, "groups": 4, "key_size": 32, "value_size": 32}),
    "lru": ("lru", {}),
    "lru of even sizes": ("lru", {"channels": 64}),
    "shift": ("shift", {}),
    "shift of even sizes": ("shift", {"channels": 64, "mixes": 1}),
    "rwkv": ("rwkv", {}),
    "rwkv of even sizes": ("rwkv", {"heads": 3, "key_size": 64, "value_size": 64}),
    "rwkv in the first layer": ("rwkv", {"key_size": 16, "value_size": 16, "mixes_values": False}),
    "mamba without norm": ("mamba", {"norm": None, "skip": None, "width": 2}),
}


def state_storage(kernels: KernelSet, r: Recurrence, num_states: int) -> KVStorage:
    """States of two layers; the recurrence uses the second."""
    state = StateLayout(r.width, r.window or r.channels, r.heads, r.key_size, r.value_size)
    return kernels.new_storage(
        CacheLayout(1, 1, 1, 1, 32, kernels.kv_dtype, states=(state, state), num_states=num_states)
    )


def state_batch(kernels: KernelSet, starts: Sequence[int], reads: Sequence[int], writes: Sequence[int]) -> Batch:
    arrays = (kernels.from_host(np.array(values, np.int32)) for values in (starts, reads, writes))
    tokens = kernels.from_host(np.zeros(len(writes), np.int32))
    return Batch(tokens, tokens, None, (), None, states=StateUse(*arrays))


def states_of(kernels: KernelSet, storage: KVStorage, r: Recurrence, ids: Sequence[int]) -> Outputs:
    """Copies of the states of the recurrence's layer."""
    arrays = storage.convolutions[r.layer], storage.recurrent[r.layer]
    return tuple(kernels.to_host(array)[list(ids)].copy() for array in arrays)


def recur_in_chunks(
    kernels: KernelSet, recurrence: Recurrence, rows: np.ndarray, chunk: int, storage: KVStorage, state: int = 1
) -> np.ndarray:
    """One sequence from the empty state in passes of `chunk` tokens; its state is written in place after each."""
    own, outputs = kernels.prepare_recurrence(recurrence), []
    for first in range(0, len(rows), chunk):
        part = rows[first : first + chunk]
        batch = state_batch(kernels, [0, len(part)], [state if first else 0], [*[-1] * (len(part) - 1), state])
        outputs.append(kernels.to_host(kernels.recur(activations(kernels, part), own, batch, storage)))
    return np.concatenate(outputs)


def _enter(name: str, kind: str, changes: dict[str, object]) -> None:
    @case("recur", name)
    def recur(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
        """A prompt, a decode step of three sequences that share a state, a mixed pass, a step in place, no cache."""
        recurrence = new_recurrence(rng, kind, **changes)
        own, storage = kernels.prepare_recurrence(recurrence), state_storage(kernels, recurrence, 8)
        rows = normal(rng, 30, recurrence.in_features)
        found = []

        def run(part: slice, starts: list[int], reads: list[int], writes: list[int]) -> None:
            batch = state_batch(kernels, starts, reads, writes)
            found.append(kernels.to_host(kernels.recur(activations(kernels, rows[part]), own, batch, storage)))

        run(slice(0, 13), [0, 13], [0], [*[-1] * 5, 2, *[-1] * 6, 1])
        run(slice(13, 16), [0, 1, 2, 3], [1, 1, 2], [3, 4, 2])
        run(slice(16, 26), [0, 1, 3, 10], [3, 0, 4], [3, -1, 5, -1, 6, 7, -1, -1, -1, 4])
        run(slice(26, 27), [0, 1], [1], [1])
        batch = replace(state_batch(kernels, [0, 3], [1], [-1] * 3))
        found.append(kernels.to_host(kernels.recur(activations(kernels, rows[27:]), own, batch, storage)))
        empty = states_of(kernels, storage, recurrence, [0])
        assert not any(part.any() for part in empty), "state 0 was written"
        return *found, *states_of(kernels, storage, recurrence, range(1, 8))


for _name, (_kind, _changes) in KINDS.items():
    _enter(_name, _kind, _changes)


@case("scan")
def scan(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    return scanned(kernels, rng, "selective")


@case("scan", "lru")
def scan_units(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    return scanned(kernels, rng, "lru")


def scanned(kernels: KernelSet, rng: np.random.Generator, kind: str) -> Outputs:
    """A prompt that writes states on its way, sequences that continue them, a decode step, and no cache."""
    recurrence = new_recurrence(rng, kind)
    own, storage = kernels.prepare_recurrence(recurrence), state_storage(kernels, recurrence, 6)
    rows = normal(rng, 23, recurrence.scan_features)
    found = []

    def run(part: slice, starts: list[int], reads: list[int], writes: list[int]) -> None:
        batch = state_batch(kernels, starts, reads, writes)
        found.append(kernels.to_host(kernels.scan(activations(kernels, rows[part]), own, batch, storage)))

    run(slice(0, 9), [0, 9], [0], [*[-1] * 3, 2, *[-1] * 4, 1])
    run(slice(9, 16), [0, 1, 4, 7], [1, 2, 0], [1, -1, 4, 3, -1, -1, 5])
    run(slice(16, 19), [0, 1, 2, 3], [3, 0, 5], [3, 2, 5])
    alone = state_batch(kernels, [0, 4], [1], [-1] * 4)
    found.append(kernels.to_host(kernels.scan(activations(kernels, rows[19:]), own, alone, storage)))
    return *found, storage_copy(kernels, storage, recurrence)


def storage_copy(kernels: KernelSet, storage: KVStorage, recurrence: Recurrence) -> np.ndarray:
    return kernels.to_host(storage.recurrent[recurrence.layer]).copy()


@case("recur", "without a cache")
def recur_without_states(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Two segments of fresh sequences."""
    from case_table import segment_over

    from bifolio.kernels.interface import AttentionPhase

    recurrence = new_recurrence(rng, "delta")
    rows = normal(rng, 9, recurrence.in_features)
    segments = (
        segment_over(kernels, AttentionPhase.PREFILL, [2, 3], [2, 3], None),
        segment_over(kernels, AttentionPhase.PREFILL, [4], [4], None, 5),
    )
    tokens = kernels.from_host(np.zeros(9, np.int32))
    batch = Batch(tokens, tokens, None, segments, None)
    own = kernels.prepare_recurrence(recurrence)
    return (kernels.to_host(kernels.recur(activations(kernels, rows), own, batch, None)),)


@case("prepare_recurrence")
def prepare_recurrence(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The sizes stay; the parameters may move."""
    recurrence = new_recurrence(rng, "mamba")
    own = kernels.prepare_recurrence(recurrence)
    assert (own.in_features, own.out_features, own.layer) == (recurrence.in_features, recurrence.out_features, 1)
    return (kernels.to_host(own.decay),)
