# mypy: disallow-untyped-decorators=False
"""The positions with the largest scores of a row, ascending; of equal scores the first.

Scores are compared as integers (*keys*) in the same order. A program finds the largest key that enough positions reach:
each pass over the row counts the positions at three keys and leaves a quarter of the interval. It ends early at a key
that exactly the wanted number of positions reach. One more pass writes the positions in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.pass_rows import PassRows
from bifolio.kernels.triton.selection import key_of

BLOCK = 4096  # scores that a program reads at once


@triton.jit
def _keys_at(ranked: tl.tensor, token: tl.tensor, end: tl.tensor) -> tl.tensor:
    """i32: keys of scores; those past the end are the least."""
    scores = tl.load(ranked + token, mask=token < end, other=-float("inf"))
    return tl.where(token < end, key_of(scores), -2147483648)


@triton.jit
def _threshold(ranked: tl.tensor, end: tl.tensor, TOP_K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """i64: a key that at least TOP_K positions reach, and at most TOP_K exceed."""
    least = tl.full([BLOCK], 2147483647, tl.int32)
    most = tl.full([BLOCK], -2147483648, tl.int32)
    for start in range(0, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        keys = _keys_at(ranked, token, end)
        least = tl.where(token < end, tl.minimum(least, keys), least)
        most = tl.maximum(most, keys)
    low, high = tl.min(least, axis=0).to(tl.int64), tl.max(most, axis=0).to(tl.int64)
    while low < high:  # at least TOP_K positions reach `low`, at most that exceed `high`
        span = high - low
        first, second, third = low + (span + 3) // 4, low + (2 * span + 3) // 4, low + (3 * span + 3) // 4
        at_first = tl.zeros([BLOCK], tl.int32)
        at_second = tl.zeros([BLOCK], tl.int32)
        at_third = tl.zeros([BLOCK], tl.int32)
        for start in range(0, end, BLOCK):
            keys = _keys_at(ranked, start + tl.arange(0, BLOCK), end)
            at_first += (keys >= first.to(tl.int32)).to(tl.int32)
            at_second += (keys >= second.to(tl.int32)).to(tl.int32)
            at_third += (keys >= third.to(tl.int32)).to(tl.int32)
        reach_first, reach_second = tl.sum(at_first, axis=0), tl.sum(at_second, axis=0)
        reach_third = tl.sum(at_third, axis=0)
        reached = low
        if reach_third >= TOP_K:
            low = third
            reached = tl.where(reach_third == TOP_K, third, high)
        elif reach_second >= TOP_K:
            low = second
            reached = tl.where(reach_second == TOP_K, second, third - 1)
        elif reach_first >= TOP_K:
            low = first
            reached = tl.where(reach_first == TOP_K, first, second - 1)
        else:
            reached = first - 1
        high = reached
    return low


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["seen", "chosen"])
def _top_kernel(
    ranked: tl.tensor,  # f32[n, width]
    seen: tl.tensor,  # i32[n]
    chosen: tl.tensor,  # i32[n, TOP_K]
    width: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(seen + row)
    if end > TOP_K:
        scores = ranked + row * width
        cut = _threshold(scores, end, TOP_K, BLOCK).to(tl.int32)
        above = tl.zeros([BLOCK], tl.int32)
        for start in range(0, end, BLOCK):
            above += (_keys_at(scores, start + tl.arange(0, BLOCK), end) > cut).to(tl.int32)
        ties_left = TOP_K - tl.sum(above, axis=0)  # positions at the cut that are chosen: the first ones
        written = end * 0
        for start in range(0, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            keys = _keys_at(scores, token, end)
            ties = ((keys == cut) & (token < end)).to(tl.int32)
            taken = (keys > cut) | ((ties > 0) & (tl.cumsum(ties, axis=0) <= ties_left))
            order = tl.cumsum(taken.to(tl.int32), axis=0)
            tl.store(chosen + row * TOP_K + written + order - 1, token, mask=taken)
            written += tl.sum(taken.to(tl.int32), axis=0)
            ties_left = tl.maximum(ties_left - tl.sum(ties, axis=0), 0)


def top_positions(ranked: torch.Tensor, rows: PassRows, chosen: torch.Tensor, *, first: int = 0) -> None:
    """Write the choice of the queries from row `first` on, whose scores these are: f32[n, width], without NaN.

    Rows of `chosen` (i32[t, top_k]) whose queries see at most top_k positions are left as they are.
    """
    count, width = ranked.shape
    _top_kernel[(count,)](
        ranked,
        rows.seen[first:],
        chosen[first:],
        width,
        TOP_K=chosen.shape[1],
        BLOCK=BLOCK,
        num_warps=16,
    )
