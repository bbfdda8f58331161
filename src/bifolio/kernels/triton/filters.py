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
from bifolio.kernels.triton.weights import EXACT, cleaned, highest_of, load_logits, weights_of

GROUP = 64  # logits of which the largest is known
BRACKET_WARPS, DIVIDE_WARPS = 8, 4
LIST = 8192  # undecided tokens of a row that have room
ROOM = 1024  # undecided tokens of a chunk that have room
SAMPLE = 16384  # the largest logits of groups and a sample of all; more of them do not fit in registers
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
def _above(values: tl.tensor, weights: tl.tensor, edge: tl.tensor) -> tl.tensor:
    """The estimated weight of all logits above an edge; with numbers for weights, their number."""
    return tl.sum(tl.where(values > edge, weights, 0.0), axis=0)


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
    SAMPLE: tl.constexpr,  # numbers that are looked at, at least twice as many as groups
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
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        if top_k > 0:
            group = tl.arange(0, GROUPS)
            best = tl.load(best_of_groups + row * num_groups + group, mask=group < num_groups, other=-float("inf"))
            low, high = kth_largest(best, top_k, highest), highest * 0.0 + float("inf")
        elif top_p < 1.0:
            # The largest logits of all groups, then 8 neighbours from each of many places.
            place = tl.arange(0, SAMPLE)
            sector, num_sectors = (place - GROUPS) // 8, vocab // 8
            step = tl.maximum(num_sectors // ((SAMPLE - GROUPS) // 8), 1)
            is_best, is_sample = place < num_groups, (place >= GROUPS) & (sector < num_sectors)
            column = tl.where(is_sample & (sector * step < num_sectors), sector * step * 8 + place % 8, 0)
            is_sample = is_sample & (sector * step < num_sectors)
            groups = best_of_groups + row * num_groups
            source = tl.where(place < GROUPS, groups + place, logits + row.to(tl.int64) * vocab + column)
            values = cleaned(tl.load(source, mask=is_best | is_sample, other=-float("inf")))
            largest = tl.load(groups + column // GROUP, mask=is_sample, other=0.0)
            is_other = is_sample & (values < largest)  # each group's largest logit is known already
            num_others = tl.sum(is_other.to(tl.float32), axis=0)
            scale = (vocab - tl.minimum(num_groups, vocab)).to(tl.float32) / tl.maximum(num_others, 1.0)
            numbers = tl.where(is_other, scale, is_best.to(tl.float32))
            weights = numbers * tl.exp((values - highest) * warmth)
            total = tl.sum(weights, axis=0)
            weightless = highest - 30.0 / warmth  # tokens below have the weight 0
            is_group = place < (vocab + GROUP - 1) // GROUP
            least_best = tl.min(tl.where(is_group, values, float("inf")), axis=0)
            lowest = tl.maximum(weightless, highest - 2.5 * (highest - least_best))
            floor, ceiling = lowest, highest
            for _ in range(10):  # the cut, roughly
                middle = 0.5 * (floor + ceiling)
                reached = _above(values, weights, middle) >= top_p * total
                floor, ceiling = tl.where(reached, middle, floor), tl.where(reached, ceiling, middle)
            squares = tl.where(is_other, weights * weights, 0.0)
            every, upper = tl.sum(squares, axis=0), _above(values, squares, floor)
            variance = (1.0 - top_p) * (1.0 - top_p) * upper + top_p * top_p * (every - upper)
            slack = 5.0 * tl.sqrt(variance) / total + 1e-4
            most, least = (top_p + slack) * total, (top_p - slack) * total
            # The edges lie so much weight away from the cut, and FEWEST to MOST tokens: a peak of few tokens, which the
            # sample describes badly, is listed whole.
            num_low, num_high = _above(values, numbers, ceiling), _above(values, numbers, floor)
            top = highest + 1e-3 / warmth
            low_floor, low_ceiling, high_floor, high_ceiling = lowest, ceiling, floor, top
            for _ in range(9):
                edge = 0.5 * (low_floor + low_ceiling)
                count = _above(values, numbers, edge) - num_low
                missing = (_above(values, weights, edge) < most) | (count < FEWEST)
                missing = missing & (count < MOST)
                low_floor, low_ceiling = tl.where(missing, low_floor, edge), tl.where(missing, edge, low_ceiling)
                edge = 0.5 * (high_floor + high_ceiling)
                count = num_high - _above(values, numbers, edge)
                missing = (_above(values, weights, edge) >= least) | (count < FEWEST)
                missing = missing & (count < MOST)
                high_floor, high_ceiling = tl.where(missing, edge, high_floor), tl.where(missing, high_ceiling, edge)
            low = tl.where(low_floor <= lowest, weightless, low_floor)
            high = tl.where(high_ceiling >= top, float("inf"), high_ceiling)
    tl.store(bracket + 2 * row, low)
    tl.store(bracket + 2 * row + 1, high)


@triton.jit
def _sum(values: tl.tensor) -> tl.tensor:
    """The sum of [a, threads] values."""
    return tl.sum(tl.sum(values, axis=0), axis=0)


@triton.jit
def _numbered(mask: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(i32 like the mask: numbers of its elements, each once; i32 how many there are), for bool[a, threads].

    Numbers rise inside a thread first: a scan over all elements would take twice the time of the rest of the kernel.
    """
    ones = mask.to(tl.int32)
    of_thread = tl.sum(ones, axis=0)
    before = tl.cumsum(of_thread, axis=0) - of_thread
    return tl.cumsum(ones, axis=0) - ones + before[None, :], tl.sum(of_thread, axis=0)


@triton.jit(
    do_not_specialize=["vocab"],  # a thread then reads single numbers, as it writes them: no exchange between threads
    do_not_specialize_on_alignment=["rows", "warmths", "top_ks", "min_weights"],
)
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
        # Columns are the threads of the program: sums and numbering stay inside a thread for long.
        THREADS: tl.constexpr = min(256, CHUNK)
        column = chunk * CHUNK + tl.arange(0, CHUNK // THREADS)[:, None] * THREADS + tl.arange(0, THREADS)[None, :]
        values = load_logits(logits, row, column, vocab)
        place, size = row * num_chunks + chunk, num_rows * num_chunks
        if top_k > 0:  # all candidates go to the list
            tl.store(sums + place, place.to(tl.int64) * 0)
            tl.store(sums + size + place, place.to(tl.int64) * 0)
        else:
            weights = weights_of(values, highest_of(best_value, row, num_chunks, CHUNKS), warmth)
            sum_all = _sum(weights)
            sum_above = sum_all
            if high > -float("inf"):
                sum_above = _sum(tl.where(values >= high, weights, 0))
            sum_certain = sum_above
            if min_weight > 0:
                sum_certain = _sum(tl.where((weights >= min_weight) & (values >= high), weights, 0))
            tl.store(sums + place, sum_certain)
            tl.store(sums + size + place, sum_above)
            tl.store(sums + 2 * size + place, sum_all)
        count = place * 0
        if high > low:
            undecided = (values >= low) & (values < high) & (values > -float("inf"))
            index, count = _numbered(undecided)
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
        SAMPLE=max(SAMPLE, 2 * triton.next_power_of_2(num_groups)), FEWEST=FEWEST, MOST=MOST, num_warps=BRACKET_WARPS,
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
