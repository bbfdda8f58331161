"""Decode steps: a pass over the newest tokens of some slots, and the draw of the next ones, in one launch.

All inputs of a step are on the device: the slots' state (`DeviceState`) and a list of the slots in the batch. So a step
can be launched before the host has the tokens of the previous one. A step with sampling writes the tokens to the slots
and to pinned host memory; one up to the logits is used for batches that the host samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from bifolio.kernels.interface import Array, AttentionShape, Batch, KernelSet, Network, StateUse, Storage
from bifolio.kernels.shared_prefix import SharedWork
from bifolio.kernels.triton.adapter_slots import AdapterSlots, Layout, StagedAdapters
from bifolio.kernels.triton.attention import Attention
from bifolio.kernels.triton.device_state import DeviceState, begin_states, begin_step
from bifolio.kernels.triton.edits import SlotEdits
from bifolio.kernels.triton.graphs.graph_cache import GraphCache
from bifolio.kernels.triton.graphs.results import TURNS, TokenPass
from bifolio.kernels.triton.graphs.sizes import batch_sizes, few_batch_sizes, padded
from bifolio.kernels.triton.sampling import Mode, choose_tokens
from bifolio.kernels.triton.scan_plan import StagedStates
from bifolio.kernels.triton.shared_attention import SharedRows, new_shared_rows

StepMode = Mode | None  # draws of the step; None: it ends with the logits


class StepKey(NamedTuple):
    """A decode step."""

    size: int
    mode: StepMode
    shares: bool = False  # prefixes are shared
    is_near: bool = False  # few sequences with short contexts
    adapts: Layout | None = None  # of the adapters that it serves; None: rows have none


class GraphKernels(KernelSet, Protocol):
    """A kernel set whose attention can be planned on the device, for any lengths."""

    dtype: torch.dtype
    attention: Attention
    has_host_experts: bool

    def stage_states(self, states: StagedStates) -> None: ...

    def tabulate(self, rotations: Sequence[tuple[Array, float]], max_position: int) -> None: ...


class DecodePass(TokenPass):
    """A decode step of one key."""

    def __init__(self, steps: Decodes, key: StepKey) -> None:
        super().__init__(key.size, key.mode, steps.state.device)

        def integers(dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(key.size, dtype=dtype, device=steps.state.device)

        self._steps, self.is_near = steps, key.is_near
        self.rows = integers().fill_(-1)  # i32[r]  slot of each row; -1: padding
        self.token_ids, self.positions, self.contexts = integers(), integers(), integers()  # i32[r]
        self.index = integers(torch.int64)  # i64[r]  cache index of K and V
        self.table_rows = integers()  # i32[r]
        self.pieces: dict[int, Any] = {}
        self.states = steps.new_states(self.rows)  # of a model with recurrent layers; the device sets reads and writes
        self.shared = steps.shared_rows(key.size) if key.shares else None  # shared prefixes, read once for all rows
        self.adapters: StagedAdapters | None = None  # of the rows; None: they have none
        if key.adapts is not None and steps.adapters is not None:
            self.adapters = steps.adapters.staged(key.size)
        self.logits: Any = None  # f32[r, vocab] of a step without sampling
        self.sent = b""  # present contents of `rows`, `shared` and `adapters`

    def put(self, words: torch.Tensor) -> None:
        """Set `rows`, then the words of `shared` and of `adapters`."""
        size = len(self.rows)
        self.rows.copy_(words[:size])
        if self.shared is not None:
            end = size + len(self.shared.words)
            self.shared.words.copy_(words[size:end])
            size = end
        if self.adapters is not None:
            self.adapters.put(words[size:])

    def run(self) -> None:
        self._steps.run(self)


class Decodes:
    """Launches decode steps on the state of the slots."""

    def __init__(
        self,
        kernels: GraphKernels,
        network: Network,
        storage: Storage,
        state: DeviceState,
        cache: GraphCache,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._kernels, self._network, self._storage, self.state = kernels, network, storage, state
        self.edits: SlotEdits | None = None  # of steps whose mode has edits
        self.adapters = adapters
        self._cache = cache
        self._sizes = batch_sizes(state.num_slots)
        self._few_sizes = few_batch_sizes(state.num_slots)  # of steps with shared prefixes
        self._logit_sizes = sorted({1, *self._few_sizes})  # of steps without sampling
        self._parts: SharedRows | None = None  # whose room for results serves all steps
        self._shapes = tuple({shape.reach: shape for shape in network.shapes}.values())

    def launch(
        self,
        slots: np.ndarray,
        mode: StepMode,
        work: SharedWork | None = None,
        *,
        is_near: bool = False,
        numbers: np.ndarray | None = None,
    ) -> DecodePass:
        """Run the next step of these slots (i32[n]) after everything launched before; does not wait for anything.

        `work` describes prefixes shared by the slots, in their order. `is_near`: all contexts are short. `numbers`: of
        the adapters of the slots (`AdapterSlots.numbers_of`); None: they have none.
        """
        shares = work is not None
        size = padded(self._sizes_of(mode, shares), len(slots))
        layout = None if numbers is None or self.adapters is None else self.adapters.layout
        step = self._step(StepKey(size, mode, shares, is_near and not shares and self._can_be_near(size), layout))
        rows = np.full(size, -1, dtype=np.int32)
        rows[: len(slots)] = slots
        if work is not None and step.shared is not None:
            rows = np.concatenate([rows, shared_words(work, size, step.shared.max_items)])
        if numbers is not None and self.adapters is not None:
            rows = np.concatenate([rows, self.adapters.words(numbers, size)])
        self._send(rows, step)
        step.launch()
        return step

    def capture_all(self, mode: StepMode, *, shares: bool = False, layout: Layout | None = None) -> None:
        """Capture every batch size now, the largest first, instead of when it is first needed.

        `layout`: of the adapters that the steps serve.
        """
        for size in reversed(self._sizes_of(mode, shares)):
            self._step(StepKey(size, mode, shares, adapts=layout))
            if not shares and self._can_be_near(size):
                self._step(StepKey(size, mode, is_near=True, adapts=layout))

    def _can_be_near(self, size: int) -> bool:
        return self._kernels.attention.can_be_near(size, self._shapes, self._storage)

    def _sizes_of(self, mode: StepMode, shares: bool) -> list[int]:
        if shares:
            return self._few_sizes
        return self._logit_sizes if mode is None else self._sizes

    def _step(self, key: StepKey) -> DecodePass:
        return self._cache.find(key, lambda: DecodePass(self, key))

    def _send(self, rows: np.ndarray, step: DecodePass) -> None:
        """Send rows and pending updates of the slots; unchanged rows are not sent again."""
        wanted = rows.tobytes()
        if step.sent == wanted:
            self.state.send()
        else:
            step.put(self.state.send_words(rows))
            step.sent = wanted

    # -- one step ------------------------------------------------------------------------------------------------------
    def new_states(self, rows: torch.Tensor) -> StagedStates | None:
        if not self._storage.layout.num_states:
            return None
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=self.state.device)
        use = StateUse(starts, torch.zeros_like(rows), torch.full_like(rows, -1))
        return StagedStates.of(use, self.state.device, chunked=not self._kernels.deterministic)

    def shared_rows(self, size: int) -> SharedRows:
        shared = new_shared_rows(size, full_shape(self._shapes), self.state.device)
        self._parts = self._parts or shared
        shared.mixed, shared.weight = self._parts.mixed, self._parts.weight
        return shared

    def run(self, step: DecodePass) -> None:
        state, turn = self.state, step.ring.turn
        begin_step(
            step.rows, state.tables, state.lengths, state.ropes, state.tokens, step.token_ids, step.positions,
            step.index, step.contexts, step.table_rows, turn, self._storage.block_size, TURNS,
        )  # fmt: skip
        if step.states is not None:
            begin_states(step.rows, state, step.states.reads, step.states.writes)
            self._kernels.stage_states(step.states)
        segment = replace(
            self._network.decode_segment(len(step.rows)),
            block_tables=state.tables,
            context_lens=step.contexts,
            max_context_len=state.max_blocks * self._storage.block_size,
        )
        self._kernels.attention.stage_decode(
            segment, step.table_rows, step.pieces, self._shapes, self._storage, step.shared, is_near=step.is_near
        )
        use = None if step.states is None else step.states.use
        own = None if step.adapters is None else step.adapters.use
        batch = Batch(step.token_ids, step.positions, step.index, (segment,), None, states=use, adapters=own)
        logits = self._network.forward(self._kernels, batch, self._storage)
        if step.mode is None:
            step.logits = logits
        else:
            choose_tokens(logits, step.rows, state, turn, step.ring.results, step.mode, self.edits)


def full_shape(shapes: tuple[AttentionShape, ...]) -> AttentionShape:
    """The shape of a layer with full attention: prefixes are shared in such layers only."""
    return next(shape for shape in shapes if shape.window is None)


def shared_words(work: SharedWork, size: int, max_items: int) -> np.ndarray:
    """i32[4 * (size + max_items)]: the device's form of shared work for `size` rows, padding included."""
    words: np.ndarray = np.zeros(4 * (size + max_items), dtype=np.int32)
    for index, part in enumerate((work.skipped, work.first, work.count, work.offset)):
        words[index * size : index * size + len(part)] = part
    words[4 * size :] = -1
    words[4 * size : 4 * size + work.items.size] = work.items.reshape(-1)
    return words
