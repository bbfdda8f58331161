# mypy: disallow-untyped-decorators=False
"""Split-KV: the contexts of a decode step are split into pieces that fill the GPU.

    sequence 0  |<- piece 0 ->|<- piece 1 ->|<- piece 2 ->|
    sequence 1  |<--- piece 3 --->|
    sequence 2  |<- piece 4 ->|<- piece 5 ->|

The length of a piece is computed on the device from all contexts, so that one CUDA graph works for any lengths; there
are at most `num_sequences + extra` pieces. Each context is split into pieces of equal length, as near as possible
to the wanted one: a remainder of a few tokens would occupy a multiprocessor almost as long as a piece. The longest
pieces start first: started last, they would delay the end of the kernel.

In deterministic mode pieces begin at multiples of `FIXED_PIECE` tokens, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionShape
from bifolio.kernels.triton.tiles import TILE

PIECE_BYTES = 1024  # of head dimensions per multiprocessor, before division among the heads
FEWEST_PIECES = 2  # per multiprocessor, before division among the heads: enough to fill it when all are equally long
PIECES_PER_SEQUENCE = 4  # of a context of average length, so that contexts of different lengths are balanced
FIXED_PIECE = 1024  # tokens of a piece in deterministic mode


@dataclass(slots=True)
class Pieces:
    """The pieces of one step; filled on the device, once per step and window."""

    sequence: torch.Tensor  # i32[p]  sequence of the piece; -1: unused
    number: torch.Tensor  # i32[p]  index within the sequence's pieces
    first: torch.Tensor  # i32[s]  index of the sequence's first piece
    count: torch.Tensor  # i32[s]
    length: torch.Tensor  # i32[s]  tokens of each of the sequence's pieces except the last
    total: torch.Tensor  # i32[1]  pieces in use
    arrivals: torch.Tensor  # i32[s, kv_heads]  completed pieces; 0 between two launches
    mixed: torch.Tensor  # f32[p, heads, dim]
    weight: torch.Tensor  # f32[p, heads]  log2 of the sum of weights
    window: int  # `AttentionShape.reach`
    fixed: bool  # they begin at multiples of FIXED_PIECE

    @property
    def most(self) -> int:
        return int(self.sequence.shape[0])


Parts = tuple[torch.Tensor, torch.Tensor]  # `mixed` and `weight` of `Pieces`


def new_pieces(
    num_sequences: int,
    shape: AttentionShape,
    device: torch.device | str,
    *,
    num_processors: int,
    fixed_len: int = 0,  # the longest context; 0: pieces of any length
    parts: Parts | None = None,  # room for results that other steps use too
) -> Pieces:
    """Buffers for the pieces of a step."""
    most = most_pieces(num_sequences, shape, num_processors, fixed_len)

    def integers(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    mixed, weight = parts or new_parts(most, shape, device)
    return Pieces(
        sequence=integers(most),
        number=integers(most),
        first=integers(num_sequences),
        count=integers(num_sequences),
        length=integers(num_sequences),
        total=integers(1),
        arrivals=integers(num_sequences, shape.num_kv_heads),
        mixed=mixed,
        weight=weight,
        window=shape.reach,
        fixed=fixed_len > 0,
    )


def most_pieces(num_sequences: int, shape: AttentionShape, num_processors: int, fixed_len: int = 0) -> int:
    """Pieces of a step at most."""
    if fixed_len:
        return num_sequences * -(-fixed_len // FIXED_PIECE)
    finest = PIECE_BYTES // shape.head_dim * num_processors // shape.num_kv_heads
    coarsest = FEWEST_PIECES * num_processors // shape.num_kv_heads
    return num_sequences + max(min(max(PIECES_PER_SEQUENCE * num_sequences, coarsest), finest), 1)


def new_parts(most: int, shape: AttentionShape, device: torch.device | str) -> Parts:
    """Room for the results of `most` pieces."""
    mixed = torch.empty((most, shape.num_heads, shape.head_dim), dtype=torch.float32, device=device)
    return mixed, torch.empty((most, shape.num_heads), dtype=torch.float32, device=device)


@triton.jit(
    do_not_specialize=["num_sequences", "most", "extra", "window"],
    do_not_specialize_on_alignment=[
        "lengths",
        "sequence",
        "number",
        "first",
        "count",
        "piece_length",
        "total_pieces",
        "skipped",
    ],
)
def _cut_kernel(
    lengths: tl.tensor,  # i32[s]
    sequence: tl.tensor,
    number: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    piece_length: tl.tensor,
    total_pieces: tl.tensor,
    num_sequences: tl.tensor,
    most: tl.tensor,
    extra: tl.tensor,
    window: tl.tensor,
    skipped: tl.tensor,  # i32[s]  leading tokens covered by shared attention
    IS_SHARED: tl.constexpr,  # `skipped` is used
    TILE: tl.constexpr,
    FIXED: tl.constexpr,  # tokens of a piece; 0: chosen by the contexts
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
    OTHERS: tl.constexpr,
) -> None:
    row = tl.arange(0, BLOCK)
    ALIGN: tl.constexpr = FIXED if FIXED > 0 else TILE
    span = _span(lengths, skipped, row, num_sequences, window, IS_SHARED, ALIGN)
    wanted = tl.cdiv(tl.cdiv(tl.maximum(tl.sum(span, axis=0), 1), extra), TILE) * TILE
    piece, pieces = _share(span, wanted, TILE, FIXED)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_sequences, OTHERS):
        other = start + tl.arange(0, OTHERS)
        their_span = _span(lengths, skipped, other, num_sequences, window, IS_SHARED, ALIGN)
        their_piece, their_pieces = _share(their_span, wanted, TILE, FIXED)
        is_longer = their_piece[None, :] > piece[:, None]
        comes_first = is_longer | ((their_piece[None, :] == piece[:, None]) & (other[None, :] < row[:, None]))
        before += tl.sum(tl.where(comes_first, their_pieces[None, :], 0), axis=1)
    tl.store(first + row, before, mask=row < num_sequences)
    tl.store(count + row, pieces, mask=row < num_sequences)
    tl.store(piece_length + row, piece, mask=row < num_sequences)
    total = tl.sum(pieces, axis=0)
    tl.store(total_pieces, total)
    for start in range(0, most, ITEMS):
        item = start + tl.arange(0, ITEMS)
        tl.store(sequence + item, tl.full([ITEMS], -1, tl.int32), mask=(item >= total) & (item < most))
    for index in range(tl.max(pieces, axis=0)):
        mine = (index < pieces) & (before + index < most)
        tl.store(sequence + before + index, row, mask=mine)
        tl.store(number + before + index, tl.zeros([BLOCK], tl.int32) + index, mask=mine)


@triton.jit
def _span(
    lengths: tl.tensor,
    skipped: tl.tensor,
    row: tl.tensor,
    num_sequences: tl.tensor,
    window: tl.tensor,
    IS_SHARED: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tl.tensor:
    """i32[rows]: tokens of these sequences that are read, 0 past the last sequence."""
    length = tl.load(lengths + row, mask=row < num_sequences, other=0)
    skip = length * 0
    if IS_SHARED:
        skip = tl.load(skipped + row, mask=row < num_sequences, other=0)
    return tl.maximum(length - first_token(length, window, skip, ALIGN), 0)


@triton.jit
def _share(span: tl.tensor, wanted: tl.tensor, TILE: tl.constexpr, FIXED: tl.constexpr) -> tl.tensor:
    """(tokens of a piece, number of pieces): pieces of equal length, as near as possible to `wanted` tokens."""
    if FIXED > 0:
        return span * 0 + FIXED, (span + FIXED - 1) // FIXED
    shares = tl.maximum((span + wanted // 2) // wanted, 1)
    tiles = tl.maximum(span + TILE - 1, TILE) // TILE
    piece = (tiles + shares - 1) // shares * TILE
    return piece, (span + piece - 1) // piece


@triton.jit
def first_token(length: tl.tensor, window: tl.tensor, skipped: tl.tensor, ALIGN: tl.constexpr) -> tl.tensor:
    """First token to read: the start of the tile or fixed piece with the window's first token, after skipped tiles."""
    return tl.maximum(first_visible(length, window) // ALIGN * ALIGN, skipped)


@triton.jit
def first_visible(length: tl.tensor, window: tl.tensor) -> tl.tensor:
    """First token that the last of `length` tokens sees; a window below 0: chunks of that length."""
    chunk = tl.maximum(-window, 1)
    begin = tl.where(window < 0, tl.maximum(length - 1, 0) // chunk * chunk, 0)
    return tl.where(window > 0, tl.maximum(length - window, 0), begin)


def cut(pieces: Pieces, lengths: torch.Tensor, skipped: torch.Tensor | None = None) -> None:
    """Plan the pieces for these context lengths (i32[s], on the device)."""
    num_sequences = lengths.shape[0]
    _cut_kernel[(1,)](
        lengths,
        pieces.sequence,
        pieces.number,
        pieces.first,
        pieces.count,
        pieces.length,
        pieces.total,
        num_sequences,
        pieces.most,
        max(pieces.most - num_sequences, 1),
        pieces.window,
        lengths if skipped is None else skipped,
        IS_SHARED=skipped is not None,
        TILE=TILE,
        FIXED=FIXED_PIECE if pieces.fixed else 0,
        BLOCK=max(256, triton.next_power_of_2(num_sequences)),  # the same compiled kernel for most batch sizes
        ITEMS=256,
        OTHERS=32,
        num_warps=8,
    )
