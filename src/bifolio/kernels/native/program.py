"""Recording the network: its forward function runs once on handles, and each call becomes one native operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bifolio.kernels.interface import (
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Batch,
    Experts,
    HeadLinear,
    Heads,
    Linear,
    Network,
    Norm,
    Recurrence,
    Rotation,
    Router,
    Routing,
    Storage,
)
from bifolio.kernels.native.arguments import ACTIVATION_CODES, Register, floats, native_norm
from bifolio.kernels.native.streams import StreamRecorder

if TYPE_CHECKING:
    from bifolio.kernels.native.kernel_set import NativeKernels


PHASE_CODES = {AttentionPhase.PREFILL: 0, AttentionPhase.DECODE: 1}  # selects the plan of attention
TOKEN_IDS, POSITIONS, LOGIT_ROWS = object(), object(), object()  # placeholders of the batch's arrays


def native_segment(segment: AttentionSegment) -> tuple[Any, ...]:
    """The arguments of the extension module for a segment."""
    phase = PHASE_CODES[segment.phase]
    return phase, segment.token_start, segment.query_starts, segment.context_lens, segment.block_tables


class NativeProgram:
    """A recorded network; replayed for any batch with a cache in one native call."""

    def __init__(self, kernels: NativeKernels, network: Network) -> None:
        self._kernels = kernels
        self._bound: tuple[Storage | None, Any, Any] = (
            None,
            None,
            None,
        )  # the storage of the last run; its native forms
        recorder = ProgramRecorder(kernels)
        batch = Batch(TOKEN_IDS, POSITIONS, None, (), LOGIT_ROWS)
        network.forward(recorder, batch, None)  # type: ignore[arg-type]  # values are handles, not arrays
        self._program = recorder.program
        self._logit_widths = recorder.logit_widths

    def run(self, batch: Batch, storage: Storage) -> np.ndarray:
        """Logits f32[r, vocab] of one forward pass."""
        if self._bound[0] is not storage:
            self._bound = storage, self._kernels.cache(storage), self._kernels.states(storage)
        rows = len(batch.token_ids) if batch.logit_rows is None else len(batch.logit_rows)
        logits = np.empty((rows, self._program.vocab_size), np.float32)
        use = batch.states
        self._program.run(
            self._bound[1],
            batch.token_ids,
            batch.positions,
            batch.cache_index,
            batch.logit_rows,
            [native_segment(segment) for segment in batch.segments],
            self._kernels.share_prefixes,
            logits,
            given=batch.given,
            taps=batch.taps,
            pool=self._kernels.pool,
            states=self._bound[2],
            **({} if use is None else {"starts": use.starts, "reads": use.reads, "writes": use.writes}),
        )
        return self._kernels.all_gather(logits, self._logit_widths) if self._logit_widths else logits


class ProgramRecorder(StreamRecorder):
    """A kernel set that records operations instead of computing: its arrays are registers of the program."""

    def __init__(self, kernels: NativeKernels) -> None:
        self.kernels = kernels
        self.program = kernels.native.Program()
        self.logit_widths: tuple[int, ...] = ()  # columns of the logits on each rank; empty: this rank computes all

    def embed(self, table: Any, ids: object, scale: float, *, is_partial: bool = False) -> Register:
        return Register(self.program.embed(table, scale, ids is POSITIONS, is_partial))

    def rotation(self, inverse_frequencies: np.ndarray, scale: float, positions: object) -> Rotation:
        frequencies = np.ascontiguousarray(inverse_frequencies, np.float32).reshape(-1)
        cosine, sine = self.program.rotation(frequencies, scale, inverse_frequencies.ndim == 2)
        return Rotation(Register(cosine), Register(sine))

    def norm(self, x: Register, norm: Norm) -> Register:
        return Register(self.program.norm(x.number, native_norm(self.kernels.native, norm)))

    def add(self, x: Register, y: Register, scale: float = 1.0) -> Register:
        return Register(self.program.add(x.number, y.number, scale))

    def add_norm(self, x: Register, delta: Register, norm: Norm) -> tuple[Register, Register]:
        total, normed = self.program.add_norm(x.number, delta.number, native_norm(self.kernels.native, norm))
        return Register(total), Register(normed)

    def linear(self, x: Register, linear: Linear) -> Register:
        return Register(self.program.linear(x.number, self.kernels.packed(linear)))

    def head_linear(self, x: Register, linear: HeadLinear, start: int) -> Register:
        return Register(self.program.head_linear(x.number, self.kernels.packed_heads(linear), start))

    def join_latent(self, query: Register, absorbed: Register, latent: Register, norm: Norm, rope: int) -> Register:
        native = native_norm(self.kernels.native, norm)
        return Register(self.program.join_latent(query.number, absorbed.number, latent.number, native, rope))

    def rope_and_write(
        self, qkv: Register, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        cosine, sine = (-1, -1) if rotation is None else (rotation.cos.number, rotation.sin.number)
        native = self.kernels.native_shape(shape)
        register = Register(self.program.rope_and_write(qkv.number, shape.layer, native, cosine, sine))
        return Heads(register, register, register)

    def attend(self, heads: Heads, shape: AttentionShape, segments: object, storage: Storage | None) -> Register:
        native = self.kernels.native_shape(shape)
        return Register(self.program.attend(heads.query.number, shape.layer, native))

    def act_mul(self, x: Register, activation: str, cutoff: float | None = None) -> Register:
        return Register(self.program.act_mul(x.number, ACTIVATION_CODES[activation], cutoff))

    def act(self, x: Register, activation: str) -> Register:
        return Register(self.program.act(x.number, ACTIVATION_CODES[activation]))

    def all_gather(self, x: Register | None, widths: tuple[int, ...]) -> Register | None:
        if x is None:  # the logits, which leave the program
            self.logit_widths = widths
            return None
        return Register(self.program.all_gather(x.number, self.kernels.memory_of_ranks(), list(widths)))

    def all_reduce(self, x: Register) -> Register:
        return Register(self.program.all_reduce(x.number, self.kernels.memory_of_ranks()))

    def join_columns(self, parts: Sequence[tuple[Register, int, int]], factors: np.ndarray | None = None) -> Register:
        registers, starts, stops = zip(*((x.number, start, stop) for x, start, stop in parts), strict=True)
        given = None if factors is None else floats(factors)
        return Register(self.program.join_columns(list(registers), list(starts), list(stops), given))

    def gate(self, x: Register, logits: Register) -> Register:
        return Register(self.program.gate(x.number, logits.number))

    def route(self, logits: Register, router: Router) -> Routing:
        """One register holds experts and weights."""
        routing = Register(
            self.program.route(logits.number, self.kernels.native_router(router, self.program.width(logits.number)))
        )
        return Routing(routing, routing)

    def mix_experts(self, x: Register, routing: Routing, experts: Experts) -> Register:
        return Register(
            self.program.mix_experts(x.number, routing.experts.number, self.kernels.packed_experts(experts))
        )

    def recur(self, x: Register, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Register:
        return Register(self.program.recur(x.number, recurrence.layer, self.kernels.native_recurrence(recurrence)))

    def take(self, x: Register, rows: object) -> Register:
        return Register(self.program.take(x.number))

    def given(self, batch: Batch, width: int) -> Register:
        return Register(self.program.given(width))

    def tap(self, x: Register, column: int, batch: Batch) -> None:
        self.program.tap(x.number, column)

    def logits(self, x: Register, head: Linear, softcap: float) -> None:
        self.program.logits(x.number, self.kernels.packed(head), softcap)
