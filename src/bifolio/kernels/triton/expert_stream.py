"""Long prompts and experts of the host: their weights pass through the device, layer by layer, as the files hold them.

Few rows are computed by the host (`HostExperts`). From the number of rows on at which that takes longer than to copy a
layer, the device multiplies: threads of the host write the next layer to pinned memory, and a stream of its own copies
it while the device computes the present one. Both times are measured: that of rows on the host (before the first ones,
the rate of its kernels), and those of the layers copied so far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bifolio.kernels.interface import Experts
from bifolio.kernels.triton import quantised, row_layouts
from bifolio.kernels.triton.experts import Stack
from bifolio.kernels.triton.row_layouts import CopiedRows
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

logger = logging.getLogger(__name__)
FIRST_BANDWIDTH = 2e10  # bytes a second, before the first copy
HOST_SHARE = 0.5  # of the peak of the host's products that experts reach
COPIERS = 8  # threads that write pinned memory
TURNS = 2  # layers in flight: one is copied while another is computed


@dataclass(frozen=True, slots=True)
class Side:
    """One projection of all experts of a layer, in the order of its rows."""

    parts: tuple[QuantizedTensor, ...]
    start: int  # bytes, in the memory of a layer

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)

    def copied(self, raw: torch.Tensor) -> CopiedRows:
        rows, (first, *_) = sum(part.data.shape[0] for part in self.parts), self.parts
        data = raw[self.start : self.start + self.nbytes].view(rows, -1)
        return CopiedRows(first.format, data, (rows, int(first.shape[1])))


@dataclass(frozen=True, slots=True)
class Layer:
    number: int
    up: Side
    down: Side
    work: float  # operations of one row

    @property
    def nbytes(self) -> int:
        return self.up.nbytes + self.down.nbytes


def layer_of(experts: Experts, number: int) -> Layer | None:
    """None: these weights cannot stay as they are on the device."""
    sides: list[tuple[QuantizedTensor, ...]] = []
    for linears in (experts.up, experts.down):
        parts = tuple(part for linear in linears for part in linear.parts)
        if any(bias is not None for linear in linears for bias in linear.biases):
            return None
        if not all(isinstance(part, QuantizedTensor) and part.format is not QuantFormat.MXFP4 for part in parts):
            return None
        if not quantised.usable(parts):
            return None
        sides.append(parts)
    weights = sum(int(np.prod(part.shape)) for side in sides for part in side) // len(experts.up)
    up = Side(sides[0], 0)
    return Layer(number, up, Side(sides[1], up.nbytes), 2.0 * weights)


@dataclass(slots=True)
class Turn:
    """Memory of a layer on its way."""

    pinned: torch.Tensor
    raw: torch.Tensor
    begun: Any  # event before the copy
    copied: Any  # event behind it; the device's stream waits for it
    reading: Any  # event before the readers of `raw`
    used: Any  # event behind them
    number: int = -1  # of the layer


class ExpertStream:
    """The layers of one model with experts on the host, in the order in which a pass needs them."""

    def __init__(self, device: str, rate: Callable[[], float]) -> None:
        self._device, self._rate = device, rate  # operations a second of the host's kernels
        self._layers: list[Layer] = []
        self._numbers: dict[int, int] = {}  # identity of the first matrix -> place in `_layers`
        self._turns: list[Turn] = []
        self._pending: Future[Turn] | None = None
        self._wanted = -1  # place of the pending layer
        self._bandwidth, self._host_rate = FIRST_BANDWIDTH, 0.0
        self._copiers: ThreadPoolExecutor | None = None
        self._leader: ThreadPoolExecutor | None = None
        self._stream: Any = None

    def add(self, experts: Experts) -> None:
        layer = layer_of(experts, len(self._layers))
        if layer is not None:
            self._numbers[id(layer.up.parts[0])] = layer.number
            self._layers.append(layer)

    def layer(self, experts: Experts) -> Layer | None:
        number = self._numbers.get(id(experts.up[0].parts[0]))
        return None if number is None else self._layers[number]

    def is_faster(self, rows: int, choices: int, layer: Layer, row_seconds: float) -> bool:
        """`row_seconds`: of the host; 0.0: not measured yet."""
        if not row_seconds:
            self._host_rate = self._host_rate or HOST_SHARE * self._rate()
            row_seconds = choices * layer.work / self._host_rate
        return rows * row_seconds > layer.nbytes / self._bandwidth

    def reserve(self) -> bool:
        """Take the memory of all turns; False: the device or the host has too little."""
        if self._turns:
            return True
        size = max(layer.nbytes for layer in self._layers)
        cuda: Any = torch.cuda
        try:
            turns = [
                Turn(
                    torch.empty(size, dtype=torch.uint8, pin_memory=self._device.startswith("cuda")),
                    torch.empty(size, dtype=torch.uint8, device=self._device),
                    *(cuda.Event(enable_timing=True) for _ in range(4)),
                )
                for _ in range(TURNS)
            ]
        except RuntimeError as error:  # of memory
            logger.warning("experts on the host compute long prompts, too: %s", error)
            self._layers.clear()
            self._numbers.clear()
            return False
        self._turns = turns
        self._copiers = ThreadPoolExecutor(COPIERS, "expert-copy")
        self._leader = ThreadPoolExecutor(1, "expert-stream")
        self._stream = cuda.Stream(self._device)
        return True

    def stacks(self, layer: Layer) -> tuple[Stack, Stack]:
        """The projections of a layer on the device, and the next layer on its way."""
        if self._pending is None or self._wanted != layer.number:
            self._start(layer.number)
        assert self._pending is not None
        turn = self._pending.result()
        self._pending = None
        if layer.number + 1 < len(self._layers):
            self._start(layer.number + 1)
        here: Any = torch.cuda.current_stream()
        here.wait_event(turn.copied)
        turn.reading.record(here)
        count = len(layer.up.parts) // _parts_of_expert(layer)
        up, down = (Stack(self._packed(side.copied(turn.raw)), None, count) for side in (layer.up, layer.down))
        turn.used.record(here)
        return up, down

    def _packed(self, rows: CopiedRows) -> Any:
        return row_layouts.pack((rows,), self._device)

    def _start(self, number: int) -> None:
        if self._pending is not None:
            self._pending.result()
        assert self._leader is not None
        self._pending, self._wanted = self._leader.submit(self._copy, number), number

    def _copy(self, number: int) -> Turn:
        """Write a layer to pinned memory and launch its copy."""
        layer, turn = self._layers[number], self._turns[number % TURNS]
        turn.copied.synchronize()  # the copy of the layer before has read the pinned memory
        times = []  # the slowest of three lanes bounds the layers in flight
        if turn.number >= 0:
            times.append(turn.begun.elapsed_time(turn.copied) / 1e3)
            if turn.used.query():
                times.append(turn.reading.elapsed_time(turn.used) / 1e3)
        begun = time.perf_counter()
        assert self._copiers is not None
        write_rows(turn.pinned.numpy(), (layer.up, layer.down), self._copiers)
        times.append(time.perf_counter() - begun)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(turn.used)
            turn.begun.record(self._stream)
            turn.raw[: layer.nbytes].copy_(turn.pinned[: layer.nbytes], non_blocking=True)
            turn.copied.record(self._stream)
        self._bandwidth += 0.1 * (layer.nbytes / max(*times, 1e-6) - self._bandwidth)
        turn.number = number
        return turn


def _parts_of_expert(layer: Layer) -> int:
    """Matrices of an expert's first projection: gate and up, or one."""
    return max(len(layer.up.parts) // len(layer.down.parts), 1)


def write_rows(memory: np.ndarray, sides: Sequence[Side], copiers: ThreadPoolExecutor) -> None:
    """Copy the matrices of a layer, one after the other, to u8[bytes] `memory`."""
    jobs, at = [], 0
    for side in sides:
        for part in side.parts:
            jobs.append((part.data, memory[at : at + part.data.nbytes]))
            at += part.data.nbytes
    each = -(-len(jobs) // COPIERS)
    list(copiers.map(_copy_all, [jobs[n : n + each] for n in range(0, len(jobs), each)]))


def _copy_all(jobs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for source, target in jobs:
        np.copyto(target, source.reshape(-1))
