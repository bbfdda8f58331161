# mypy: disallow-untyped-decorators=False
"""Products with a matrix for each head, in tiles of one size: a row has the same bits in a pass of any size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, OUTPUTS, DEPTH = 32, 64, 32  # of a tile


@triton.jit(do_not_specialize=["num_rows", "x_stride"])
def _head_kernel(
    x: tl.tensor,  # [num_rows, heads * width], rows `x_stride` apart
    weight: tl.tensor,  # [heads, outputs, inputs]
    out: tl.tensor,  # [num_rows, heads * outputs]
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    WIDTH: tl.constexpr,
    START: tl.constexpr,  # first input in the columns of a head
    INPUTS: tl.constexpr,
    WIDE: tl.constexpr,  # outputs of a head
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_row, has_column = (row < num_rows)[:, None], (column < WIDE)[:, None]
    own = x + row[:, None] * x_stride + head * WIDTH + START
    matrix = weight + (head.to(tl.int64) * WIDE + column)[:, None] * INPUTS
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = (depth < INPUTS)[None, :]
        values = tl.load(own + depth[None, :], mask=has_row & inside, other=0.0)
        factors = tl.load(matrix + depth[None, :], mask=has_column & inside, other=0.0)
        total = tl.dot(values, tl.trans(factors), total, input_precision=PRECISION)
    place = out + row[:, None] * (tl.num_programs(1) * WIDE) + head * WIDE + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=has_row & (column < WIDE)[None, :])


def head_products(x: torch.Tensor, weight: torch.Tensor, start: int) -> torch.Tensor:
    """[t, heads * outputs]: the columns of each head from `start` on, times the matrix of the head."""
    heads, outputs, inputs = weight.shape
    out = torch.empty((len(x), heads * outputs), dtype=x.dtype, device=x.device)
    _head_kernel[(triton.cdiv(len(x), ROWS), heads, triton.cdiv(outputs, OUTPUTS))](
        x,
        weight,
        out,
        len(x),
        x.stride(0),
        WIDTH=x.shape[1] // heads,
        START=start,
        INPUTS=inputs,
        WIDE=outputs,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        DEPTH=DEPTH,
        PRECISION="ieee",
        num_warps=4,
    )
    return out
