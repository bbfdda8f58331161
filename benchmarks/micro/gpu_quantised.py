"""Micro-benchmark: products of the 8B shape with quantised weights on a GPU; first their results are checked.

    python -m benchmarks.micro.gpu_quantised [--formats q4_k,q6_k] [--rows 1,16,64] [--out results] [--check-only]

Every setting runs in a CUDA graph over copies of the weights that exceed the cache. A line has the microseconds of the
default setting and of the fastest others, and the terabytes per second of the fastest. Kernels are compiled ahead, one
process for each format and number of rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product as product_of
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu_limits import time_in_graph
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Norm
from bifolio.kernels.select import require_gpu
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

FOOTPRINT = 400 << 20  # bytes of weights that a graph goes through
PRODUCTS = {"qkv": (6144, 4096), "output": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
FORMATS = ("q4_k", "q6_k", "q5_k", "q4_0", "q8_0", "int4", "bf16")
CHECKED = ("q4_k", "q5_k", "q6_k", "q3_k", "q2_k", "q4_0", "q4_1", "q8_0", "groups", "mxfp4")
LAYERS = 32
PLANS: dict[str, dict[str, int]] = {  # of one row: constants of `row_product`
    "default": {}, "ring 66": {"RING_BYTES": 66_000, "SLICE_BYTES": 66_000}, "ring 110": {"RING_BYTES": 110_000},
    "ring 197": {"RING_BYTES": 197_000}, "units of 25": {"UNIT_BYTES": 25_000}, "4 warps": {"WARPS": 4},
}  # fmt: skip
TILES = {  # of several rows: tiles, warps across and along, splits; stages as they fit
    "qkv": ((2, 3, 2, 2), (2, 4, 2, 2), (2, 4, 2, 4), (1, 3, 4, 1), (1, 4, 2, 2), (2, 2, 4, 2), (3, 4, 2, 4)),
    "output": ((2, 4, 2, 4), (2, 4, 2, 8), (2, 2, 4, 2), (1, 2, 4, 1), (1, 4, 2, 2), (2, 2, 2, 4), (2, 1, 8, 1)),
    "up": ((2, 4, 2, 1), (4, 4, 2, 1), (2, 7, 2, 1), (1, 7, 2, 1), (2, 2, 4, 1), (4, 2, 4, 1), (1, 4, 2, 1)),
    "down": ((2, 4, 2, 4), (2, 4, 2, 8), (2, 2, 4, 2), (1, 2, 4, 2), (2, 2, 2, 4), (2, 1, 8, 1), (4, 4, 2, 8)),
}  # fmt: skip
num_settings = 99  # tiles and plans that are tried, of each product
compiling_only = False


# -- weights -----------------------------------------------------------------------------------------------------------
def random_blocks(format: QuantFormat, rows: int, columns: int) -> QuantizedTensor:
    """Random codes and small random scales."""
    generator = np.random.default_rng(rows)
    data = generator.integers(0, 256, (rows, format.row_bytes(columns)), np.uint8)
    blocks = data.reshape(-1, format.block_bytes)
    places = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82), "Q4_0": (0,), "Q8_0": (0,)}.get(format.name, (0, 2))
    if format is QuantFormat.MXFP4:
        blocks[:, 0] = generator.integers(115, 122, len(blocks))
        return QuantizedTensor(format, data, (rows, columns))
    for place in places:
        halves = generator.uniform(0.005, 0.015, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = halves[:, None].view(np.uint8)
    return QuantizedTensor(format, data, (rows, columns))


def one_scale_for_128(rows: int, columns: int) -> QuantizedTensor:
    """Blocks of Q4_0 as AWQ folders give them."""
    source = random_blocks(QuantFormat.Q4_0, rows, columns)
    blocks = source.data.reshape(rows, -1, 4, 18)
    blocks[:, :, :, :2] = blocks[:, :, :1, :2]
    return source


def random_rows(format: str, outputs: int, depth: int) -> Any:
    """A weight for timing: random codes, all scales alike."""
    from bifolio.kernels.triton.row_layouts import LAYOUTS, QuantisedWeight

    if format == "bf16":
        return torch.randn(outputs, depth, device="cuda").to(torch.bfloat16)
    kind = QuantFormat["Q4_1" if format == "int4" else format.upper()]
    layout = replace(LAYOUTS[kind], group=128) if format == "int4" else LAYOUTS[kind]
    _, scales_at, _, row_bytes = layout.regions(depth)
    rows = torch.randint(0, 256, (outputs, row_bytes), dtype=torch.uint8, device="cuda")
    rows[:, scales_at:] = 0x1C  # 0.004 as f16
    return QuantisedWeight(kind, layout, rows, (outputs, depth))


# -- the check ---------------------------------------------------------------------------------------------------------
def dense_values(weight: Any) -> torch.Tensor:
    """f32[outputs, depth]: dequantised by torch, from the description of the layout."""
    from bifolio.kernels.triton import row_layouts

    layout, (outputs, depth) = weight.layout, weight.shape
    high_at, scales_at, tops_at, _ = layout.regions(depth)

    def plane(at: int, bits: int) -> torch.Tensor:
        if bits == 8:
            whole: torch.Tensor = weight.rows[:, at : at + depth].view(torch.int8).float()
            return whole
        each = weight.rows[:, at : at + depth * bits // 8].reshape(outputs, -1, 1, 4)
        shifts = torch.arange(0, 8, bits, device=each.device, dtype=torch.uint8)[:, None]
        codes: torch.Tensor = (each >> shifts) & ((1 << bits) - 1)
        return codes.reshape(outputs, depth).float()

    codes = plane(0, layout.low)
    if layout.high:
        codes += plane(high_at, layout.high) * 2**layout.low
    if layout.scales == row_layouts.EXPONENTS:
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
        codes = torch.cat([numbers, -numbers])[codes.long()]
    count = depth // layout.group
    raw = weight.rows[:, scales_at : scales_at + count * row_layouts.GROUP_BYTES[layout.scales]].contiguous()
    tops = weight.rows[:, tops_at : tops_at + depth // 256 * 4].contiguous()
    if layout.scales in (row_layouts.HALVES, row_layouts.HALF_PAIRS):
        halves = raw.view(torch.float16).float().view(outputs, count, -1)
        scale, offset = halves[:, :, 0], halves[:, :, -1]
    elif layout.scales == row_layouts.EXPONENTS:
        scale = torch.exp2(raw.float() - 127)
    else:
        top = tops.view(torch.float16).float().view(outputs, -1, 2).repeat_interleave(256 // layout.group, 1)
        pairs = raw.view(outputs, count, -1)
        scale, offset = pairs[:, :, 0].float() * top[:, :, 0], pairs[:, :, -1].float() * -top[:, :, 1]
        if layout.scales == row_layouts.SIGNED_BYTES:
            scale = pairs[:, :, 0].view(torch.int8).float() * top[:, :, 0]
    if layout.scales not in (row_layouts.HALF_PAIRS, row_layouts.BYTE_PAIRS):
        offset = scale * -layout.zero
    values: torch.Tensor = codes.view(outputs, count, -1) * scale[:, :, None] + offset[:, :, None]
    return values.view(outputs, depth)


def errors_of(weight: Any, num_processors: int) -> Iterator[tuple[str, float, float]]:
    """(kernel, its relative error, the largest that rounding allows)."""
    from bifolio.kernels.triton import quantised

    outputs, depth = weight.shape
    dense = dense_values(weight)
    yield "dequantise", relative(quantised.dequantise(weight, torch.float32), dense), 1e-6
    ids = torch.randint(0, outputs, (9,), device="cuda")
    yield "look up", relative(quantised.dequantise(weight, torch.float32, rows=ids, factor=2.0), dense[ids] * 2), 1e-6
    norm = Norm(torch.rand(depth, device="cuda") + 0.5, None, 1e-5)
    for rows in (1, 2, 9, 16, 33, 64, 130):
        x, residual = torch.randn(rows, depth, device="cuda"), torch.randn(rows, outputs, device="cuda")
        narrow = x.to(torch.bfloat16)
        plain = narrow.float() @ dense.T
        gate, up = plain.chunk(2, dim=1)
        gated = torch.nn.functional.silu(gate) * up
        wide: dict[str, Any] = {"out_dtype": torch.float32}
        if rows == 1:
            normed = x * torch.rsqrt((x * x).mean() + 1e-5) * norm.weight
            for name, own in (("cuda", num_processors), ("triton", 0)):
                one: Callable[..., torch.Tensor] = partial(quantised.one_row, weight=weight, num_processors=own, **wide)
                yield f"{name} norm", relative(one(x, norm=norm), normed @ dense.T), 1e-4
                yield f"{name} plain", relative(one(narrow), plain), 1e-4
                yield f"{name} residual", relative(one(narrow, residual=residual), plain + residual), 1e-4
                yield f"{name} gated", relative(one(narrow, activation="silu"), gated), 1e-4
            continue
        few: Callable[..., torch.Tensor] = partial(quantised.few_rows, narrow, weight, **wide)
        yield f"{rows} rows", relative(few(), plain), 4e-3
        yield f"{rows} rows residual", relative(few(residual=residual), plain + residual), 4e-3
        yield f"{rows} rows gated", relative(few(activation="silu"), gated), 8e-3
        fixed = few(fixed=True)
        alone = quantised.few_rows(narrow[:1], weight, fixed=True, **wide)
        yield f"{rows} rows fixed", relative(fixed, plain), 4e-3
        yield f"{rows} rows alone", float(not torch.equal(fixed[:1], alone)), 0.0


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((found.float() - expected).norm() / expected.norm())
    return error if error == error else float("inf")


def check(formats: list[str], num_processors: int) -> int:
    """Print the errors that rounding does not explain; their number."""
    from bifolio.kernels.triton.row_layouts import pack

    torch.backends.cuda.matmul.allow_tf32 = False
    found = 0
    for name in formats:
        for outputs, depth in ((1024, 4096), (384, 14336)):
            if name == "groups":
                source = one_scale_for_128(outputs, depth)
            else:
                source = random_blocks(QuantFormat[name.upper()], outputs, depth)
            worst = 0.0
            for kernel, error, allowed in errors_of(pack((source,), "cuda"), num_processors):
                worst = max(worst, error)
                if error > allowed:
                    found += 1
                    print(f"WRONG {name} {outputs}x{depth} {kernel}: {error:.2e} > {allowed:.0e}", flush=True)
            print(f"checked {name} {outputs}x{depth}: largest error {worst:.1e}", flush=True)
    return found


# -- timing ------------------------------------------------------------------------------------------------------------
def bf16_settings(rows: int, options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    from bifolio.kernels.triton.gemm_small_m import few_rows
    from bifolio.kernels.triton.norm import act_mul

    def library(x: torch.Tensor, weight: torch.Tensor) -> Any:
        y = torch.nn.functional.linear(x, weight)
        return y if options["activation"] is None else act_mul(y, options["activation"])

    own = {} if rows > 128 else {"default": partial(few_rows, **options)}
    return {**own, "library": library}


def coded_settings(format: str, rows: int, product: str, options: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    from bifolio.kernels.cuda import code_product
    from bifolio.kernels.cuda.code_product import CodeTile
    from bifolio.kernels.triton import quantised
    from bifolio.kernels.triton.norm import ACTIVATIONS, act_mul

    kind = -1 if options["activation"] is None else ACTIVATIONS[options["activation"]]

    def tiled(x: torch.Tensor, weight: Any, tile: CodeTile) -> torch.Tensor:
        out = torch.empty(len(x), weight.shape[0] // (1 if kind < 0 else 2), dtype=x.dtype, device=x.device)
        own: dict[str, Any] = {"bias": None, "residual": None, "activation": kind, "tile": tile}
        code_product.multiply(x, weight.rows, weight.constants(), out, **own)
        return out

    def library(x: torch.Tensor, weight: Any) -> Any:
        y = torch.nn.functional.linear(x, quantised.dequantise(weight, x.dtype))
        return y if kind < 0 else act_mul(y, options["activation"])

    made: dict[str, Callable[..., Any]] = {"default": partial(quantised.few_rows, **options)}
    if rows >= 64:
        made["library"] = library
    codes = random_rows(format, 16, PRODUCTS[product][1]).constants()
    most = min(max(8, 1 << (rows - 1).bit_length()), code_product.MOST_ROWS)
    tiles, heights = TILES[product][:num_settings], {most, min(most, 64)}
    for (tiles_of_warp, across, along, splits), blocks, each in product_of(tiles, (1, 2), heights):
        if tiles_of_warp * each * blocks * across * along > 2048:  # sums in registers; `blocks` share a multiprocessor
            continue
        found = code_product.fitting(
            CodeTile(each, tiles_of_warp, across, along, code_product.MOST_STAGES, splits), codes, 227 * 1024 // blocks
        )
        if found is not None:
            made[f"{each}: {tiles_of_warp},{across},{along},{found.stages},{splits}"] = partial(tiled, tile=found)
    return made


def settings(format: str, rows: int, product: str) -> dict[str, Callable[..., Any]]:
    """Named calls (x, weight) -> result; those of one row with their norm, others plain or gated."""
    from bifolio.kernels.cuda import row_product as plans
    from bifolio.kernels.triton import quantised
    from bifolio.kernels.triton.norm import ACTIVATIONS

    outputs, depth = PRODUCTS[product]
    gated = product == "up"
    options: dict[str, Any] = {"activation": "silu" if gated else None}
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    if rows > 1:
        return bf16_settings(rows, options) if format == "bf16" else coded_settings(format, rows, product, options)
    norm = (
        Norm(torch.ones(depth, device="cuda", dtype=torch.bfloat16), None, 1e-5) if product in ("qkv", "up") else None
    )
    residual = None if norm is not None else torch.zeros(1, outputs, device="cuda")
    options |= {"norm": norm, "residual": residual, "out_dtype": torch.bfloat16 if norm is not None else torch.float32}
    if format == "bf16":
        own = {**options, "activation": ACTIVATIONS["silu"] if gated else -1, "bias": None}
        return {"default": partial(plans.row_product, num_processors=processors, **own)}

    def planned(x: torch.Tensor, weight: Any, changes: dict[str, int]) -> Any:
        with ExitStack() as stack:
            for name, value in changes.items():
                stack.enter_context(mock.patch.object(plans, name, value))
            plans.plan_of.cache_clear()
            return quantised.one_row(x, weight, num_processors=processors, **options)

    made: dict[str, Callable[..., Any]] = {
        name: partial(planned, changes=own) for name, own in list(PLANS.items())[:num_settings]
    }
    made["triton"] = partial(quantised.one_row, **options)
    return made


def tune(format: str, rows: int, product: str) -> dict[str, Any]:
    outputs, depth = PRODUCTS[product]
    first = random_rows(format, outputs, depth)
    size = first.nbytes
    copies = 1 if compiling_only else max(2, min(48, FOOTPRINT // size))
    weights = [first, *(random_rows(format, outputs, depth) for _ in range(copies - 1))]
    x = torch.randn(rows, depth, device="cuda")
    if rows > 1 or product in ("output", "down"):
        x = x.to(torch.bfloat16)
    entry: dict[str, Any] = {"format": format, "product": product, "rows": rows, "bytes": size}
    for name, call in settings(format, rows, product).items():
        try:
            if compiling_only:
                call(x, weights[0])
            else:
                calls = [partial(call, x, weight) for weight in weights]
                entry[name] = round(time_in_graph(calls * max(1, 16 // len(calls))) * 1e6, 2)
        except Exception as error:
            print(f"    {format} {product} {rows} {name} failed: {str(error)[:300]}", flush=True)
    return entry


def line_of(entry: dict[str, Any]) -> str:
    times = {name: value for name, value in entry.items() if name not in ("format", "product", "rows", "bytes")}
    ordered = sorted(times.items(), key=lambda item: item[1])
    outputs, depth = PRODUCTS[entry["product"]]
    rate = entry["bytes"] / ordered[0][1] / 1e6 if ordered else 0.0
    listed = "; ".join(f"{name} {value:.1f}" for name, value in ordered[:7])
    head = f"{entry['format']:5} {entry['rows']:3} rows {outputs}x{depth}"
    return f"{head}: default {times.get('default', float('nan')):.1f} us, best {rate:.2f} TB/s; {listed}"


def totals(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Milliseconds of all products of the layers of a step."""
    for format, rows in dict.fromkeys((entry["format"], entry["rows"]) for entry in entries):
        mine = [entry for entry in entries if (entry["format"], entry["rows"]) == (format, rows)]
        if len(mine) == len(PRODUCTS) and all("default" in entry for entry in mine):
            default = sum(entry["default"] for entry in mine) * LAYERS / 1e3
            fastest = sum(min(v for v in entry.values() if isinstance(v, float)) for entry in mine) * LAYERS / 1e3
            yield f"{format:5} {rows:3} rows, {LAYERS} layers: {default:.3f} ms, fastest settings {fastest:.3f} ms"


# -- the command -------------------------------------------------------------------------------------------------------
def compile_ahead(formats: list[str], rows: list[int]) -> None:
    command = [sys.executable, "-m", "benchmarks.micro.gpu_quantised", "--settings", str(num_settings), "--compile"]
    jobs = [f"{name}:{count}:{product}" for name in formats for count in rows for product in PRODUCTS]
    running = [subprocess.Popen([*command, ",".join(jobs[start::15])]) for start in range(min(15, len(jobs)))]
    for process in running:
        process.wait()


def main() -> int:
    global compiling_only, num_settings
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS), help="formats to time, by commas")
    parser.add_argument("--rows", default="1,16,32,64,128,256", help="numbers of rows, by commas")
    parser.add_argument("--out", type=Path, default=None, help="folder for quantised.json")
    parser.add_argument("--checked", default=",".join(CHECKED), help="formats to check, by commas")
    parser.add_argument("--check-only", action="store_true", help="no timing")
    parser.add_argument("--no-check", action="store_true", help="timing alone")
    parser.add_argument("--settings", type=int, default=num_settings, help="tiles and plans to try, of each product")
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        require_gpu("cuda")
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    num_settings = options.settings
    if options.compile:
        compiling_only = True
        for job in options.compile.split(","):
            format, rows, product = job.split(":")
            tune(format, int(rows), product)
        return 0
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    wrong = 0 if options.no_check else check(options.checked.split(","), processors)
    if options.check_only:
        return int(wrong > 0)
    formats, counts = options.formats.split(","), [int(count) for count in options.rows.split(",")]
    compile_ahead(formats, counts)
    entries = []
    for count in counts:
        for format in formats:
            for product in PRODUCTS:
                entries.append(tune(format, count, product))
                print(line_of(entries[-1]), flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "quantised.json").write_text(json.dumps(entries, indent=1))
    print("\n".join(totals(entries)))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
