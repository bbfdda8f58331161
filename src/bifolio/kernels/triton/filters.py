# mypy: disallow-untyped-decorators=False
"""Top-k, top-p and min-p on the device, exactly and without sorting the vocabulary.

All three keep a beginning of the tokens in the order (falling logit, rising id): those above a *cut*, which is a logit,
and of the tokens equal to it those up to an id. Finding the cut takes three kernels, and seldom a fourth:

    bracket   one program per row: from the largest logit of each group and a sample of the others, two logits
              low <= cut <= high, which hold almost always
    divide    one program per chunk: exact sums of the tokens from `high` on; those between the two go to a list
    draw      one program per row: bisect the list, held in registers, for the cut; then draw in the order of ids
    redraw    one program per row: where the bracket did not hold, or the list was too short, bisect the whole row

    logits    |---- dropped ----| low |--- list: undecided ---| high |---- kept ----|

`draw` learns from exact sums whether the bracket holds. So the sample decides about time, never about tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.pdl import wait_for_inputs
from bifolio.kernels.triton.selection import draw_kernel, key_of, redraw_kernel, value_of
from bifolio.kernels.triton.weights import EXACT, highest_of, load_logits, weights_of

GROUP = 64  # logits of which the largest is known
BRACKET_WARPS, DIVIDE_WARPS = 16, 8
LIST = 8192  # undecided tokens of a row that have room
ROOM = 1024  # undecided tokens of a chunk that have room
SECTORS = 2048  # places from which logits are sampled, 8 neighbours from each
FEWEST, MOST = 1500, 3500  # tokens on each side of the estimated cut that are listed


@triton.jit
def kth_largest(values: tl.tensor, count: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """The `count`-th largest of f32[g] values, -inf if there are fewer; `highest` is the largest."""
    keys = key_of(values)
    low, high = key_of(highest * 0.0 - float("inf")).to(tl.int64), key_of(highest).to(tl.int64)
    while low < high:  # the largest key that at least `count` values reach
        middle = (low + high + 1) >> 1
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return value_of(low.to(tl.int32))


@triton.jit
def _above(
    best: tl.tensor, known: tl.tensor, values: tl.tensor, sampled: tl.tensor, scale: tl.tensor, edge: tl.tensor
) -> tl.tensor:
    """The estimated weight of all logits above an edge; with weights of 1, their number."""
    rest = tl.sum(tl.sum(tl.where(values > edge, sampled, 0.0), axis=1), axis=0)
    return tl.sum(tl.where(best > edge, known, 0.0), axis=0) + scale * rest


@triton.jit(do_not_specialize_on_alignment=["rows", "warmths", "top_ks", "top_ps"])
def _bracket_kernel(
    logits: tl.tensor,  # f32[r, vocab]
    best_value: tl.tensor,  # f32[r, chunks]
    best_of_groups: tl.tensor,  # f32[r, groups]
    rows: tl.tensor,  # i32[r]  slot of each row; -1: padding
    warmths: tl.tensor,  # f32[slots]
    top_ks: tl.tensor,  # i32[slots]
    top_ps: tl.tensor,  # f64[slots]
    bracket: tl.tensor,  # f32[r, 2]  low, high
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_groups: tl.tensor,  # of a row, padding included
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SECTORS: tl.constexpr,
    FEWEST: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.maximum(tl.load(rows + row), 0)
    warmth, top_k, top_p = tl.load(warmths + slot), tl.load(top_ks + slot), tl.load(top_ps + slot).to(tl.float32)
    wait_for_inputs()
    low = warmth * 0.0 - float("inf")
    high = low
    if warmth > 0:
        group = tl.arange(0, GROUPS)
        best = tl.load(best_of_groups + row * num_groups + group, mask=group < num_groups, other=-float("inf"))
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        if top_k > 0:
            low, high = kth_largest(best, top_k, highest), highest * 0.0 + float("inf")
        elif top_p < 1.0:
            num_sectors = vocab // 8
            sector = tl.arange(0, SECTORS)
            column = ((sector * tl.maximum(num_sectors // SECTORS, 1)) * 8)[:, None] + tl.arange(0, 8)[None, :]
            column = tl.where((sector < num_sectors)[:, None], column, vocab)
            values = load_logits(logits, row, column, vocab)
            largest = tl.load(best_of_groups + row * num_groups + column // GROUP, mask=column < vocab, other=0.0)
            others = (column < vocab) & (values < largest)  # each group's largest logit is known already
            num_others = tl.sum(tl.sum(others.to(tl.float32), axis=1), axis=0)
            scale = (vocab - tl.minimum(num_groups, vocab)).to(tl.float32) / tl.maximum(num_others, 1.0)
            known = tl.exp((best - highest) * warmth)
            sampled = tl.where(others, tl.exp((values - highest) * warmth), 0.0)
            total = tl.sum(known, axis=0) + scale * tl.sum(tl.sum(sampled, axis=1), axis=0)
            weightless = highest - 30.0 / warmth  # tokens below have the weight 0
            is_group = group < (vocab + GROUP - 1) // GROUP
            least_best = tl.min(tl.where(is_group, best, float("inf")), axis=0)
            lowest = tl.maximum(weightless, highest - 2.5 * (highest - least_best))
            floor, ceiling = lowest, highest
            for _ in range(10):  # the cut, roughly
                middle = 0.5 * (floor + ceiling)
                reached = _above(best, known, values, sampled, scale, middle) >= top_p * total
                floor, ceiling = tl.where(reached, middle, floor), tl.where(reached, ceiling, middle)
            squares = sampled * sampled
            every = tl.sum(tl.sum(squares, axis=1), axis=0)
            upper = tl.sum(tl.sum(tl.where(values > floor, squares, 0.0), axis=1), axis=0)
            variance = (1.0 - top_p) * (1.0 - top_p) * upper + top_p * top_p * (every - upper)
            slack = (5.0 * scale * tl.sqrt(variance)) / total + 1e-4
            most, least = (top_p + slack) * total, (top_p - slack) * total
            # The edges lie so much weight away from the cut, and FEWEST to MOST tokens: a peak of few tokens, which the
            # sample describes badly, is listed whole.
            one, ones = known * 0.0 + 1.0, others.to(tl.float32)
            num_low = _above(best, one, values, ones, scale, ceiling)
            num_high = _above(best, one, values, ones, scale, floor)
            top = highest + 1e-3 / warmth
            low_floor, low_ceiling, high_floor, high_ceiling = lowest, ceiling, floor, top
            for _ in range(9):
                edge = 0.5 * (low_floor + low_ceiling)
                count = _above(best, one, values, ones, scale, edge) - num_low
                missing = (_above(best, known, values, sampled, scale, edge) < most) | (count < FEWEST)
                missing = missing & (count < MOST)
                low_floor, low_ceiling = tl.where(missing, low_floor, edge), tl.where(missing, edge, low_ceiling)
                edge = 0.5 * (high_floor + high_ceiling)
                count = num_high - _above(best, one, values, ones, scale, edge)
                missing = (_above(best, known, values, sampled, scale, edge) >= least) | (count < FEWEST)
                missing = missing & (count < MOST)
                high_floor, high_ceiling = tl.where(missing, edge, high_floor), tl.where(missing, high_ceiling, edge)
            low = tl.where(low_floor <= lowest, weightless, low_floor)
            high = tl.where(high_ceiling >= top, float("inf"), high_ceiling)
    tl.store(bracket + 2 * row, low)
    tl.store(bracket + 2 * row + 1, high)


@triton.jit
def _numbered(mask: tl.tensor, CHUNK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(i32[CHUNK] numbers of the elements of the mask, each once; i32 how many there are).

    Numbers rise inside a thread first: a scan over all elements would take twice the time of the rest of the kernel.
    """
    ones = tl.reshape(mask.to(tl.int32), (CHUNK // min(1024, CHUNK), min(256, CHUNK // 4), 4))
    inner = tl.sum(ones, axis=2)
    of_thread = tl.sum(inner, axis=0)
    before = tl.cumsum(of_thread, axis=0) - of_thread
    index = (tl.cumsum(inner, axis=0) - inner + before[None, :])[:, :, None] + tl.cumsum(ones, axis=2) - ones
    return tl.reshape(index, (CHUNK,)), tl.sum(of_thread, axis=0)


@triton.jit(do_not_specialize_on_alignment=["rows", "warmths", "top_ks", "min_weights"])
def _divide_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,
    rows: tl.tensor,
    warmths: tl.tensor,
    top_ks: tl.tensor,
    min_weights: tl.tensor,  # i64[slots]
    bracket: tl.tensor,  # f32[r, 2]
    sums: tl.tensor,  # i64[3, r, chunks]  kept for certain; from `high` on; all
    list_lengths: tl.tensor,  # i32[r, chunks]
    list_values: tl.tensor,  # f32[r, chunks, ROOM]
    list_ids: tl.tensor,  # i32[r, chunks, ROOM]
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_rows: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    chunk, row = tl.program_id(0), tl.program_id(1)
    slot = tl.maximum(tl.load(rows + row), 0)
    warmth, min_weight = tl.load(warmths + slot), tl.load(min_weights + slot)
    top_k = tl.load(top_ks + slot)
    wait_for_inputs()
    if warmth > 0:
        low, high = tl.load(bracket + 2 * row), tl.load(bracket + 2 * row + 1)
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_logits(logits, row, column, vocab)
        place, size = row * num_chunks + chunk, num_rows * num_chunks
        if top_k > 0:  # all candidates go to the list
            tl.store(sums + place, place.to(tl.int64) * 0)
            tl.store(sums + size + place, place.to(tl.int64) * 0)
        else:
            weights = weights_of(values, highest_of(best_value, row, num_chunks, CHUNKS), warmth)
            sum_all, sum_above = tl.split(tl.sum(tl.join(weights, tl.where(values >= high, weights, 0)), axis=0))
            sum_certain = sum_above
            if min_weight > 0:
                sum_certain = tl.sum(tl.where((weights >= min_weight) & (values >= high), weights, 0), axis=0)
            tl.store(sums + place, sum_certain)
            tl.store(sums + size + place, sum_above)
            tl.store(sums + 2 * size + place, sum_all)
        count = place * 0
        if high > low:
            undecided = (values >= low) & (values < high) & (values > -float("inf"))
            index, count = _numbered(undecided, CHUNK)
            fits = undecided & (index < ROOM)
            tl.store(list_values + place.to(tl.int64) * ROOM + index, values, mask=fits)
            tl.store(list_ids + place.to(tl.int64) * ROOM + index, column, mask=fits)
        tl.store(list_lengths + place, count)


def draw_filtered(
    logits: torch.Tensor,  # f32[r, vocab]
    best_value: torch.Tensor,  # f32[r, chunks]
    best_of_groups: torch.Tensor,  # f32[r, groups]
    rows: torch.Tensor,  # i32[r]
    state: DeviceState,
    chunk: int,
    list_size: int = LIST,
) -> torch.Tensor:
    """i32[r]: a token for every row with a temperature."""
    (num_rows, vocab), num_chunks, device = logits.shape, best_value.shape[1], logits.device
    chunks, num_groups = triton.next_power_of_2(num_chunks), best_of_groups.shape[1]
    bracket = torch.empty((num_rows, 2), dtype=torch.float32, device=device)
    list_lengths = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    room = min(ROOM, chunk)
    sums = torch.empty((3, num_rows, num_chunks), dtype=torch.int64, device=device)
    list_values = torch.empty((num_rows, num_chunks, room), dtype=torch.float32, device=device)
    list_ids = torch.empty((num_rows, num_chunks, room), dtype=torch.int32, device=device)
    list_starts = torch.empty((num_rows, chunks), dtype=torch.int32, device=device)
    drawn = torch.empty(num_rows, dtype=torch.int32, device=device)
    _bracket_kernel[(num_rows,)](
        logits, best_value, best_of_groups, rows, state.warmths, state.top_ks, state.top_ps, bracket,
        vocab, num_chunks, num_groups, GROUP=GROUP, GROUPS=triton.next_power_of_2(num_groups), CHUNKS=chunks,
        SECTORS=SECTORS if vocab <= 160 << 10 else 2 * SECTORS, FEWEST=FEWEST, MOST=MOST, num_warps=BRACKET_WARPS,
        **EXACT,
    )  # fmt: skip
    _divide_kernel[(num_chunks, num_rows)](
        logits, best_value, rows, state.warmths, state.top_ks, state.min_weights, bracket, sums, list_lengths,
        list_values, list_ids, vocab, num_chunks, num_rows, CHUNK=chunk, CHUNKS=chunks, ROOM=room,
        num_warps=DIVIDE_WARPS, **EXACT,
    )  # fmt: skip
    draw_kernel[(num_rows,)](
        logits, best_value, rows, state.warmths, state.top_ks, state.top_ps, state.min_weights, state.lengths,
        state.seeds, bracket, sums, list_lengths, list_starts, list_values, list_ids, drawn, vocab, num_chunks,
        num_rows, CHUNK=chunk, CHUNKS=chunks, LIST=list_size, ROOM=room, num_warps=16, **EXACT,
    )  # fmt: skip
    redraw_kernel[(num_rows,)](
        logits, best_value, rows, state.warmths, state.top_ks, state.top_ps, state.min_weights, state.lengths,
        state.seeds, drawn, vocab, num_chunks, CHUNK=chunk, CHUNKS=chunks, num_warps=16, **EXACT,
    )  # fmt: skip
    return drawn
