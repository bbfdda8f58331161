"""Measured peak rates of this machine: the limits that a profile is compared with.

On a CPU, reading is timed with numpy's bitwise-or over an array far larger than the caches, one slice per thread, and
arithmetic with its float32 matrix product; on a GPU, with torch's copy and bfloat16 matrix product. The native kernels
multiply quantised weights in integers: their limit is the rate of integer dot products in registers. The best of
several runs is used: other programs can only make a run slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from bifolio.measure.statistics import show_count

READ_BYTES = 256 << 20  # larger than the caches of any current CPU core complex
MATRIX_SIZE = 1024
GPU_MATRIX_SIZE = 8192
RUNS = 5


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Peak rates, and the method of measurement."""

    bytes_per_second: float
    flops_per_second: float
    bytes_how: str
    flops_how: str
    integer_ops_per_second: float | None = None  # of products with quantised weights; None: they run as floats
    integer_how: str = ""

    def compute_seconds(self, flops: float, integer_flops: float) -> float:
        """The shortest time of this arithmetic; `integer_flops` of it are products with quantised weights."""
        integers = self.integer_ops_per_second or self.flops_per_second
        return (flops - integer_flops) / self.flops_per_second + integer_flops / integers

    @property
    def ridge(self) -> float:
        """FLOP per byte at which both limits meet: below it, reading is the bottleneck."""
        return self.flops_per_second / self.bytes_per_second


def measure_limits(
    device: str = "cpu", threads: int = 1, read_bytes: int = READ_BYTES, activation_planes: int = 0
) -> MachineLimits:
    """With `activation_planes` above 0, the native kernels' integer products are measured as well."""
    if device.startswith("cuda"):
        return _measure_gpu(device)
    size = MATRIX_SIZE
    limits = MachineLimits(
        bytes_per_second=_read_speed(threads, read_bytes),
        flops_per_second=_matmul_speed(size),
        bytes_how=f"numpy reads {read_bytes >> 20} MiB, {show_count(threads, 'thread')}",
        flops_how=f"float32 matrix product {size}x{size}x{size}, numpy with its own threads",
    )
    return _with_native_limits(limits, activation_planes) if activation_planes else limits


def _with_native_limits(limits: MachineLimits, planes: int) -> MachineLimits:
    """The rates of the native kernels' products in registers, where they are higher than numpy's."""
    from bifolio.kernels.cpu import isa, product_rate

    floats = max(product_rate(False) for _ in range(RUNS))
    integers = max(max(product_rate(True) for _ in range(RUNS)), floats) / planes  # AMX multiplies them as bfloat16
    if floats > limits.flops_per_second:
        limits = replace(limits, flops_per_second=floats, flops_how=f"products of floats in registers, {isa()}")
    how = f"products of bytes in registers, {isa()}" + (f", {planes} for each weight" if planes > 1 else "")
    return replace(limits, integer_ops_per_second=integers, integer_how=how)


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
    """Seconds of the fastest of a few runs, after a warm-up run."""
    work()
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
