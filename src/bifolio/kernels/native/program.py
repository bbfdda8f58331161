"""Recording the network: its forward function runs once on registers, and each call becomes one native operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bifolio.kernels.interface import (
    AdapterUse,
    AttentionPhase,
    AttentionSegment,
    Batch,
    Network,
    Storage,
    TimedOperation,
)
from bifolio.kernels.native.arguments import native_adapters
from bifolio.kernels.native.operations import BatchInput, NativeOperations, Register

if TYPE_CHECKING:
    from bifolio.kernels.native.kernel_set import NativeKernels

NO_ADAPTERS = AdapterUse((), np.zeros(0, np.int32))  # a placeholder: operations are recorded for any
PHASE_CODES = {AttentionPhase.PREFILL: 0, AttentionPhase.DECODE: 1}  # selects the plan of attention


class NativeProgram:
    """A recorded network; replayed for any batch with a cache in one native call."""

    def __init__(self, kernels: NativeKernels, network: Network, adapts: bool = False) -> None:
        """`adapts`: of batches with adapters, which need further operations."""
        self._kernels, self._network = kernels, network
        self._adapting: NativeProgram | None = None  # the same network for batches with adapters
        self._bound: tuple[Storage | None, Any, Any] = (None, None, None)  # the last run's storage, its native forms
        recorder = ProgramRecorder(kernels)
        inputs = BatchInput.TOKEN_IDS, BatchInput.POSITIONS, None, (), BatchInput.LOGIT_ROWS
        batch = Batch(*inputs, adapters=NO_ADAPTERS if adapts else None)
        result = network.forward(recorder, batch, None)  # type: ignore[arg-type]  # values are registers, not arrays
        self._program, self._width, self._recorded = recorder.program, result.width, recorder.recorded
        self._of_tokens = not self._program.of_logit_rows(result.number)
        self._program.finish([result.number])

    def run(self, batch: Batch, storage: Storage) -> np.ndarray:
        """The result of one forward pass: logits f32[r, vocab], or rows of all tokens."""
        return self._for(batch)._run(batch, storage, False)[0]

    def warm_up(self, num_tokens: int, longest: int) -> None:
        """Nothing is prepared: the program runs any pass."""

    def profile(self, batch: Batch, storage: Storage) -> tuple[np.ndarray, list[TimedOperation]]:
        program = self._for(batch)
        result, seconds = program._run(batch, storage, True)
        timed = zip(program._recorded, seconds, strict=True)
        return result, [TimedOperation(name, weights, each) for (name, weights), each in timed]

    def _for(self, batch: Batch) -> NativeProgram:
        """The program that has the operations of the batch."""
        if batch.adapters is None:
            return self
        if self._adapting is None:
            self._adapting = NativeProgram(self._kernels, self._network, adapts=True)
        return self._adapting

    def _run(self, batch: Batch, storage: Storage, profile: bool) -> tuple[np.ndarray, list[float]]:
        if self._bound[0] is not storage:
            self._bound = storage, self._kernels.cache(storage), self._kernels.states(storage)
        rows = batch.token_ids if self._of_tokens or batch.logit_rows is None else batch.logit_rows
        result = np.empty((len(rows), self._width), np.float32)
        use = batch.states
        seconds = self._program.run(
            self._bound[1],
            batch.token_ids,
            batch.positions,
            batch.cache_index,
            batch.logit_rows,
            [native_segment(segment) for segment in batch.segments],
            self._kernels.share_prefixes,
            [] if batch.given is None else [batch.given],
            [result],
            batch.taps,
            self._kernels.pool,
            self._bound[2],
            *((None, None, None) if use is None else use.arrays()),
            profile,
            **({} if batch.adapters is None else native_adapters(batch.adapters)),
        )
        return result, seconds


class ProgramRecorder(NativeOperations):
    """A kernel set that records operations instead of computing: its arrays are registers of the program."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self.program = kernels.native.Program()
        self.recorded: list[tuple[str, Any]] = []  # names of operations, in order, with the weights of products

    @property
    def kernels(self) -> NativeKernels:
        return self._kernels

    def run(self, name: str, values: Any, *constants: Any, **batch: Any) -> Any:
        numbers = getattr(self.program, name)(*map(_number, values), *constants)
        self.recorded.append((name, constants[0] if name == "linear" else None))
        if numbers is None:
            return None
        return tuple(map(self._register, numbers)) if isinstance(numbers, tuple) else self._register(numbers)

    def _register(self, number: int) -> Register:
        return Register(number, self.program.width(number))

    # -- operations that `HostArrays` has for arrays ------------------------------------------------------------------
    def all_gather(self, x: Register, widths: tuple[int, ...]) -> Register:
        result: Register = self.run("all_gather", (x,), self.kernels.memory_of_ranks(), list(widths))
        return result

    def all_reduce(self, x: Register) -> Register:
        result: Register = self.run("all_reduce", (x,), self.kernels.memory_of_ranks())
        return result

    def take(self, x: Register, rows: object) -> Register:
        result: Register = self.run("take", (x,))
        return result

    def given(self, batch: Batch, width: int, *, exact: bool = False) -> Register:
        return Register(self.program.given(width), width)

    def tap(self, x: Register, column: int, batch: Batch) -> None:
        self.run("tap", (x,), column)


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(each) for each in value]
    return -1 if value is None else value.number


def native_segment(segment: AttentionSegment) -> tuple[Any, ...]:
    phase = PHASE_CODES[segment.phase]
    lengths = segment.query_starts, segment.context_lens
    return phase, segment.token_start, *lengths, segment.block_tables, segment.causal
