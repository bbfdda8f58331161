"""Checks of products whose factors the GPU's copy engine (TMA) fetches, over odd shapes and cuts.

Every tile is asked for by name, so that shapes which are too small to get it by themselves are tried too. Around x lie
NaNs: a read beyond its last column shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from check_bench import Bench, Check, relative_error

from bifolio.kernels.triton.gemm_small_m import few_rows
from bifolio.kernels.triton.gemm_tuning import RowTile
from bifolio.kernels.triton.tma import can_be_described

EXTRAS = ("plain", "bias", "residual", "gated", "gated bias residual")
DEEP = RowTile(64, 128, 4, 4, swapped=True, described=True)
SHARED, FOUR = replace(DEEP, splits=2), replace(DEEP, splits=4)
WIDE = RowTile(128, 64, 4, 4, swapped=True, described=True)
NARROW = RowTile(32, 128, 4, 4, described=True)
SHAPES = [  # (rows, outputs, depth), tile
    ((17, 70, 128), DEEP),
    ((33, 100, 256), SHARED),
    ((48, 33, 200), DEEP),
    ((40, 70, 200), NARROW),
    ((100, 70, 200), replace(NARROW, rows=128)),
    ((64, 130, 328), replace(WIDE, splits=2)),
]
LARGE_SHAPES = [
    ((17, 6100, 4096), DEEP),
    ((33, 4100, 14336), SHARED),
    ((48, 2040, 8200), FOUR),
    ((64, 8200, 2048), DEEP),
    ((64, 4096, 4096), NARROW),
    ((127, 3072, 1024), replace(NARROW, rows=128)),
    ((80, 14336, 4096), RowTile(64, 64, 4, 5, swapped=True, described=True, rows=128)),
    ((64, 2040, 8192), replace(NARROW, splits=2)),
    ((50, 14336, 4096), replace(DEEP, swapped=False)),
    ((64, 1024, 3000), FOUR),
    ((40, 50001, 1000), WIDE),
    ((100, 4096, 1024), SHARED),  # two tiles of rows
]


def tma_checks() -> Iterator[Check]:
    for shape, tile in (*SHAPES, *LARGE_SHAPES):
        name = f"tma {'x'.join(map(str, shape))} in {tile.outputs}x{tile.depth}, {tile.splits} shares"
        for extra in EXTRAS:
            error = partial(product_error, shape=shape, tile=tile, extra=extra)
            yield Check(f"{name} {extra}", error, (shape, tile) in LARGE_SHAPES, narrow=True)


def product_error(bench: Bench, *, shape: tuple[int, int, int], tile: RowTile, extra: str) -> float:
    rows, outputs, depth = shape
    gated = "gated" in extra
    total = 2 * outputs if gated else outputs
    weight = bench.normal(total, depth, scale=depth**-0.5)
    if not can_be_described(weight):
        pytest.skip("the device has no copy engine for tiles")
    x = torch.full((rows + 1, depth + 64), torch.nan, dtype=bench.dtype, device=bench.device)[:rows, :depth]
    x.copy_(bench.normal(rows, depth))
    bias = bench.normal(total) if "bias" in extra else None
    residual = bench.normal(rows, outputs, dtype=torch.float32) if "residual" in extra else None
    activation = "silu" if gated else None
    result = few_rows(
        x, weight, bias=bias, residual=residual, activation=activation, out_dtype=torch.float32, tile=tile
    )  # fmt: skip
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if gated:
        expected = bench.reference.act_mul(expected, "silu")
    return relative_error(result, expected if residual is None else expected + residual)
