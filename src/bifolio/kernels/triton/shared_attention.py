# mypy: disallow-untyped-decorators=False
"""Decode attention over a prefix that several rows share: its keys and values are read once for all of them.

The query heads of all sharers that belong to one key head are the rows of one matrix product. Each work item
(`kernels.shared_prefix`) writes, for each of its rows, the weighted mean of values and the logarithm of the sum of
weights; decode attention, which runs next over the rest of each context, merges them with its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionShape, Storage
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.tiles import TILE, in_product_type, mix_tile, product_dtype, read_tile, score_constants

INTERPRETED = bool(triton.knobs.runtime.interpret)
QUERY_ROWS = 16 if INTERPRETED else 128  # queries of an item: rows of the step times query heads of a key head
MAX_ITEMS = 96


@dataclass(slots=True)
class SharedRows:
    """The work items of a step on the device, and buffers for their partial results."""

    words: torch.Tensor  # i32[4 * s + 4 * MAX_ITEMS]  all fields of `SharedWork`, in one copy from the host
    mixed: torch.Tensor  # f32[items, kv_heads, QUERY_ROWS, dim]
    weight: torch.Tensor  # f32[items, kv_heads, QUERY_ROWS]  log2 of the sum of weights

    @property
    def max_items(self) -> int:
        return int(self.mixed.shape[0])

    @property
    def num_rows(self) -> int:
        return len(self.words) // 4 - self.max_items

    @property
    def skipped(self) -> torch.Tensor:
        """i32[s]: leading tokens of each context covered by items."""
        return self.words[: self.num_rows]


def rows_per_item(shape: AttentionShape) -> int:
    return max(QUERY_ROWS // (shape.num_heads // shape.num_kv_heads), 1)


def new_shared_rows(num_rows: int, shape: AttentionShape, device: torch.device | str) -> SharedRows:
    parts = MAX_ITEMS, shape.num_kv_heads, QUERY_ROWS
    words = torch.zeros(4 * (num_rows + MAX_ITEMS), dtype=torch.int32, device=device)
    words[4 * num_rows :] = -1  # no items
    return SharedRows(
        words,
        torch.empty((*parts, shape.head_dim), dtype=torch.float32, device=device),
        torch.empty(parts, dtype=torch.float32, device=device),
    )


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "table_rows", "items"])
def _shared_kernel(
    query: tl.tensor,  # [s, heads, dim], rows `query_stride` apart
    keys: tl.tensor,  # [blocks, kv_heads, block_size, dim]
    values: tl.tensor,
    tables: tl.tensor,  # i32[rows, max_blocks]
    table_rows: tl.tensor,  # i32[s]
    items: tl.tensor,  # i32[items, 4]
    mixed_parts: tl.tensor,
    weight_parts: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,  # of scores; 0: none
) -> None:
    kv_head, item = tl.program_id(0), tl.program_id(1)
    first = tl.load(items + 4 * item)
    count = tl.load(items + 4 * item + 1)
    begin = tl.load(items + 4 * item + 2)
    end = tl.load(items + 4 * item + 3)
    table = tables + tl.load(table_rows + tl.maximum(first, 0)).to(tl.int64) * table_stride
    wait_for_inputs()
    if first >= 0:
        row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
        head = kv_head * GROUP + row % GROUP
        real = (row < count * GROUP)[:, None] & (dim < DIM)[None, :]
        place = query + (first + row // GROUP).to(tl.int64)[:, None] * query_stride + head[:, None] * DIM + dim[None, :]
        q = in_product_type(tl.load(place, mask=real, other=0.0), keys)
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
        visible = tl.full([1, TILE], 1, tl.int1)
        for start in tl.range(begin, end, TILE, num_stages=STAGES):
            k = read_tile(
                keys, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, MASKED=False
            )
            v = read_tile(
                values, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, MASKED=False
            )
            highest, total, mixed = mix_tile(
                q, k, v, visible, highest, total, mixed, scale, MASKED=False, PRECISION=PRECISION, CAP=CAP
            )
        part = (item.to(tl.int64) * KV_HEADS + kv_head) * ROWS + row
        tl.store(mixed_parts + part[:, None] * DIM + dim[None, :], mixed / total[:, None], mask=real)
        tl.store(weight_parts + part, highest + tl.log2(total), mask=row < count * GROUP)


def shared_attention(
    query: torch.Tensor,  # [s, heads, dim]
    shape: AttentionShape,
    storage: Storage,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    shared: SharedRows,
) -> None:
    """Attention of all sharing rows over their prefix; partial results are written to `shared`."""
    heads, dim = query.shape[1:]
    keys, values = storage.keys[shape.layer], storage.values[shape.layer]
    wide = product_dtype(query.dtype, keys.dtype) == torch.float32
    scale, cap = score_constants(shape)
    _shared_kernel[(shape.num_kv_heads, MAX_ITEMS)](
        query,
        keys,
        values,
        tables,
        table_rows,
        shared.words[4 * shared.num_rows :],
        shared.mixed,
        shared.weight,
        query.stride(0),
        tables.stride(0),
        scale,
        KV_HEADS=shape.num_kv_heads,
        GROUP=heads // shape.num_kv_heads,
        ROWS=QUERY_ROWS,
        DIM=dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        BLOCK_SIZE=storage.block_size,
        TILE=TILE,
        STAGES=1 if wide else 3,
        PRECISION="ieee" if wide else "tf32",
        CAP=cap,
        num_warps=8,
        num_stages=1 if wide else 3,
        **OVERLAPPED,
    )
