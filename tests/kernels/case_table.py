"""The table of operation cases: each runs one member of `KernelSet` and returns arrays that the reference gives too.

A case draws its inputs in numpy, moves them with `from_host`, and returns its results through `to_host`; so the same
function runs on the set under test and on `ReferenceKernels`. Inputs are multiples that bf16 holds exactly: a set in
16 bits and the reference in f32 read the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bifolio.kernels.interface import AttentionPhase, AttentionSegment, KernelSet
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.quant.formats import bf16_to_f32, f32_to_bf16
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator

Outputs = tuple[np.ndarray, ...]
Run = Callable[[KernelSet, np.random.Generator], Outputs]
TOLERANCE = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}  # of the largest value of an output, by the set's dtype


class Case(NamedTuple):
    """One check of one member of the protocol."""

    member: str
    run: Run
    rounding: float  # error that the set may add on purpose: rounded activations, converted weights


CASES: dict[str, Case] = {}


def case(member: str, detail: str = "", *, rounding: float = 0.0) -> Callable[[Run], Run]:
    """Enter a function in the table under `member detail`."""

    def enter(run: Run) -> Run:
        name = f"{member} {detail}".strip()
        if name in CASES:
            raise ValueError(f"two cases are called {name!r}")
        CASES[name] = Case(member, run, rounding)
        return run

    return enter


def protocol_members(protocol: type) -> set[str]:
    """Attributes and methods of a protocol class and of the protocols it extends."""
    found: set[str] = set()
    for part in protocol.__mro__:
        if part.__module__.startswith(protocol.__module__.rpartition(".")[0]):
            names = {*vars(part), *vars(part).get("__annotations__", {})}
            found |= {name for name in names if not name.startswith("_")}
    return found


def worst_error(result: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, as a share of the largest expected value; infinite where NaNs do not match."""
    if result.shape != expected.shape:
        raise AssertionError(f"shape {result.shape} instead of {expected.shape}")
    if not expected.size:
        return 0.0
    if expected.dtype.kind in "iub":
        return 0.0 if np.array_equal(result, expected) else np.inf
    ours, theirs = result.astype(np.float64), expected.astype(np.float64)
    if not np.array_equal(np.isnan(ours), np.isnan(theirs)):
        return np.inf
    difference = np.nan_to_num(np.abs(ours - theirs), nan=0.0)
    return float(difference.max() / max(np.nan_to_num(np.abs(theirs), nan=0.0).max(), 1e-30))


# -- inputs -----------------------------------------------------------------------------------------------------------
def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """f32 of bf16's precision."""
    return bf16_to_f32(f32_to_bf16(rng.standard_normal(shape).astype(np.float32) * np.float32(scale)))


def activations(kernels: KernelSet, values: np.ndarray) -> Any:
    """Values as an earlier operation of the set would have left them: in its own dtype, on its device."""
    array = kernels.from_host(values)
    if kernels.array_backend == "numpy":
        return array
    from bifolio.kernels.torch_dtypes import DTYPES

    return array.to(DTYPES[kernels.kv_dtype])


# -- sequences in a cache ----------------------------------------------------------------------------------------------
class Context(NamedTuple):
    """Sequences of random keys and values in blocks of random order."""

    storage: KVStorage
    tables: np.ndarray  # i32[s, max_blocks]  padded with block 0
    index: np.ndarray  # i64[sum of lengths]  place of every token, sequence after sequence


def new_context(
    kernels: KernelSet,
    rng: np.random.Generator,
    lengths: Sequence[int],
    kv_heads: int,
    dim: int,
    block_size: int = 16,
    shared_values: bool = False,
) -> Context:
    """A cache with these sequences in layer 1 of two; every other entry is NaN."""
    counts = [-(-length // block_size) for length in lengths]
    layout = CacheLayout(2, 2 + sum(counts), block_size, kv_heads, dim, kernels.kv_dtype, True, shared_values)
    storage = kernels.new_storage(layout)
    free = 1 + rng.permutation(1 + sum(counts)).astype(np.int32)
    tables = np.zeros((len(lengths), max(counts) + 1), np.int32)
    places, used = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = free[used : used + count]
        used += count
        positions = np.arange(length)
        places.append(tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size)
    index = np.concatenate(places)
    keys, values = (normal(rng, len(index), kv_heads, dim) for _ in range(2))
    storage.write(1, kernels.from_host(index), activations(kernels, keys), activations(kernels, values))
    return Context(storage, tables, index)


def segment_over(
    kernels: KernelSet,
    phase: AttentionPhase,
    queries: Sequence[int],
    lengths: Sequence[int],
    tables: np.ndarray | None,
    token_start: int = 0,
) -> AttentionSegment:
    """The last `queries[i]` of `lengths[i]` tokens of each sequence."""
    counts = np.array(queries, np.int32)
    own = None if tables is None else kernels.from_host(tables)
    orchestrator = PrefillOrchestrator if phase is AttentionPhase.PREFILL else DecodeOrchestrator
    return orchestrator.lay_out(np.array(lengths, np.int32) - counts, counts, own, token_start)
