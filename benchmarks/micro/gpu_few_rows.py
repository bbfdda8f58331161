"""Micro-benchmark: products of a few rows on a GPU, alone and in a chain of layers, beside the limit of memory.

python -m benchmarks.micro.gpu_few_rows [--shapes llama-8b] [--rows 4,2,8]

`library` is cuBLAS, `few_rows` Triton's kernel, `rows` the kernel in CUDA C++ with rings of several sizes. The chain
has norms, and products whose weights can be fetched while the ones before them run; attention is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_limits import time_in_graph
from benchmarks.micro.gpu_tuning import FOOTPRINT, products
from benchmarks.shapes import SHAPES
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Linear, Norm
from bifolio.kernels.select import require_gpu

BYTES_PER_SECOND = 4.8e12  # of an H200's memory, as its data sheet says
VARIANTS = ((65_536, 132_000), (65_536, 197_000), (33_000, 197_000), (17_000, 132_000))  # bytes of a copy, of a ring
LAYERS = 12  # of a chain


def new_weights(count: int, outputs: int, depth: int) -> list[torch.Tensor]:
    return [torch.randn(outputs, depth, device="cuda").to(torch.bfloat16) for _ in range(count)]


def product_times(name: str, outputs: int, depth: int, rows: int, *, gated: bool) -> dict[str, Any]:
    """Microseconds of one product with its operations before and after."""
    from bifolio.kernels.cuda.rows_product import rows_product
    from bifolio.kernels.triton.gemm_small_m import few_rows

    size = outputs * (2 if gated else 1) * depth * 2
    weights = new_weights(max(2, min(48, FOOTPRINT // size)), outputs * (2 if gated else 1), depth)
    x, stream = torch.randn(rows, depth, device="cuda").to(torch.bfloat16), torch.randn(rows, depth, device="cuda")
    residual = torch.randn(rows, outputs, device="cuda") if name in ("output", "down") else None
    norm = None if residual is not None else Norm(torch.ones(depth, device="cuda", dtype=torch.bfloat16), None, 1e-5)
    out_dtype = torch.bfloat16 if residual is None and name != "head" else torch.float32
    found: dict[str, Any] = {"product": name, "rows": rows, "outputs": outputs, "depth": depth}
    found["limit"] = round(1e6 * size / BYTES_PER_SECOND, 1)
    found["library"] = _microseconds([partial(F.linear, x, weight) for weight in weights])
    own: dict[str, Any] = {"residual": residual, "out_dtype": out_dtype}
    silu = "silu" if gated else None
    found["few_rows"] = _microseconds([partial(few_rows, x, w, activation=silu, **own) for w in weights])
    own |= {"norm": norm, "bias": None, "activation": 0 if gated else -1}
    own["num_processors"] = torch.cuda.get_device_properties(0).multi_processor_count
    inputs = x if norm is None else stream
    found["error"] = error_of(rows_product(inputs, weights[0], **own), inputs, weights[0], norm, residual, gated=gated)
    for variant in VARIANTS:
        with chosen(variant):
            found[name_of(variant)] = _microseconds([partial(rows_product, inputs, w, **own) for w in weights])
    return found


@contextmanager
def chosen(variant: tuple[int, int]) -> Iterator[None]:
    """Let products of a few rows have copies and rings of these sizes; (0, 0): Triton's kernel multiplies instead."""
    from bifolio.kernels.cuda import rows_product as module

    own: Any = module
    names = ("PLACE_BYTES", "RING_BYTES") if variant[0] else ("MOST_ROWS",)
    kept = [getattr(own, name) for name in names]
    for name, value in zip(names, variant if variant[0] else (1,), strict=True):
        setattr(own, name, value)
    own.plan_of.cache_clear()
    try:
        yield
    finally:
        for name, value in zip(names, kept, strict=True):
            setattr(own, name, value)
        own.plan_of.cache_clear()


def name_of(variant: tuple[int, int]) -> str:
    return f"rows {variant[0] // 1000} {variant[1] // 1000}" if variant[0] else "few_rows"


def error_of(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, *,
    gated: bool,
) -> float:  # fmt: skip
    """Of a product, relative to the same in f32."""
    x = x.float() if norm is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    expected = torch.cat([x @ part.float().T for part in weight.chunk(8)], dim=1)
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    expected = expected if residual is None else expected + residual
    return float((out.float() - expected).norm() / expected.norm())


def chain_times(shape: str, rows: int) -> dict[str, Any]:
    """Microseconds of the products and norms of one layer in a chain of layers, for each kernel."""
    from bifolio.kernels.triton import TritonKernels
    from bifolio.kernels.triton.lazy_fusion import tensor

    config, kernels = SHAPES[shape], TritonKernels("cuda", "bf16")
    own = list(products(config).values())[:4]
    layers = [
        [_linear(new_weights(1, count * (1 + gated), depth)[0], gated=gated) for count, depth, gated in own]
        for _ in range(LAYERS)
    ]
    stream = torch.randn(rows, config.hidden_size, device="cuda")
    attended = torch.randn(rows, config.query_size, device="cuda").to(torch.bfloat16)
    norm = Norm(torch.ones(config.hidden_size, device="cuda", dtype=torch.bfloat16), None, 1e-5)
    size = sum(count * (1 + gated) * depth * 2 for count, depth, gated in own)
    found: dict[str, Any] = {"chain": shape, "rows": rows, "limit": round(1e6 * size / BYTES_PER_SECOND, 1)}

    def chain() -> None:
        x: Any = stream
        for qkv, output, up, down in layers:
            tensor(kernels.linear(kernels.norm(x, norm), qkv))
            x, normed = kernels.add_norm(x, kernels.linear(attended, output), norm)
            x = kernels.add(x, kernels.linear(kernels.act_mul(kernels.linear(normed, up), "silu"), down))

    for variant in ((0, 0), *VARIANTS):
        with chosen(variant):
            found[name_of(variant)] = round(_microseconds([chain]) / LAYERS, 1)
    return found


def _linear(weight: torch.Tensor, *, gated: bool) -> Linear:
    parts = tuple(torch.chunk(weight, 2)) if gated else (weight,)
    return Linear(parts, (None,) * len(parts), prepared=(weight, None))


def _microseconds(functions: list[Callable[[], Any]]) -> float:
    """NaN if the kernel does not run."""
    try:
        for function in functions[:1]:
            function()
        torch.cuda.synchronize()
        return round(1e6 * time_in_graph(functions * max(1, 8 // len(functions))), 1)
    except Exception as error:
        print(f"    {str(error)[:200]}", flush=True)
        return float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-8b", help="shapes of models, by commas")
    parser.add_argument("--rows", default="4,2,8", help="rows of x, by commas")
    options = parser.parse_args()
    try:
        require_gpu("cuda")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for shape in options.shapes.split(","):
        for rows in map(int, options.rows.split(",")):
            for name, (outputs, depth, gated) in products(SHAPES[shape]).items():
                print(json.dumps(product_times(name, outputs, depth, rows, gated=gated)), flush=True)
            torch.cuda.empty_cache()
            print(json.dumps(chain_times(shape, rows)), flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
