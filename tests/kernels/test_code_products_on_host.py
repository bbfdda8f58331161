"""Products of several rows with quantised weights in CUDA C++, compiled for the host (`cuda_on_host.h`)."""

from __future__ import annotations

import pytest
import torch
from host_modules import COMPILER, ON_HOST, close, normal

pytest.importorskip("triton")

from bifolio.kernels.cuda import code_product
from bifolio.kernels.cuda.code_product import CodeTile
from bifolio.kernels.triton.row_layouts import LAYOUTS, pack
from exotic_weights import exotic_tensor

pytestmark = [pytest.mark.full, pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"), ON_HOST]

TILES = {
    "plain": CodeTile(8, 1, 2, 2, 3),
    "gated": CodeTile(16, 2, 1, 2, 2),
    "residual": CodeTile(8, 1, 1, 4, 2, splits=2),
}


@pytest.mark.parametrize("name", [format.name for format in LAYOUTS if format.name != "MXFP4"])
@pytest.mark.parametrize(
    ("count", "outputs", "depth", "extra"), [(11, 45, 1024, "plain"), (5, 24, 768, "gated"), (3, 50, 1280, "residual")]
)
def test_a_product_of_several_rows(name: str, count: int, outputs: int, depth: int, extra: str) -> None:
    """Columns and rows are ragged; numbers, scales and offsets are rounded to bf16."""
    gated = extra == "gated"
    source = exotic_tensor(name, outputs * (2 if gated else 1), depth)
    weight = pack((source,), "cpu")
    x = normal(2, count, depth)
    wide = torch.float32
    residual = normal(5, count, outputs + 2, dtype=wide)[:, 1:-1] if extra == "residual" else None
    bias = normal(4, weight.shape[0]) if gated else None
    out = torch.full((count, outputs + 3), float("nan"), dtype=wide if extra == "residual" else torch.bfloat16)
    own = out[:, :outputs]
    code_product.multiply(
        x, weight.rows, weight.constants(), own, bias=bias, residual=residual, activation=0 if gated else -1,
        tile=TILES[extra],
    )  # fmt: skip
    expected = x.float() @ torch.from_numpy(source.dequantize()).T
    if bias is not None:
        gate, up = (expected + bias.float()).chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    close(own, expected if residual is None else expected + residual, 8e-3 if gated else 4e-3)
    assert out[:, outputs:].isnan().all()
