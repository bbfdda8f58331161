"""The best rates of this machine, measured: the limits that a profile is held against.

On a CPU, reading is timed with numpy's bitwise-or over an array far larger than the caches, one slice a thread, and
arithmetic with its float32 matrix product or the native kernels' own loop over registers, whichever is faster. Products
of quantised weights have a limit of their own, since CPUs multiply bytes faster than floats. On a GPU, torch's copy and
bfloat16 matrix product are timed. The best of several runs counts: other programs only make a run slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from bifolio.errors import MissingDependencyError
from bifolio.measure.statistics import show_count

READ_BYTES = 256 << 20  # larger than the caches of any current CPU core complex
MATRIX_SIZE = 1024
GPU_MATRIX_SIZE = 8192
RUNS = 5


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Peak rates, and how they were found."""

    bytes_per_second: float
    flops_per_second: float
    bytes_how: str
    flops_how: str
    integer_per_second: float | None = None  # operations on quantised weights; None: the limit of floats
    integer_how: str = ""

    @property
    def ridge(self) -> float:
        """FLOP per byte at which both limits meet: below it, reading takes the time."""
        return self.flops_per_second / self.bytes_per_second

    def compute_seconds(self, flops: float, integer_flops: float) -> float:
        """The least time of so many operations, of which `integer_flops` multiply quantised weights."""
        integer_rate = self.integer_per_second or self.flops_per_second
        return (flops - integer_flops) / self.flops_per_second + integer_flops / integer_rate


def measure_limits(device: str = "cpu", threads: int = 1, read_bytes: int = READ_BYTES) -> MachineLimits:
    if device.startswith("cuda"):
        return _measure_gpu(device)
    size, flops = MATRIX_SIZE, _matmul_speed(MATRIX_SIZE)
    flops_how = f"float32 matrix product {size}x{size}x{size}, numpy with its own threads"
    registers = _register_rates(threads)
    if registers is not None and registers[0] > flops:
        flops, flops_how = registers[0], f"products of floats in registers, {show_count(threads, 'thread')}"
    return MachineLimits(
        bytes_per_second=_read_speed(threads, read_bytes),
        flops_per_second=flops,
        bytes_how=f"numpy reads {read_bytes >> 20} MiB, {show_count(threads, 'thread')}",
        flops_how=flops_how,
        integer_per_second=None if registers is None else max(flops, registers[1]),
        integer_how="" if registers is None else f"products of bytes in registers, {show_count(threads, 'thread')}",
    )


def _register_rates(threads: int) -> tuple[float, float] | None:
    """Operations per second of floats and of bytes by the native kernels; None where they are not built."""
    from bifolio.kernels import native

    try:
        native.set_num_threads(threads)
        return tuple(max(native.product_rate(of_bytes) for _ in range(RUNS)) for of_bytes in (False, True))  # type: ignore[return-value]
    except MissingDependencyError:
        return None


def _read_speed(threads: int, read_bytes: int) -> float:
    values = np.ones(read_bytes // 8, dtype=np.uint64)
    slices = np.array_split(values, threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(np.bitwise_or.reduce, slices)))
    return values.nbytes / seconds


def _matmul_speed(size: int) -> float:
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    out = np.empty_like(a)
    return 2 * size**3 / _best(lambda: np.matmul(a, b, out=out))


def _measure_gpu(device: str) -> MachineLimits:
    import torch

    size = GPU_MATRIX_SIZE
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.ones(1 << 28, device=device)
    target = torch.empty_like(source)

    def timed(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            work()
            torch.cuda.synchronize(device)

        return run

    copied = 2 * source.nbytes
    return MachineLimits(
        bytes_per_second=copied / _best(timed(lambda: target.copy_(source))),
        flops_per_second=2 * size**3 / _best(timed(lambda: a @ b)),
        bytes_how="copy of 1 GiB on the device, bytes read and written",
        flops_how=f"bfloat16 matrix product {size}x{size}x{size}, torch",
    )


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs, after one that is not counted."""
    work()
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
