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
    ((100, 4096, 1024), SHARED),  # two tiles of rows, which overlap
    ((136, 2048, 8192), replace(NARROW, rows=128)),
    ((200, 4096, 4096), RowTile(64, 64, 4, 5, described=True, rows=128)),
    ((160, 8192, 2048), RowTile(64, 64, 8, 4, swapped=True, described=True, rows=256)),
]
FIXED_ROWS = (17, 40, 64, 72, 100, 127, 128, 136, 200, 256, 300, 600)
FIXED_SHAPES = [
    (2048, 8192, False),
    (1024, 3072, False),
    (4096, 4096, False),
    (6144, 4096, False),
    (3072, 1024, True),
    (14336, 4096, True),
]  # outputs, depth, whether gated


def tma_checks() -> Iterator[Check]:
    for shape, tile in (*SHAPES, *LARGE_SHAPES):
        name = f"tma {'x'.join(map(str, shape))} in {tile.outputs}x{tile.depth}, {tile.splits} shares"
        for extra in EXTRAS:
            error = partial(product_error, shape=shape, tile=tile, extra=extra)
            yield Check(f"{name} {extra}", error, (shape, tile) in LARGE_SHAPES, narrow=True)


def fixed_checks() -> Iterator[Check]:
    yield Check("fixed 70x96", partial(fixed_error, rows=(17, 40), outputs=70, depth=96, gated=False), narrow=True)
    for outputs, depth, gated in FIXED_SHAPES:
        run = partial(fixed_error, rows=FIXED_ROWS, outputs=outputs, depth=depth, gated=gated)
        yield Check(f"fixed {outputs}x{depth}{' gated' * gated}", run, large=True, narrow=True)


def fixed_error(bench: Bench, *, rows: tuple[int, ...], outputs: int, depth: int, gated: bool) -> float:
    """1 if in deterministic mode a row of x gives other bits with other rows than alone; otherwise 0."""
    weight = bench.normal(outputs * (2 if gated else 1), depth, scale=depth**-0.5)
    x, activation = bench.normal(max(rows), depth), "silu" if gated else None
    for count in rows:
        found = few_rows(x[:count], weight, activation=activation, fixed=True)
        for row in (0, count // 2, count - 1):
            if not torch.equal(found[row], few_rows(x[row : row + 1], weight, activation=activation, fixed=True)[0]):
                return 1.0
    return 0.0


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
