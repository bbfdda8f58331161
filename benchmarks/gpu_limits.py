"""Measured limits of a GPU: bytes read per second, operations per second; and the timing of launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of one GPU."""

    name: str
    bytes_per_second: float  # read bandwidth
    operations_per_second: float  # bf16 matrix product, 8192 cubed
    kernel_seconds: float  # one empty kernel inside a graph

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_limits(device: str) -> Limits:
    """Measure all limits; takes about a second."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device).random_()
    words = source.view(torch.int64)
    read = time_launches([lambda: words.sum()], repeats=20)
    left = torch.randn(8192, 8192, device=device).to(torch.bfloat16)
    product = time_launches([lambda: left @ left], repeats=20)
    tiny = torch.zeros(1, device=device)
    small = time_in_graph([lambda: tiny.add_(1.0)] * 200)
    return Limits(torch.cuda.get_device_name(device), len(source) / read, 2 * 8192**3 / product, small)


def time_launches(functions: Sequence[Callable[[], Any]], repeats: int = 10) -> float:
    """Median seconds of one of the functions, by device events."""
    for function in functions:
        function()
    times = []
    cuda: Any = torch.cuda
    for index in range(repeats):
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        functions[index % len(functions)]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(times))


def time_in_graph(functions: Sequence[Callable[[], Any]], repeats: int = 7) -> float:
    """Seconds of one of the functions when all run one after the other inside a graph.

    Pass functions that read different memory, so that the L2 cache does not shorten the time.
    """
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        functions[0]()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, stream=stream):
        for function in functions:
            function()
    graph.replay()
    cuda.synchronize()
    return time_launches([graph.replay], repeats) / len(functions)
