# mypy: disallow-untyped-decorators=False
"""Table lookups: rotations by position, embeddings by token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.long_rope import LONG_ROPE


@triton.jit(do_not_specialize=["set_size"], do_not_specialize_on_alignment=["positions"])
def _rotation_kernel(
    table: tl.tensor,  # f32[sets, positions, 2, half]  cosine, sine
    positions: tl.tensor,  # i32[r]
    cos: tl.tensor,  # f32[r, half]
    sin: tl.tensor,
    set_size: tl.tensor,  # positions of a set; 0: there is one
    LONG: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    wait_for_inputs()
    position = tl.load(positions + row).to(tl.int64)
    source = table + (position // LONG * set_size + position % LONG) * (2 * HALF) + column
    tl.store(cos + row * HALF + column, tl.load(source, mask=inside), mask=inside)
    tl.store(sin + row * HALF + column, tl.load(source + HALF, mask=inside), mask=inside)


def look_up_rotation(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosine, sine), each f32[r, half], of positions within the table f32[sets, positions, 2, half]."""
    rows, (num_sets, size, _, half) = positions.shape[0], table.shape
    cos = torch.empty((rows, half), dtype=torch.float32, device=table.device)
    sin = torch.empty_like(cos)
    if rows:
        block = triton.next_power_of_2(half)
        _rotation_kernel[(rows,)](
            table, positions, cos, sin, size if num_sets > 1 else 0, LONG=LONG_ROPE, HALF=half, BLOCK=block,
            num_warps=1, **OVERLAPPED,
        )  # fmt: skip
    return cos, sin


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embed_kernel(
    table: tl.tensor,  # [vocab, columns]
    ids: tl.tensor,  # i32[r]
    out: tl.tensor,  # f32[r, columns]
    num_columns: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    wait_for_inputs()
    source = table + tl.load(ids + row).to(tl.int64) * num_columns + column
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + row * num_columns + column, values, mask=inside)


def embed_rows(table: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
    """f32[r, columns]: rows of an embedding, times a factor."""
    rows, columns = ids.shape[0], table.shape[1]
    out = torch.empty((rows, columns), dtype=torch.float32, device=table.device)
    if rows:
        block = min(triton.next_power_of_2(columns), 1024)
        grid = rows, triton.cdiv(columns, block)
        _embed_kernel[grid](table, ids, out, columns, float(scale), BLOCK=block, num_warps=4, **OVERLAPPED)
    return out
