"""The array and memory members of `KernelSet` for sets on numpy arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from bifolio.config import KVDtype
from bifolio.kernels.interface import (
    Array,
    Batch,
    DeviceSlots,
    ExpertCalls,
    Network,
    Ranks,
    RoutedExperts,
    SharedMlp,
    SleepMemory,
    SlotSizes,
    Storage,
)
from bifolio.kernels.storage import CacheLayout, KVStorage


class HostArrays:
    """Numpy arrays; a pass is complete when its call returns, so no step is launched ahead."""

    array_backend = "numpy"
    device = "cpu"
    kv_dtype: KVDtype = "f32"
    deterministic = True
    launches_ahead = False
    stores_fp8 = False
    activation_planes = 0
    ranks: Ranks | None = None
    arena: SleepMemory | None = None

    def build_facts(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def from_host(self, array: np.ndarray) -> Array:
        return array

    def to_host(self, array: Array) -> np.ndarray:
        return np.asarray(array)

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(array)

    def with_rows(self, x: Array, parts: Sequence[tuple[np.ndarray, Array]]) -> Array:
        width = max(x.shape[1], *(rows.shape[1] for _, rows in parts))
        found = np.zeros((len(x), width), np.float32)
        found[:, : x.shape[1]] = x
        for places, rows in parts:
            found[places] = rows
        return found

    @property
    def for_towers(self) -> Any:
        return self

    def new_storage(self, layout: CacheLayout) -> KVStorage:
        return KVStorage(layout)

    def memory(self) -> None:
        return None

    def on_padding(self) -> AbstractContextManager[None]:
        return nullcontext()

    def expert_calls(self) -> ExpertCalls | None:
        return None

    def release_memory(self) -> None:
        """Do nothing: no memory is cached."""

    def use_arena(self) -> None:
        """Do nothing: pages of the host can be given back as they are."""

    def device_slots(self, network: Network, storage: Storage, sizes: SlotSizes) -> DeviceSlots | None:
        return None

    def top_logprobs(
        self, logits: Array, rows: np.ndarray, count: int
    ) -> Callable[[], tuple[np.ndarray, np.ndarray]] | None:
        return None

    def fold_shared(self, routed: RoutedExperts, shared: SharedMlp) -> RoutedExperts | None:
        return None

    def all_gather(self, x: Array, widths: tuple[int, ...]) -> Array:
        return x if self.ranks is None else self.ranks.all_gather(x, widths)

    def all_reduce(self, x: Array) -> Array:
        return x if self.ranks is None else self.ranks.all_reduce(x)

    def join_columns(self, parts: Sequence[tuple[Array, int, int]], factors: Array | None = None) -> Array:
        joined = np.concatenate([x[:, start:stop] for x, start, stop in parts], axis=1)
        return joined if factors is None else joined * factors

    def take(self, x: Array, rows: Array) -> Array:
        return x[rows]

    def sum_rows(self, x: Array, starts: Array) -> Array:
        return np.add.reduceat(x, starts[:-1], axis=0, dtype=np.float64).astype(np.float32)

    def given(self, batch: Batch, width: int, *, exact: bool = False) -> Array:
        return batch.given

    def tap(self, x: Array, column: int, batch: Batch) -> None:
        if batch.taps is not None:
            batch.taps[:, column : column + x.shape[1]] = x
