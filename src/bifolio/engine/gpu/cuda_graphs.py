"""Whole decode steps on a GPU, from the last token to the next one, captured once per batch size and replayed.

Everything a step reads lies in permanent rows on the device: block tables, lengths, last tokens, sampling parameters.
The host sends differences, in one small copy, and a list of the rows that take part; the chosen tokens stay on the
device, where the next step finds them, and reach the host asynchronously. So a step can be launched before the host
has seen the tokens of the one before it.

    state    |<-- tables [slots, blocks] -->|<- lengths ->|<- last tokens ->|<- temperatures ->|<-- seeds -->|
    changes  (place, number) pairs into the state, which is one array of 32-bit words

On the CPU the same step runs at once instead of being captured: tests of everything around it need no GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bifolio.engine.executor import ModelRunner
from bifolio.engine.gpu.shared_prefix import SharedWork, share_work
from bifolio.kernels.interface import Array, AttentionPhase, AttentionSegment, AttentionShape, Batch
from bifolio.model.transformer import forward
from bifolio.sampling.filters import cool
from bifolio.sampling.noise import uniform
from bifolio.sampling.weights import draw, to_weights

IN_FLIGHT = 4  # staging buffers that take turns; more than the steps that are ever launched ahead


def batch_sizes(most: int) -> list[int]:
    """Sizes that steps are captured for: a step of fewer rows is padded to the next."""
    sizes = [1, 2, 4, 8, 16, 24, *range(32, 256, 16), 256]
    sizes += range(320, max(most, 320) + 64, 64)
    return [*(size for size in sizes if size < most), most]


class RowState:
    """The rows of all slots, on the host and on the device, and the differences between the two."""

    def __init__(self, max_slots: int, max_blocks: int, device: str) -> None:
        self.max_slots, self.max_blocks, self.device = max_slots, max_blocks, device
        sizes = [max_slots * max_blocks, max_slots, max_slots, max_slots, 2 * max_slots]
        offsets = np.cumsum([0, *sizes])
        offsets[4:] += offsets[4] % 2  # seeds are 64-bit words
        self._tables, self._lengths, self._tokens, self._temperatures, self._seeds = (int(o) for o in offsets[:5])
        self.words = torch.zeros(int(offsets[5]), dtype=torch.int32, device=device)
        self.tables = self.words[: max_slots * max_blocks].view(max_slots, max_blocks)  # i32
        self.lengths = self.words[self._lengths : self._lengths + max_slots]  # i32  tokens in the cache
        self.tokens = self.words[self._tokens : self._tokens + max_slots]  # i32  not in the cache yet
        self.temperatures = self.words[self._temperatures : self._temperatures + max_slots].view(torch.float32)
        self.seeds = self.words[self._seeds : self._seeds + 2 * max_slots].view(torch.int64)
        self._places: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []

    def set_blocks(self, slot: int, first: int, block_ids: list[int]) -> None:
        start = slot * self.max_blocks + first
        self._add(np.arange(start, start + len(block_ids)), np.asarray(block_ids, dtype=np.int32))

    def set_rows(
        self, slots: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, temperatures: np.ndarray, seeds: np.ndarray
    ) -> None:
        """Bring sequences up to date that ran outside captured steps."""
        self._add(self._lengths + slots, lengths)
        self._add(self._tokens + slots, tokens)
        self._add(self._temperatures + slots, temperatures.astype(np.float32).view(np.int32))
        words = np.ascontiguousarray(seeds.astype(np.uint64)).view(np.int32).reshape(-1, 2)  # little end first
        for half in range(2):
            self._add(self._seeds + 2 * slots + half, words[:, half])

    def take_changes(self) -> np.ndarray | None:
        """i32[2, count]: places and numbers since the last call, the latest for each place."""
        if not self._places:
            return None
        places, numbers = np.concatenate(self._places), np.concatenate(self._numbers)
        self._places, self._numbers = [], []
        if len(self._last_of(places)) < len(places):
            last = self._last_of(places)
            places, numbers = places[last], numbers[last]
        return np.stack([places, numbers]).astype(np.int32)

    @staticmethod
    def _last_of(places: np.ndarray) -> np.ndarray:
        """Index of each place's last mention."""
        _, first_from_behind = np.unique(places[::-1], return_index=True)
        return len(places) - 1 - first_from_behind

    def _add(self, places: np.ndarray, numbers: np.ndarray) -> None:
        self._places.append(places)
        self._numbers.append(np.asarray(numbers, dtype=np.int32))


@dataclass(slots=True)
class CapturedStep:
    """One batch size: its inputs, which stay where they are, and the graph that reads them."""

    rows: torch.Tensor  # i32[r]  slot of each row; -1: padding
    token_ids: torch.Tensor  # i32[r]
    positions: torch.Tensor  # i32[r]
    places: torch.Tensor  # i64[r]
    contexts: torch.Tensor  # i32[r]
    table_rows: torch.Tensor  # i32[r]
    turn: torch.Tensor  # i32[1]  which row of `chosen` the last launch wrote
    chosen: torch.Tensor  # i32[IN_FLIGHT, r]  on the host; the device writes there itself, launches take turns
    pieces: dict[int, Any] = field(default_factory=dict)
    graph: Any = None
    shared: Any = None  # SharedRows: what rows share is read once for all; None: in this step nothing is
    sent: bytes = b""  # what `rows` and `shared` hold
    next_turn: int = 0

    @classmethod
    def new(cls, size: int, device: str) -> CapturedStep:
        def integers(dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        chosen = torch.zeros((IN_FLIGHT, size), dtype=torch.int32, pin_memory=device.startswith("cuda"))
        turn = torch.full((1,), IN_FLIGHT - 1, dtype=torch.int32, device=device)
        tokens, positions, places, contexts = integers(), integers(), integers(torch.int64), integers()
        return cls(integers().fill_(-1), tokens, positions, places, contexts, integers(), turn, chosen)

    def take_turn(self) -> torch.Tensor:
        """i32[r]: where the next launch will write what it chose."""
        place = self.chosen[self.next_turn]
        self.next_turn = (self.next_turn + 1) % IN_FLIGHT
        return place


@dataclass(slots=True)
class Ticket:
    """A step that was launched; its tokens arrive later."""

    tokens: torch.Tensor  # i32[r] on the host, once the event has come
    count: int
    event: Any = None

    def wait(self) -> np.ndarray:
        """i32[count]"""
        if self.event is not None:
            self.event.synchronize()
        return self.tokens.numpy()[: self.count].copy()


class GraphRecorder:
    """Records what is launched on a GPU, to be replayed as one; all graphs share the memory for what lies between."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pool: Any = None
        cuda: Any = torch.cuda
        self._stream: Any = cuda.Stream(device) if device.startswith("cuda") else None

    def record(self, run: Callable[[], None]) -> Any:
        """Run once for real (kernels are compiled, libraries warm up), then record; inputs are padding meanwhile."""
        torch.cuda.synchronize(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.synchronize(self._device)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # torch.cuda.graph() would also collect garbage, for up to a second
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        self._pool = self._pool or graph.pool()
        return graph


class CapturedDecode:
    """Launches decode steps over permanent rows."""

    def __init__(self, runner: ModelRunner, state: RowState, max_model_len: int) -> None:
        self.runner, self.state = runner, state
        self.device = state.device
        self.on_gpu = self.device.startswith("cuda")
        self._sizes = batch_sizes(state.max_slots)
        self._steps: dict[tuple[int, bool, bool], CapturedStep] = {}  # by size, draws, shares
        self._parts: Any = None  # SharedRows whose room for results serves all steps
        self.recorder = GraphRecorder(self.device)
        self._ring: deque[tuple[torch.Tensor, Any]] = deque()  # pinned staging buffers and the events that free them
        self._shapes = tuple({layer.shape.window: layer.shape for layer in runner.weights.layers}.values())
        prepare = getattr(runner.kernels, "prepare_rotation", None)
        if prepare is not None:
            for frequencies, scale in zip(runner.weights.inverse_frequencies, runner.weights.rope_scales, strict=True):
                prepare(frequencies, scale, max_model_len)

    # -- launching ---------------------------------------------------------------------------------------------------
    def launch(self, slots: np.ndarray, *, draws: bool, work: SharedWork | None = None) -> Ticket:
        """Run the next step of these slots (i32[n]) after everything launched before; does not wait for anything.

        `work` says what the rows share, in the order of `slots`.
        """
        size = self._sizes[bisect_left(self._sizes, len(slots))]
        step = self._step(size, draws, work is not None)
        rows = np.full(size, -1, dtype=np.int32)
        rows[: len(slots)] = slots
        self._send(
            rows if work is None else np.concatenate([rows, shared_words(work, size, step.shared.max_items)]), step
        )
        tokens = step.take_turn()
        if step.graph is None:
            self._run(step, draws)
            return Ticket(tokens, len(slots))
        step.graph.replay()
        return Ticket(tokens, len(slots), _recorded_event())

    def capture_all(self, *, draws: bool = False) -> None:
        """Capture every batch size now, the largest first, instead of when it is first needed."""
        for size in reversed(self._sizes):
            self._step(size, draws, shares=False)

    def _send(self, rows: np.ndarray, step: CapturedStep) -> None:
        """Rows, what they share and pending changes to the device, in one copy; nothing when it has them already."""
        changes = self.state.take_changes()
        wanted = rows.tobytes()
        if changes is None and step.sent == wanted:
            return
        step.sent = wanted
        if not self.on_gpu:
            _put(torch.from_numpy(rows), step)
            if changes is not None:
                self.state.words[torch.from_numpy(changes[0]).long()] = torch.from_numpy(changes[1])
            return
        words = rows if changes is None else np.concatenate([rows, changes.reshape(-1)])
        staged = self._staging(len(words))
        staged.numpy()[: len(words)] = words
        on_device = staged[: len(words)].to(self.device, non_blocking=True)
        _put(on_device[: len(rows)], step)
        if changes is not None:
            from bifolio.kernels.triton.device_state import apply_changes

            apply_changes(self.state.words, on_device[len(rows) :].view(2, -1))
        self._ring.append((staged, _recorded_event()))

    def _staging(self, count: int) -> torch.Tensor:
        """A pinned buffer that no copy reads any more."""
        if len(self._ring) >= IN_FLIGHT:
            buffer, event = self._ring.popleft()
            event.synchronize()
            if len(buffer) >= count:
                return buffer
        return torch.empty(max(4096, 2 * count), dtype=torch.int32, pin_memory=True)

    # -- one step ------------------------------------------------------------------------------------------------------
    def _step(self, size: int, draws: bool, shares: bool) -> CapturedStep:
        key = size, draws, shares
        if key not in self._steps:
            step = CapturedStep.new(size, self.device)
            step.shared = self._shared_rows(size) if shares else None
            if self.on_gpu:
                step.graph = self.recorder.record(lambda: self._run(step, draws))
                step.turn.fill_(IN_FLIGHT - 1)  # recording took a turn
            self._steps[key] = step
        return self._steps[key]

    @property
    def can_share(self) -> bool:
        """Whether steps can read once what several rows share: some layer sees the whole context."""
        kernels: Any = self.runner.kernels
        has_kernel = kernels.name == "triton" and not kernels.deterministic
        return has_kernel and any(shape.window is None for shape in self._shapes)

    def share(self, slots: np.ndarray, tables: np.ndarray, lengths: np.ndarray) -> SharedWork | None:
        """What these slots share, given all block tables (i32[slots, blocks]) and the slots' cached tokens."""
        if len(slots) < 2 or not self.can_share:
            return None
        from bifolio.kernels.triton.shared import MAX_ITEMS, rows_per_item
        from bifolio.kernels.triton.tiles import TILE

        size = self.runner.storage.block_size
        own = tables[slots, : int(lengths.max()) // size + 1]
        return share_work(own, lengths, size, TILE, rows_per_item(self._full_shape), MAX_ITEMS)

    @property
    def _full_shape(self) -> AttentionShape:
        """Of layers that see the whole context: what is shared is shared in these."""
        return next(shape for shape in self._shapes if shape.window is None)

    def _shared_rows(self, size: int) -> Any:
        from bifolio.kernels.triton.shared import new_shared_rows

        shared = new_shared_rows(size, self._full_shape, self.device)
        self._parts = self._parts or shared
        shared.mixed, shared.weight = self._parts.mixed, self._parts.weight
        return shared

    def _run(self, step: CapturedStep, draws: bool) -> None:
        state, runner = self.state, self.runner
        self._begin(step)
        segment = AttentionSegment(
            phase=AttentionPhase.DECODE,
            token_start=0,
            token_end=len(step.rows),
            query_starts=np.arange(len(step.rows) + 1, dtype=np.int32),
            context_lens=step.contexts,
            block_tables=state.tables,
            fresh=False,
            max_query_len=1,
            max_context_len=state.max_blocks * runner.storage.block_size,
        )
        stage: Any = getattr(runner.kernels, "stage_decode", None)
        if stage is None:
            segment = self._without_padding(segment, step)
        else:
            stage(segment, step.table_rows, step.pieces, self._shapes, step.shared)
        batch = Batch(step.token_ids, step.positions, step.places, (segment,), None)
        self._finish(step, forward(runner.weights, batch, runner.kernels, runner.storage), draws)

    def _begin(self, step: CapturedStep) -> None:
        state, size = self.state, self.runner.storage.block_size
        if self.runner.kernels.name == "triton":
            from bifolio.kernels.triton.device_state import begin_step

            begin_step(
                step.rows, state.tables, state.lengths, state.tokens, step.token_ids, step.positions, step.places,
                step.contexts, step.table_rows, step.turn, size, IN_FLIGHT,
            )  # fmt: skip
            return
        step.turn.add_(1).remainder_(IN_FLIGHT)
        real, slots = step.rows >= 0, step.rows.clamp_min(0).long()
        position = torch.where(real, state.lengths[slots], 0)
        block = torch.where(real, state.tables[slots, position.long() // size], 0)
        step.token_ids.copy_(torch.where(real, state.tokens[slots], 0).clamp_min(0))
        step.positions.copy_(position)
        step.places.copy_(block.long() * size + position % size)
        step.contexts.copy_(torch.where(real, position + 1, 0))
        step.table_rows.copy_(slots)

    def _finish(self, step: CapturedStep, logits: Array, draws: bool) -> None:
        state = self.state
        if self.runner.kernels.name == "triton":
            from bifolio.kernels.triton.sampling import choose_tokens

            choose_tokens(
                logits, step.rows, state.lengths, state.tokens, state.temperatures, state.seeds, step.turn,
                step.chosen, draws=draws,
            )  # fmt: skip
            return
        real = torch.nonzero(step.rows >= 0)[:, 0]
        slots = step.rows[real].long()
        tokens = _choose(logits[real], state, slots)
        step.chosen[int(step.turn), real] = tokens
        state.tokens[slots] = tokens
        state.lengths[slots] += 1

    def _without_padding(self, segment: AttentionSegment, step: CapturedStep) -> AttentionSegment:
        """For kernel sets that know neither rows nor padding: the tables themselves, and a context of 1 at least."""
        lengths = step.contexts.clamp_min(1)
        longest = int(lengths.max())
        tables = self.state.tables[step.table_rows.long()] * (step.rows >= 0)[:, None]
        return replace(segment, context_lens=lengths, block_tables=tables, max_context_len=longest)


def _put(words: torch.Tensor, step: CapturedStep) -> None:
    """Rows, then what they share."""
    step.rows.copy_(words[: len(step.rows)])
    if step.shared is not None:
        step.shared.words.copy_(words[len(step.rows) :])


def shared_words(work: SharedWork, size: int, max_items: int) -> np.ndarray:
    """What `size` rows share, padding included, as the device keeps it: i32[4 * (size + max_items)]."""
    words: np.ndarray = np.zeros(4 * (size + max_items), dtype=np.int32)
    for index, part in enumerate((work.skipped, work.first, work.count, work.offset)):
        words[index * size : index * size + len(part)] = part
    words[4 * size :] = -1
    words[4 * size : 4 * size + work.items.size] = work.items.reshape(-1)
    return words


def _recorded_event() -> Any:
    """Comes when everything launched so far is done."""
    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record()
    return event


def _choose(logits: torch.Tensor, state: RowState, slots: torch.Tensor) -> torch.Tensor:
    """i32[r] as `Sampler` chooses, for rows that are greedy or draw from the whole distribution."""
    temperatures = state.temperatures[slots].numpy()
    best = torch.where(torch.isnan(logits), -torch.inf, logits).argmax(dim=-1)
    cooled = cool(logits, np.where(temperatures > 0, temperatures, np.float32(1.0)).astype(np.float32))
    noise = uniform(state.seeds[slots].numpy(), (state.lengths[slots] + 1).numpy())
    drawn = draw(to_weights(cooled), noise)
    tokens = torch.where(torch.from_numpy(temperatures > 0), drawn, best)
    return torch.where((cooled > -torch.inf).any(dim=-1), tokens, -1).to(torch.int32)
