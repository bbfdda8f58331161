"""Micro-benchmark: prompts of one recurrent layer on a GPU, scanned in chunks and token by token, in turns.

    python -m benchmarks.micro.gpu_scan --tokens 2048

Milliseconds of the recurrence on one prompt of `--tokens` tokens and on sixteen parts of it, bf16.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

from bifolio.cache.storage import CacheLayout
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Batch, KernelSet, Norm, Recurrence, StateUse
from bifolio.kernels.select import require_gpu, select_kernels
from bifolio.kernels.storage import StateLayout

LAYERS = {
    "gated delta net, 32 heads of 128 x 128": ("delta", 32, 16, 128, 128),
    "Mamba-2, 48 heads of 128 x 64": ("mamba", 48, 1, 128, 64),
    "RWKV-7, 40 heads of 64 x 64": ("rwkv", 40, 40, 64, 64),
}  # kind, heads, groups, size of keys and of values
SCANS = ("chunks", "tokens")
WIDTH = 4  # of the convolution
REPEATS = 5


@contextmanager
def scanning(scan: str) -> Iterator[None]:
    """Scan all prompts token by token, or as the kernel set does."""
    from bifolio.kernels.triton import scan_plan

    with mock.patch.object(scan_plan, "LONG", scan_plan.LONG if scan == "chunks" else 1 << 30):
        yield


def new_layer(kind: str, heads: int, groups: int, keys: int, values: int) -> Recurrence:
    rng = np.random.default_rng(1)
    is_delta, channels = kind == "delta", 2 * groups * keys + heads * values

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    if kind == "rwkv":
        norm = Norm(np.ones(heads * values, np.float32), normal(heads * values), 64e-5, True)
        factors = normal(3, heads * keys)
        return Recurrence(
            "rwkv", 0, 2, 2 * heads * values, heads, heads, keys, values, factors=factors, norm=norm, mixes_values=True
        )
    return Recurrence(
        "delta" if is_delta else "mamba", 0, WIDTH, channels, heads, groups, keys, values,
        conv_weight=0.5 * normal(channels, WIDTH),
        decay=-np.exp(rng.uniform(-2, 1, heads)).astype(np.float32),
        bias=normal(heads),
        skip=None if is_delta else normal(heads),
        norm=Norm(np.ones(values if is_delta else heads * values, np.float32), None, 1e-5),
        norm_first=is_delta,
    )  # fmt: skip


def layer_pass(kernels: KernelSet, layer: Recurrence, count: int, tokens: int) -> Callable[[], object]:
    """One pass of a layer over `count` prompts of `tokens` tokens, which begin empty and store their last states."""
    state = StateLayout(layer.width, layer.channels, layer.heads, layer.key_size, layer.value_size)
    storage = kernels.new_storage(CacheLayout(1, 1, 1, 1, 32, kernels.kv_dtype, states=(state,), num_states=count + 1))
    prepared, total = kernels.prepare_recurrence(layer), count * tokens
    x = torch.randn((total, layer.in_features), device=kernels.device).to(torch.bfloat16)
    starts, writes = np.arange(0, total + 1, tokens, dtype=np.int32), np.full(total, -1, np.int32)
    writes[starts[1:] - 1] = 1 + np.arange(count)
    states, ids = StateUse(starts, np.zeros(count, np.int32), writes), kernels.from_host(np.zeros(total, np.int32))
    return lambda: kernels.recur(x, prepared, Batch(ids, ids, None, (), None, states=states), storage)


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Seconds of one call; the first, which compiles kernels, is not counted."""
    for _ in range(2):
        work()
    _wait()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait()
    return (time.perf_counter() - started) / repeats


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def print_layers(kernels: KernelSet, tokens: int) -> None:
    for name, sizes in LAYERS.items():
        for count in (1, 16):
            found = {}
            for scan in SCANS:
                with scanning(scan):  # a pass of its own for each: the division of a batch is kept
                    work = layer_pass(kernels, new_layer(*sizes), count, tokens // count)
                    found[scan] = 1e3 * seconds_of(work, REPEATS)
            times = " / ".join(f"{found[scan]:.2f} ms in {scan}" for scan in SCANS)
            print(f"{name}, {count} x {tokens // count} tokens: {times}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the longest prompt, a multiple of 16")
    options = parser.parse_args()
    try:
        require_gpu("cuda")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    kernels = select_kernels("cuda", dtype="bf16", deterministic=False)
    print_layers(kernels, options.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
