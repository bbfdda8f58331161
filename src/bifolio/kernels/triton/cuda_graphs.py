"""Decode steps as CUDA graphs: captured once for each of a few batch sizes and replayed as one launch.

All inputs of a step are on the device: the slots' state (`DeviceState`) and a list of the slots in the batch. So a step
can be launched before the host has the tokens of the previous one. A graph with sampling writes the tokens to the slots
and to pinned host memory; a graph up to the logits is used for batches that the host samples.

Without a GPU the step runs directly in Triton's interpreter instead of being captured: tests need no GPU.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from bifolio.garbage import no_garbage_collection
from bifolio.kernels.interface import (
    Array,
    AttentionShape,
    Batch,
    KernelSet,
    Network,
    StateUse,
    Storage,
    TokenScores,
)
from bifolio.kernels.shared_prefix import SharedWork
from bifolio.kernels.triton.adapter_slots import AdapterSlots, Layout, StagedAdapters
from bifolio.kernels.triton.attention import Attention
from bifolio.kernels.triton.device_state import DeviceState, begin_states, begin_step, recorded_event
from bifolio.kernels.triton.edits import SlotEdits
from bifolio.kernels.triton.logprobs import read_scores
from bifolio.kernels.triton.sampling import Mode, Results, choose_tokens
from bifolio.kernels.triton.scan_plan import StagedStates
from bifolio.kernels.triton.shared_attention import SharedRows, new_shared_rows

TURNS = 4  # results of a step that lie in host memory at once; more than the steps that are ever in flight
StepMode = Mode | None  # draws of the captured step; None: it ends with the logits


class StepKey(NamedTuple):
    """A captured step."""

    size: int
    mode: StepMode
    shares: bool = False  # prefixes are shared
    is_near: bool = False  # few sequences with short contexts
    adapts: Layout | None = None  # of the adapters that it serves; None: rows have none


def batch_sizes(most: int) -> list[int]:
    """Batch sizes that graphs are captured for: smaller batches are padded to the next size."""
    sizes = [1, 2, 4, 8, 16, 24, *range(32, 256, 16), 256]
    sizes += range(320, max(most, 320) + 64, 64)
    return [*(size for size in sizes if size < most), most]


def few_batch_sizes(most: int) -> list[int]:
    """Fewer batch sizes, of rarer steps: all of them are captured at the start too."""
    sizes = [8, 16, 32, 48, 64, 96, 128, 192, 256, *range(384, max(most, 384) + 128, 128)]
    return [*(size for size in sizes if size < most), most]


class GraphKernels(KernelSet, Protocol):
    """A kernel set whose attention can be planned on the device, for any lengths."""

    dtype: torch.dtype
    attention: Attention
    has_host_experts: bool

    def stage_states(self, states: StagedStates) -> None: ...

    def tabulate(self, rotations: Sequence[tuple[Array, float]], max_position: int) -> None: ...


@dataclass(slots=True)
class DecodeStep:
    """The graph of one batch size and its static inputs."""

    rows: torch.Tensor  # i32[r]  slot of each row; -1: padding
    token_ids: torch.Tensor  # i32[r]
    positions: torch.Tensor  # i32[r]
    index: torch.Tensor  # i64[r]  cache index of K and V
    contexts: torch.Tensor  # i32[r]
    table_rows: torch.Tensor  # i32[r]
    turn: torch.Tensor  # i32[1]  which part of `results` the last launch wrote
    results: Results  # on the host; the device writes there itself, TURNS launches take turns
    pieces: dict[int, Any] = field(default_factory=dict)
    graph: Any = None
    states: StagedStates | None = None  # of a model with recurrent layers; the device sets reads and writes
    shared: SharedRows | None = None  # shared prefixes, read once for all rows; None: no sharing
    adapters: StagedAdapters | None = None  # of the rows; None: they have none
    is_near: bool = False  # few sequences with short contexts
    logits: Any = None  # f32[r, vocab] of a step without sampling
    sent: bytes = b""  # present contents of `rows` and `shared`
    next_turn: int = 0

    @classmethod
    def new(cls, size: int, device: str, mode: StepMode) -> DecodeStep:
        def integers(dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        results = Results.new(TURNS, size, mode, pinned=device.startswith("cuda"))
        turn = torch.full((1,), TURNS - 1, dtype=torch.int32, device=device)
        tokens, positions, index, contexts = integers(), integers(), integers(torch.int64), integers()
        return cls(integers().fill_(-1), tokens, positions, index, contexts, integers(), turn, results)

    def take_turn(self) -> int:
        """Which part of `results` the next launch will write."""
        turn, self.next_turn = self.next_turn, (self.next_turn + 1) % TURNS
        return turn

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


@dataclass(slots=True)
class DeviceTokens:
    """Tokens of a launched step, in flight."""

    results: Results
    turn: int
    count: int
    event: Any = None  # comes when the results are on the host
    order: np.ndarray | None = None  # i64[count]  row of each token in the order of the launch; None: as they are

    def wait(self) -> np.ndarray:
        """i32[count]"""
        if self.event is not None:
            self.event.synchronize()
        return self._own(self.results.chosen)

    def scores(self) -> TokenScores | None:
        return None if self.results.scores is None else read_scores(self._own(self.results.scores))

    def _own(self, results: torch.Tensor) -> np.ndarray:
        own: np.ndarray = results[self.turn].numpy()[: self.count]
        return own.copy() if self.order is None else own[self.order]


_FREE_STREAMS: dict[str, list[Any]] = {}  # of each device: streams that no recorder holds


class GraphRecorder:
    """Captures CUDA graphs; all graphs share one memory pool for intermediate results."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = self._taken_stream() if device.startswith("cuda") else None

    def _taken_stream(self) -> Any:
        """A stream of a closed engine, or a new one: cuBLAS keeps a workspace of 32 MiB for each stream that it saw."""
        free = _FREE_STREAMS.setdefault(self._device, [])
        cuda: Any = torch.cuda
        try:
            stream = free.pop()
        except IndexError:
            stream = cuda.Stream(self._device)
        weakref.finalize(self, free.append, stream)
        return stream

    def record(self, run: Callable[[], None]) -> Any:
        """Run once on padding, which compiles kernels and warms up libraries, then capture."""
        torch.cuda.synchronize(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.synchronize(self._device)
        graph: Any = torch.cuda.CUDAGraph()
        # The collector would free graphs and pinned memory of dropped engines, which invalidates a capture.
        # `torch.cuda.graph` collects before each capture instead, for up to a second.
        with torch.cuda.stream(self._stream), no_garbage_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        self._pool = self._pool or graph.pool()
        return graph


class DecodeGraphs:
    """Launches decode steps on the state of the slots."""

    def __init__(
        self,
        kernels: GraphKernels,
        network: Network,
        storage: Storage,
        state: DeviceState,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._kernels, self._network, self._storage, self.state = kernels, network, storage, state
        self.edits: SlotEdits | None = None  # of steps whose mode has edits
        self.adapters = adapters
        self._sizes = batch_sizes(state.num_slots)
        self._few_sizes = few_batch_sizes(state.num_slots)  # of steps with shared prefixes
        self._logit_sizes = sorted({1, *self._few_sizes})  # of steps without sampling
        self._steps: dict[StepKey, DecodeStep] = {}
        self._parts: SharedRows | None = None  # whose room for results serves all steps
        self.recorder = GraphRecorder(state.device)
        self._shapes = tuple({shape.reach: shape for shape in network.shapes}.values())

    # -- launching ---------------------------------------------------------------------------------------------------
    def launch(
        self,
        slots: np.ndarray,
        mode: StepMode,
        work: SharedWork | None = None,
        *,
        is_near: bool = False,
        numbers: np.ndarray | None = None,
    ) -> DecodeStep:
        """Run the next step of these slots (i32[n]) after everything launched before; does not wait for anything.

        `work` describes prefixes shared by the slots, in their order. `is_near`: all contexts are short. `numbers`: of
        the adapters of the slots (`AdapterSlots.numbers_of`); None: they have none.
        """
        shares = work is not None
        sizes = self._sizes_of(mode, shares)
        size = sizes[bisect_left(sizes, len(slots))]
        layout = None if numbers is None or self.adapters is None else self.adapters.layout
        step = self._step(StepKey(size, mode, shares, is_near and not shares and self._can_be_near(size), layout))
        rows = np.full(size, -1, dtype=np.int32)
        rows[: len(slots)] = slots
        if work is not None and step.shared is not None:
            rows = np.concatenate([rows, shared_words(work, size, step.shared.max_items)])
        if numbers is not None and self.adapters is not None:
            rows = np.concatenate([rows, self.adapters.words(numbers, size)])
        self._send(rows, step)
        if step.graph is None:
            self._run(step, mode)
        else:
            step.graph.replay()
        return step

    def tokens(self, step: DecodeStep, count: int, order: np.ndarray | None = None) -> DeviceTokens:
        """The tokens of the step that was just launched."""
        event = recorded_event() if step.graph is not None else None
        return DeviceTokens(step.results, step.take_turn(), count, event, order)

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

    @property
    def keys(self) -> set[StepKey]:
        """The keys of all steps that exist."""
        return set(self._steps)

    def _send(self, rows: np.ndarray, step: DecodeStep) -> None:
        """Send rows and pending updates of the slots; unchanged rows are not sent again."""
        wanted = rows.tobytes()
        if step.sent == wanted:
            self.state.send()
        else:
            step.put(self.state.send_words(rows))
            step.sent = wanted

    # -- one step ------------------------------------------------------------------------------------------------------
    def _step(self, key: StepKey) -> DecodeStep:
        size, mode = key.size, key.mode
        if key not in self._steps:
            step = DecodeStep.new(size, self.state.device, mode)
            step.is_near = key.is_near
            step.shared = self._shared_rows(size) if key.shares else None
            if key.adapts is not None and self.adapters is not None:
                step.adapters = self.adapters.staged(size)
            if self._storage.layout.num_states:
                starts = torch.arange(size + 1, dtype=torch.int32, device=self.state.device)
                use = StateUse(starts, torch.zeros_like(step.rows), torch.full_like(step.rows, -1))
                step.states = StagedStates.of(use, self.state.device, chunked=not self._kernels.deterministic)
            if self.state.on_gpu:
                step.graph = self.recorder.record(lambda: self._run(step, mode))
                step.turn.fill_(TURNS - 1)  # recording used one buffer
            self._steps[key] = step
        return self._steps[key]

    def _shared_rows(self, size: int) -> SharedRows:
        shared = new_shared_rows(size, full_shape(self._shapes), self.state.device)
        self._parts = self._parts or shared
        shared.mixed, shared.weight = self._parts.mixed, self._parts.weight
        return shared

    def _run(self, step: DecodeStep, mode: StepMode) -> None:
        state, size = self.state, len(step.rows)
        begin_step(
            step.rows, state.tables, state.lengths, state.ropes, state.tokens, step.token_ids, step.positions,
            step.index, step.contexts, step.table_rows, step.turn, self._storage.block_size, TURNS,
        )  # fmt: skip
        if step.states is not None:
            begin_states(step.rows, state, step.states.reads, step.states.writes)
            self._kernels.stage_states(step.states)
        segment = replace(
            self._network.decode_segment(size),
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
        if mode is None:
            step.logits = logits
        else:
            choose_tokens(logits, step.rows, state, step.turn, step.results, mode, self.edits)


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
