"""One forward pass as data: `Batch`, a flat list of tokens, and the recurrent states that it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.kernels.attention_interface import AttentionSegment
from bifolio.kernels.operands import Adapter, Array


@dataclass(frozen=True, slots=True)
class StateUse:
    """The recurrent states that a batch reads and writes; sequences are in the order of the segments.

    A state is read before the first token of its sequence and written after given tokens. Several sequences may read
    the same one; a state that is written is written once, and read by no other sequence of the batch than its own.
    State 0 is empty: all zeros, never written.
    """

    starts: Array  # i32[s + 1]  first token of each sequence in the batch
    reads: Array  # i32[s]      the state that each sequence continues
    writes: Array  # i32[t]      the state written after each token; -1: none

    def arrays(self) -> tuple[Array, Array, Array]:
        return self.starts, self.reads, self.writes


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """The adapters of a batch: one of each token, or none."""

    loaded: tuple[Adapter, ...]  # prepared by the kernel set
    rows: NDArray[np.int32]  # i32[t]  index into `loaded` of each token's adapter, on the host; -1: none
    staged: Any = None  # the form of a device that keeps the slots (`DeviceSlots.stage_adapters`)

    def changes_experts(self, site: int) -> bool:
        """Whether one of the adapters changes the experts of a layer, and not its other products alone."""
        return any(site in adapter.experts for adapter in self.loaded)


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. Arrays are the kernel set's own; lengths and starts of segments, and states, are the host's."""

    token_ids: Array  # i32[t]
    positions: (
        Array  # i32[t]  index of each token in its sequence, + LONG_ROPE if the long set rotates it (`long_rope`)
    )
    cache_index: Array | None  # i64[t]  block * block_size + offset of K and V; None: no cache
    segments: tuple[AttentionSegment, ...]  # partition [0, t)
    logit_rows: Array | None  # i32[r]  tokens whose logits are computed; None: all
    max_position: int = 0  # largest index of a token in its sequence
    states: StateUse | None = None  # None: the model has no recurrent layers, or there is no cache (from empty states)
    given: Array | None = None  # [t, width]  rows that a network reads beside its tokens, or in their place
    taps: Array | None = None  # f32[t, width]  filled by `tap`; None: taps are not read
    adapters: AdapterUse | None = None  # None: no token has one

    @property
    def logit_adapters(self) -> AdapterUse | None:
        """The adapters of the rows whose logits are computed, of a batch in host memory."""
        if self.adapters is None or self.logit_rows is None:
            return self.adapters
        return replace(self.adapters, rows=self.adapters.rows[np.asarray(self.logit_rows)])

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])
