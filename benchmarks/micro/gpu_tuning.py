"""Micro-benchmark: single GPU kernels with every tile and split worth trying, the source of settings in the code.

python -m benchmarks.micro.gpu_tuning --out results [--shapes llama-1b] [--parts products,decode,prefill]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu_limits import time_in_graph
from benchmarks.shapes import SHAPES
from bifolio.cache.storage import CacheLayout, KVStorage
from bifolio.config import ModelConfig
from bifolio.errors import ConfigError
from bifolio.kernels.interface import AttentionShape, Heads, Norm
from bifolio.kernels.select import require_gpu
from bifolio.schedule.orchestrators import PrefillOrchestrator

if TYPE_CHECKING:
    from bifolio.kernels.triton.gemm_tuning import RowTile

PARTS = ("products", "decode", "prefill")
FOOTPRINT = 400 << 20  # bytes of weights that a timed graph goes through: several times the cache

PRODUCT_ROWS = (1, 64, 32)
DECODES = ((64, 2048), (1, 384), (200, 900))  # sequences, length
PREFILLS = (
    (32, 128, 1, 8192),
    (32, 64, 1, 8192),
    (32, 128, 16, 560),
    (32, 64, 4, 2048),
)  # heads, size, sequences, length
ONE_ROW_TILES = (  # outputs, depth, warps, stages
    (1, 1024, 2), (2, 1024, 4), (4, 512, 2), (4, 1024, 4), (8, 512, 4), (16, 256, 4), (8, 512, 4, 4), (2, 2048, 8),
)  # fmt: skip
SHARED_MEMORY = 220_000  # bytes that a program may use


def few_rows_tiles(rows: int, outputs: int, depth: int, gated: bool) -> list[RowTile]:
    """Settings worth timing: enough programs to occupy the GPU, and they fit."""
    from bifolio.kernels.triton.gemm_tuning import RowTile

    found = []
    for count, step, warps, stages, swapped, described in (
        (16, 256, 4, 4, False, False), (32, 128, 4, 4, False, False), (32, 128, 4, 5, False, False),
        (32, 256, 4, 3, False, False), (64, 128, 4, 3, True, False), (64, 128, 4, 4, True, False),
        (64, 64, 4, 6, True, False), (128, 64, 4, 4, True, False), (128, 64, 8, 5, True, False),
        (128, 128, 8, 3, True, False), (64, 64, 4, 8, True, True), (64, 128, 4, 4, True, True),
        (64, 128, 4, 5, True, True), (128, 64, 4, 4, True, True), (128, 64, 4, 5, True, True),
        (128, 128, 8, 3, True, True), (32, 128, 4, 4, False, True), (32, 128, 4, 8, False, True),
        (64, 128, 4, 4, False, True),
    ):  # fmt: skip
        memory = stages * step * 2 * (count * (2 if gated else 1) + max(16, rows))
        tiles = -(-outputs // count)
        for splits in (1, 2, 4, 8):
            too_many = splits > 1 and (tiles * splits > 800 or depth // splits < step * 2)
            if memory <= SHARED_MEMORY and tiles * splits >= 64 and not too_many:
                found.append(RowTile(count, step, warps, stages, swapped, splits, described))
    return found


def products(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """(outputs, depth, gated) of the products of one layer."""
    return {
        "qkv": (config.query_size + 2 * config.kv_size, config.hidden_size, False),
        "output": (config.hidden_size, config.query_size, False),
        "up": (config.intermediate_size, config.hidden_size, True),
        "down": (config.hidden_size, config.intermediate_size, False),
        "head": (config.vocab_size, config.hidden_size, False),
    }


def tune_products(shape: str, rows: int, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Microseconds of every product of one model with so many rows: the matrix library's, then each tile's."""
    from bifolio.kernels.triton.gemm_small_m import few_rows
    from bifolio.kernels.triton.gemm_tuning import RowTile
    from bifolio.kernels.triton.gemv import one_row

    config = SHAPES[shape]
    for name, (outputs, depth, gated) in products(config).items():
        size = outputs * (2 if gated else 1) * depth * 2
        copies = 1 if _compiling_only else max(1, min(64, FOOTPRINT // size))
        weights = [
            torch.randn(outputs * (2 if gated else 1), depth, device=device).to(torch.bfloat16) for _ in range(copies)
        ]
        x = torch.randn(rows, depth, device=device).to(torch.bfloat16)
        residual = torch.randn(rows, outputs, device=device)
        norm = Norm(torch.ones(depth, device=device), None, 1e-5)
        entry: dict[str, Any] = {"shape": shape, "product": name, "rows": rows, "bytes": size}
        entry["library"] = _microseconds([partial(F.linear, x, w) for w in weights])

        options: dict[str, Any] = {"activation": "silu" if gated else None}
        if name in ("output", "down"):
            options |= {"residual": residual, "out_dtype": residual.dtype}
        if rows == 1 and name in ("qkv", "up", "head"):
            options["norm"] = norm
        multiply: Callable[..., torch.Tensor] = one_row if rows == 1 else few_rows
        tiles = [RowTile(*tile) for tile in ONE_ROW_TILES]
        if rows > 1:
            tiles = few_rows_tiles(rows, outputs, depth, gated)
        _compile([partial(multiply, x, weights[0], tile=tile, **options) for tile in tiles])
        for tile in tiles:
            entry[str(astuple(tile))] = _microseconds([partial(multiply, x, w, tile=tile, **options) for w in weights])
        yield entry
        del weights


def tune_decode(shape: str, sequences: int, length: int, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Microseconds of decode attention of one layer, and bytes of keys and values it reads."""
    from bifolio.kernels.triton.decode import decode_attention
    from bifolio.kernels.triton.split_kv import cut, new_pieces

    config = SHAPES[shape]
    attention = AttentionShape(0, config.num_heads, config.num_kv_heads, config.head_dim, config.scale)
    for block_size in (16, 64):
        storage, tables, lengths, rows = _filled_cache(config, sequences, length, block_size, device)
        query = torch.randn(sequences, config.num_heads, config.head_dim, device=device).to(torch.bfloat16)
        entry: dict[str, Any] = {
            "shape": shape, "sequences": sequences, "length": length, "block_size": block_size,
            "bytes": sequences * length * 2 * config.kv_size * 2,
        }  # fmt: skip
        settings = [(stages, warps) for stages in (2, 3, 4, 5) for warps in (2, 4, 8)]
        if block_size == 16:
            settings = [(3, 4)]
        pieces = new_pieces(sequences, attention, device, num_processors=132)
        cut(pieces, lengths)

        layers = [
            partial(
                decode_attention,
                query,
                replace(attention, layer=layer),
                storage,
                tables,
                rows,
                lengths,
                pieces,
            )
            for layer in range(len(storage.keys))
        ]
        _compile([partial(layers[0], stages=stages, warps=warps) for stages, warps in settings])
        for stages, warps in settings:
            calls: list[Callable[[], Any]] = [partial(layer, stages=stages, warps=warps) for layer in layers]
            entry[str((stages, warps))] = _microseconds(calls)
        yield entry


def _filled_cache(config: ModelConfig, sequences: int, length: int, block_size: int, device: str) -> Any:
    count = -(-length // block_size)
    per_layer = (sequences * count + 1) * block_size * config.kv_size * 4
    layers = max(1, min(32, FOOTPRINT // per_layer))
    storage, tables = _random_cache(layers, config.num_kv_heads, config.head_dim, sequences, count, block_size, device)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=device)
    return storage, tables, lengths, torch.arange(sequences, dtype=torch.int32, device=device)


def _random_cache(
    layers: int, kv_heads: int, dim: int, sequences: int, count: int, block_size: int, device: str
) -> tuple[KVStorage, torch.Tensor]:
    """A cache of random numbers, and tables of `count` blocks for each sequence, in random order."""
    layout = CacheLayout(layers, sequences * count + 1, block_size, kv_heads, dim, "bf16")
    storage = KVStorage(layout, device=device, backend="torch")
    for array in (*storage.keys, *storage.values):
        array.normal_()
    order = 1 + np.random.default_rng(0).permutation(sequences * count).astype(np.int32)
    return storage, torch.from_numpy(order.reshape(sequences, count)).to(device)


def tune_prefill(heads: int, kv_heads: int, dim: int, sequences: int, length: int) -> dict[str, Any]:
    """TFLOP/s of prefill attention: torch's (cuDNN), our own over fresh keys, our own over the cache."""
    from bifolio.kernels.triton.prefill import cudnn_attention, prefill_attention, tile_rows
    from bifolio.kernels.triton.query_tiles import cut_queries

    shape = AttentionShape(0, heads, kv_heads, dim, dim**-0.5)
    storage, tables = _random_cache(1, kv_heads, dim, sequences, -(-length // 64), 64, "cuda")
    total = sequences * length
    own = Heads(
        *(torch.randn(total, count, dim, device="cuda").to(torch.bfloat16) for count in (heads, kv_heads, kv_heads))
    )
    operations = 2.0 * heads * dim * sequences * length**2
    counts = np.full(sequences, length, dtype=np.int32)
    segment = PrefillOrchestrator.lay_out(np.zeros_like(counts), counts, tables)
    result: dict[str, Any] = {"heads": heads, "dim": dim, "sequences": sequences, "length": length}
    calls: list[Callable[[], Any]] = [partial(cudnn_attention, own, shape, sequences)] * 3
    result["cudnn"] = operations / 1e6 / _microseconds(calls)
    rows = tile_rows(torch.bfloat16, shape, length)
    tiles = cut_queries(segment, rows, "cuda")
    out = torch.empty((total, heads * dim), dtype=torch.bfloat16, device="cuda")
    for name, part in (("fresh", segment), ("paged", replace(segment, fresh=False))):
        calls = [partial(prefill_attention, own, shape, part, storage, tiles, rows, out)] * 3
        result[name] = operations / 1e6 / _microseconds(calls)
    return result


_compiling_only = False


def compile_all(shape: str, rows: int) -> None:
    """Run every setting once without timing it: compiled kernels are then found on disk."""
    global _compiling_only
    _compiling_only = True
    list(tune_products(shape, rows))
    if rows == 1:
        list(tune_decode(shape, 4, 200))


def _microseconds(functions: list[Callable[[], Any]]) -> float:
    """NaN when a setting does not run."""
    if _compiling_only:
        return float("nan")
    try:
        repeated = functions * max(1, 16 // len(functions))
        return round(time_in_graph(repeated) * 1e6, 2)
    except Exception as error:
        print(f"    a setting failed: {str(error)[:200]}")
        return float("nan")


def _compile(functions: list[Callable[[], Any]]) -> None:
    """Compile all settings at once: compilation takes most of the time."""

    def attempt(function: Callable[[], Any]) -> None:
        try:
            function()
        except Exception as error:
            print(f"    a setting failed: {str(error)[:200]}")

    with ThreadPoolExecutor(4, initializer=_touch_device) as pool:
        list(pool.map(attempt, functions))
    torch.cuda.synchronize()


def _touch_device() -> None:
    """A thread that has not used the device has no context in which matrices could be described."""
    torch.zeros(1, device="cuda").item()


# -- the command -------------------------------------------------------------------------------------------------------
def compile_ahead(shapes: list[str]) -> None:
    """Compile every setting, one process for each shape and number of rows."""
    running = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.micro.gpu_tuning", "--compile", f"{shape}:{rows}"])
        for shape in shapes
        for rows in PRODUCT_ROWS
    ]
    for process in running:
        process.wait()


def measurements(shapes: list[str], parts: list[str]) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        for rows in PRODUCT_ROWS if "products" in parts else ():
            yield from tune_products(shape, rows)
        for sequences, length in DECODES if "decode" in parts else ():
            yield from tune_decode(shape, sequences, length)
        torch.cuda.empty_cache()
    for heads, dim, sequences, length in PREFILLS if "prefill" in parts else ():
        yield tune_prefill(heads, 8, dim, sequences, length)


def line_of(entry: dict[str, Any]) -> str:
    """The subject, the bandwidth of its fastest setting, and the times of the first five."""
    if "cudnn" in entry:
        return f"prefill {entry}"
    subject = ("shape", "product", "rows", "sequences", "length", "block_size")
    times = {key: value for key, value in entry.items() if key not in (*subject, "bytes")}
    ordered = sorted(times.items(), key=lambda item: item[1] if item[1] == item[1] else 1e9)  # NaN last
    head = " ".join(str(entry[key]) for key in subject if key in entry)
    library = f"; library {times['library']:.1f}" if "library" in times else ""
    fastest = "; ".join(f"{key} {value:.1f}" for key, value in ordered[:5])
    return f"{head}: {entry['bytes'] / ordered[0][1] / 1e6:.2f} TB/s; {fastest}{library}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for tuning.json")
    parser.add_argument("--shapes", default="llama-1b,qwen3-0.6b,llama-8b", help="shapes of models, by commas")
    parser.add_argument("--parts", default=",".join(PARTS), help="kernels to time, by commas")
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        shape, _, rows = options.compile.partition(":")
        compile_all(shape, int(rows))
        return 0
    shapes, parts = options.shapes.split(","), options.parts.split(",")
    unknown = [name for name in parts if name not in PARTS] + [name for name in shapes if name not in SHAPES]
    if unknown:
        parser.error(f"{', '.join(unknown)}: parts are {', '.join(PARTS)}; shapes are {', '.join(SHAPES)}")
    try:
        require_gpu("cuda")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    compile_ahead(shapes)
    found = []
    for entry in measurements(shapes, parts):
        found.append(entry)
        print(line_of(entry), flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "tuning.json").write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
