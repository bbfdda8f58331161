"""Launches of products of several rows with quantised weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
from test_row_launches import Recorder

from bifolio.kernels.cuda import code_product, nvrtc
from bifolio.kernels.cuda.code_product import GROUP_BYTES, MOST_ROWS, TOP_BYTES, tile_for
from bifolio.kernels.cuda.row_product import CODED, SHARED_BYTES
from bifolio.kernels.triton import row_layouts
from bifolio.kernels.triton.row_layouts import LAYOUTS, pack
from exotic_weights import exotic_tensor

CODES = [layout.constants(4096) for layout in LAYOUTS.values() if layout.scales in CODED]


def test_sizes_of_factors_are_those_of_the_layouts() -> None:
    assert {kind: GROUP_BYTES[kind] for kind in CODED} == {kind: row_layouts.GROUP_BYTES[kind] for kind in CODED}
    assert {kind: TOP_BYTES[kind] for kind in CODED} == {kind: row_layouts.TOP_BYTES.get(kind, 0) for kind in CODED}


@given(st.integers(2, 600), st.integers(1, 300000), st.sampled_from(CODES), st.booleans())
def test_tiles_fit_and_divide_their_warps(rows: int, outputs: int, codes: dict[str, int], gated: bool) -> None:
    tile = tile_for(rows, outputs, codes, gated=gated)
    assert tile is not None
    assert tile.stages >= 2
    assert tile.shared_bytes(codes) <= SHARED_BYTES
    assert tile.rows % 8 == 0
    assert min(rows, MOST_ROWS // 2) <= tile.rows <= MOST_ROWS
    assert tile.tiles * tile.rows <= 256  # sums of a lane stay in registers
    assert tile.warps * 32 <= 1024
    assert tile.along >= 2  # 256 columns have whole factors of K-quants
    assert tile.splits in (1, 2, 4, 8)  # thread blocks of a cluster


def test_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(nvrtc, "load_source", recorder.load_source)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    weight = pack((exotic_tensor("Q6_K", 96, 512),), "cpu")
    x, residual, out = torch.zeros(200, 512, dtype=torch.bfloat16), torch.zeros(200, 96), torch.zeros(200, 128)[:, :96]
    tile = code_product.CodeTile(64, 2, 1, 2, 2, splits=2)
    code_product.multiply(
        x, weight.rows, weight.constants(), out, bias=None, residual=residual, activation=-1, tile=tile
    )
    recorder.check()
    assert recorder.grid == (3 * 4 * 2,)  # 96 outputs in tiles of 32, 200 rows in blocks of 64, two thread blocks each
    assert recorder.block == 2 * 32
    own = recorder.constants
    assert (own["LOW"], own["HIGH"], own["GROUP"], own["ZERO"], own["ROWS"]) == (4, 2, 16, 32, 64)
    assert (own["IS_OUT_WIDE"], own["IS_RESIDUAL_WIDE"], own["CLUSTER"]) == (True, True, 2)
    assert recorder.arguments[5:10] == (200, 96, 512, 96, 128)
