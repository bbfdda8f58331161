# mypy: disallow-untyped-decorators=False
"""Permanent rows on the device: changes arrive as one small list; a step reads what it needs from its rows.

Also what else looks rows up: rotations by position, embeddings by token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["state", "changes"])
def _apply_changes_kernel(
    state: tl.tensor,  # i32[n]
    changes: tl.tensor,  # i32[2, count]  places, then numbers
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    place = tl.load(changes + index, mask=inside, other=0)
    tl.store(state + place, tl.load(changes + count + index, mask=inside, other=0), mask=inside)


def apply_changes(state: torch.Tensor, changes: torch.Tensor) -> None:
    """state[places] = numbers, for i32[2, count] changes whose places differ."""
    count = changes.shape[1]
    _apply_changes_kernel[(triton.cdiv(count, 256),)](state, changes, count, BLOCK=256, num_warps=4)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["rows", "tables", "lengths", "last_tokens"],
)
def _begin_step_kernel(
    rows: tl.tensor,  # i32[r]  slot of each row; -1: padding
    tables: tl.tensor,  # i32[slots, max_blocks]
    lengths: tl.tensor,  # i32[slots]
    last_tokens: tl.tensor,  # i32[slots]
    token_ids: tl.tensor,  # i32[r]
    positions: tl.tensor,  # i32[r]
    places: tl.tensor,  # i64[r]
    contexts: tl.tensor,  # i32[r]
    table_rows: tl.tensor,  # i32[r]
    turn: tl.tensor,  # i32[1]
    num_rows: tl.tensor,
    table_stride: tl.tensor,
    TURNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    wait_for_inputs()
    if tl.program_id(0) == 0:
        tl.store(turn, (tl.load(turn) + 1) % TURNS)
    slot = tl.load(rows + row, mask=exists, other=-1)
    real = slot >= 0
    position = tl.load(lengths + slot, mask=real, other=0)
    token = tl.load(last_tokens + slot, mask=real, other=0)
    block = tl.load(tables + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=real, other=0)
    tl.store(token_ids + row, tl.maximum(token, 0), mask=exists)  # -1: nothing could be chosen; the row is given up
    tl.store(positions + row, position, mask=exists)
    tl.store(places + row, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=exists)
    tl.store(contexts + row, tl.where(real, position + 1, 0), mask=exists)
    tl.store(table_rows + row, tl.maximum(slot, 0), mask=exists)


def begin_step(
    rows: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    last_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    contexts: torch.Tensor,
    table_rows: torch.Tensor,
    turn: torch.Tensor,
    block_size: int,
    turns: int,
) -> None:
    """Lay out the next token of every row: what it is, where it stands, where its K and V go, what it sees."""
    num_rows = rows.shape[0]
    block = 64
    _begin_step_kernel[(triton.cdiv(num_rows, block),)](
        rows,
        tables,
        lengths,
        last_tokens,
        token_ids,
        positions,
        places,
        contexts,
        table_rows,
        turn,
        num_rows,
        tables.stride(0),
        TURNS=turns,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=1,
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rotation_kernel(
    table: tl.tensor,  # f32[positions, 2, half]  cosine, sine
    positions: tl.tensor,  # i32[r]
    cos: tl.tensor,  # f32[r, half]
    sin: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    wait_for_inputs()
    source = table + tl.load(positions + row).to(tl.int64) * (2 * HALF) + column
    tl.store(cos + row * HALF + column, tl.load(source, mask=inside), mask=inside)
    tl.store(sin + row * HALF + column, tl.load(source + HALF, mask=inside), mask=inside)


def look_up_rotation(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosine, sine), each f32[r, half], of positions that the table holds."""
    rows, half = positions.shape[0], table.shape[2]
    cos = torch.empty((rows, half), dtype=torch.float32, device=table.device)
    sin = torch.empty_like(cos)
    if rows:
        block = triton.next_power_of_2(half)
        _rotation_kernel[(rows,)](table, positions, cos, sin, HALF=half, BLOCK=block, num_warps=1, **OVERLAPPED)
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
