"""Products whose factors the GPU's copy engine fetches, against torch in float32, over odd shapes and cuts.

Every tile is asked for by name, so that shapes which are too small to get it by themselves are tried too. Around x lie
NaNs: whoever reads beyond its last column shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from bifolio.kernels.triton.gemm_small_m import few_rows
from bifolio.kernels.triton.gemm_tuning import RowTile
from bifolio.kernels.triton.tma import can_be_described
from bifolio.measure.check_bench import Bench, Named, relative_error

EXTRAS = ("plain", "bias", "residual", "gated", "gated bias residual")
DEEP = RowTile(64, 128, 4, 4, swapped=True, described=True)
SHARED, FOUR = replace(DEEP, splits=2), replace(DEEP, splits=4)
WIDE = RowTile(128, 64, 4, 4, swapped=True, described=True)
NARROW = RowTile(32, 128, 4, 4, described=True)


def described_checks(bench: Bench, large: bool) -> Iterator[Named]:
    """None where the device has no such engine, or the numbers have more than 16 bits."""
    if not can_be_described(bench.normal(16, 16)):
        return
    cases = [  # (rows, outputs, depth, tile)
        (17, 70, 128, DEEP),
        (33, 100, 256, SHARED),
        (48, 33, 200, DEEP),
        (40, 70, 200, NARROW),
        (100, 70, 200, replace(NARROW, rows=128)),
        (64, 130, 328, replace(WIDE, splits=2)),
    ]
    if large:
        cases += [
            (17, 6100, 4096, DEEP),
            (33, 4100, 14336, SHARED),
            (48, 2040, 8200, FOUR),
            (64, 8200, 2048, DEEP),
            (64, 4096, 4096, NARROW),
            (127, 3072, 1024, replace(NARROW, rows=128)),
            (80, 14336, 4096, RowTile(64, 64, 4, 5, swapped=True, described=True, rows=128)),
            (64, 2040, 8192, replace(NARROW, splits=2)),
            (50, 14336, 4096, replace(DEEP, swapped=False)),
            (64, 1024, 3000, FOUR),
            (40, 50001, 1000, WIDE),
            (100, 4096, 1024, SHARED),  # two tiles of rows
        ]
    for rows, outputs, depth, tile in cases:
        for extra in EXTRAS:

            def error(
                rows: int = rows,
                outputs: int = outputs,
                depth: int = depth,
                tile: RowTile = tile,
                extra: str = extra,
            ) -> float:
                return _product_error(bench, rows, outputs, depth, tile, extra)

            cut = f"{tile.outputs}x{tile.depth}, {tile.splits} shares"
            yield f"described {rows}x{outputs}x{depth} in {cut} {extra}", error


def _product_error(bench: Bench, rows: int, outputs: int, depth: int, tile: RowTile, extra: str) -> float:
    gated = "gated" in extra
    total = 2 * outputs if gated else outputs
    weight = bench.normal(total, depth, scale=depth**-0.5)
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
