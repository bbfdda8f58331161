# mypy: disallow-untyped-decorators=False
"""Top-k, top-p and min-p on the device, exactly and without sorting the vocabulary.

All three keep a beginning of the tokens in the order (falling logit, rising id): those above a *cut*, which is a logit,
and of the tokens equal to it those up to an id. Finding the cut takes three kernels:

    bracket   one program per row: from the largest logit of each group and a sample of the others, two logits
              low <= cut <= high, which hold almost always
    divide    one program per chunk: exact sums of the tokens from `high` on; those between the two go to a list
    draw      one program per row: bisect the list for the cut, then draw in the order of ids

    logits    |---- dropped ----| low |--- list: undecided ---| high |---- kept ----|

Where the sample misled (or more tokens are undecided than the list holds), `draw` sees so from the exact sums and
bisects the whole row. So the sample decides about time, never about tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.pdl import wait_for_inputs
from bifolio.kernels.triton.weights import EXACT, highest_of, load_logits, target_of, weights_of

GROUP = 256  # logits of which the largest is known
LIST = 16384  # undecided tokens of a row that have room
SECTORS = 1024  # places from which logits are sampled, 8 neighbours from each
TILE = 4096  # undecided tokens looked at together


@triton.jit
def key_of(values: tl.tensor) -> tl.tensor:
    """i32 in the order of the f32 values; -0.0 equals 0.0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """f32: the value whose key this is."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kth_largest(values: tl.tensor, count: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """The `count`-th largest of f32[g] values, -inf if there are fewer; `highest` is the largest."""
    keys = key_of(values)
    low, high = key_of(highest * 0.0 - float("inf")).to(tl.int64), key_of(highest).to(tl.int64)
    while low < high:  # the largest key that at least `count` values reach
        middle = (low + high + 1) >> 1
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return value_of(low.to(tl.int32))


@triton.jit(do_not_specialize_on_alignment=["rows", "temperature", "top_ks", "top_ps"])
def _bracket_kernel(
    logits: tl.tensor,  # f32[r, vocab]
    best_value: tl.tensor,  # f32[r, chunks]
    best_of_groups: tl.tensor,  # f32[r, groups]
    rows: tl.tensor,  # i32[r]  slot of each row; -1: padding
    temperature: tl.tensor,  # f32[slots]
    top_ks: tl.tensor,  # i32[slots]
    top_ps: tl.tensor,  # f64[slots]
    bracket: tl.tensor,  # f32[r, 2]  low, high
    list_length: tl.tensor,  # i32[r]  becomes 0
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_groups: tl.tensor,  # of a row, padding included
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SECTORS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.maximum(tl.load(rows + row), 0)
    warmth, top_k, top_p = tl.load(temperature + slot), tl.load(top_ks + slot), tl.load(top_ps + slot).to(tl.float32)
    wait_for_inputs()
    tl.store(list_length + row, 0)
    low = warmth * 0.0 - float("inf")
    high = low
    if warmth > 0:
        group = tl.arange(0, GROUPS)
        best = tl.load(best_of_groups + row * num_groups + group, mask=group < num_groups, other=-float("inf"))
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        if top_k > 0:
            low, high = _kth_largest(best, top_k, highest), highest * 0.0 + float("inf")
        elif top_p < 1.0:
            num_sectors = vocab // 8
            sector = tl.arange(0, SECTORS)
            step = tl.maximum(num_sectors // SECTORS, 1)
            column = ((sector * step) * 8)[:, None] + tl.arange(0, 8)[None, :]
            column = tl.where((sector < num_sectors)[:, None], column, vocab)
            values = load_logits(logits, row, column, vocab)
            largest = tl.load(best_of_groups + row * num_groups + column // GROUP, mask=column < vocab, other=0.0)
            others = (column < vocab) & (values < largest)  # each group's largest logit is known already
            num_others = tl.sum(tl.sum(others.to(tl.float32), axis=1), axis=0)
            scale = (vocab - tl.minimum(num_groups, vocab)).to(tl.float32) / tl.maximum(num_others, 1.0)
            known = tl.exp((best - highest) / warmth)
            sampled = tl.where(others, tl.exp((values - highest) / warmth), 0.0)
            total = tl.sum(known, axis=0) + scale * tl.sum(tl.sum(sampled, axis=1), axis=0)
            floor, ceiling = highest - 30.0 * warmth, highest
            for _ in range(16):  # the cut, roughly
                middle = 0.5 * (floor + ceiling)
                above = tl.sum(tl.where(best > middle, known, 0.0), axis=0)
                above += scale * tl.sum(tl.sum(tl.where(values > middle, sampled, 0.0), axis=1), axis=0)
                reached = above >= top_p * total
                floor, ceiling = tl.where(reached, middle, floor), tl.where(reached, ceiling, middle)
            squares = sampled * sampled
            every = tl.sum(tl.sum(squares, axis=1), axis=0)
            upper = tl.sum(tl.sum(tl.where(values > floor, squares, 0.0), axis=1), axis=0)
            variance = (1.0 - top_p) * (1.0 - top_p) * upper + top_p * top_p * (every - upper)
            slack = (6.0 * scale * tl.sqrt(variance)) / total + 3e-4
            most, least = (top_p + slack) * total, (top_p - slack) * total
            a_floor, a_ceiling = highest - 30.0 * warmth, highest + 1e-3 * warmth  # of `low`
            b_floor, b_ceiling = a_floor, a_ceiling  # of `high`
            for _ in range(18):
                a, b = 0.5 * (a_floor + a_ceiling), 0.5 * (b_floor + b_ceiling)
                above_a = tl.sum(tl.where(best > a, known, 0.0), axis=0)
                above_a += scale * tl.sum(tl.sum(tl.where(values > a, sampled, 0.0), axis=1), axis=0)
                above_b = tl.sum(tl.where(best > b, known, 0.0), axis=0)
                above_b += scale * tl.sum(tl.sum(tl.where(values > b, sampled, 0.0), axis=1), axis=0)
                a_floor, a_ceiling = tl.where(above_a >= most, a, a_floor), tl.where(above_a >= most, a_ceiling, a)
                b_floor, b_ceiling = tl.where(above_b >= least, b, b_floor), tl.where(above_b >= least, b_ceiling, b)
            low = tl.where(most >= total * 0.99999, -float("inf"), a_floor)
            high = tl.where(least <= 0.0, float("inf"), b_ceiling)
    tl.store(bracket + 2 * row, low)
    tl.store(bracket + 2 * row + 1, high)


@triton.jit(do_not_specialize_on_alignment=["rows", "temperature", "min_weights"])
def _divide_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,
    rows: tl.tensor,
    temperature: tl.tensor,
    min_weights: tl.tensor,  # f64[slots]
    bracket: tl.tensor,  # f32[r, 2]
    sums: tl.tensor,  # i64[3, r, chunks]  kept for certain; from `high` on; all
    list_length: tl.tensor,  # i32[r]
    list_values: tl.tensor,  # f32[r, LIST]
    list_ids: tl.tensor,  # i32[r, LIST]
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_rows: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
) -> None:
    chunk, row = tl.program_id(0), tl.program_id(1)
    slot = tl.maximum(tl.load(rows + row), 0)
    warmth, min_weight = tl.load(temperature + slot), tl.load(min_weights + slot)
    wait_for_inputs()
    if warmth > 0:
        low, high = tl.load(bracket + 2 * row), tl.load(bracket + 2 * row + 1)
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_logits(logits, row, column, vocab)
        weights = weights_of(values, highest_of(best_value, row, num_chunks, CHUNKS), warmth)
        upper = tl.where(values >= high, weights, 0)
        certain = tl.where(weights.to(tl.float64) >= min_weight, upper, 0)
        place, size = row * num_chunks + chunk, num_rows * num_chunks
        tl.store(sums + place, tl.sum(certain, axis=0))
        tl.store(sums + size + place, tl.sum(upper, axis=0))
        tl.store(sums + 2 * size + place, tl.sum(weights, axis=0))
        undecided = (values >= low) & (values < high) & (values > -float("inf"))
        count = tl.sum(undecided.to(tl.int32), axis=0)
        if count > 0:
            first = tl.atomic_add(list_length + row, count)
            index = first + tl.cumsum(undecided.to(tl.int32), axis=0) - 1
            fits = undecided & (index < LIST)
            tl.store(list_values + row * LIST + index, values, mask=fits)
            tl.store(list_ids + row * LIST + index, column, mask=fits)


@triton.jit
def _tile(
    logits: tl.tensor,
    list_values: tl.tensor,
    list_ids: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    listed: tl.tensor,
    vocab: tl.tensor,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(f32[TILE] logits, i32[TILE] ids) of undecided tokens; without a list, all tokens of the row are undecided."""
    index = start + tl.arange(0, TILE)
    if listed:
        values = tl.load(list_values + row * LIST + index, mask=index < length, other=-float("inf"))
        ids = tl.load(list_ids + row * LIST + index, mask=index < length, other=0)
    else:
        values, ids = load_logits(logits, row, index, vocab), index
    return values, ids


@triton.jit(
    do_not_specialize_on_alignment=["rows", "temperature", "top_ks", "top_ps", "min_weights", "lengths", "seeds"]
)
def _draw_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,
    rows: tl.tensor,
    temperature: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_weights: tl.tensor,
    lengths: tl.tensor,  # i32[slots]
    seeds: tl.tensor,  # i64[slots]
    bracket: tl.tensor,
    sums: tl.tensor,
    list_length: tl.tensor,
    list_values: tl.tensor,
    list_ids: tl.tensor,
    drawn: tl.tensor,  # i32[r]
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_rows: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.maximum(tl.load(rows + row), 0)
    warmth, top_k, share = tl.load(temperature + slot), tl.load(top_ks + slot), tl.load(top_ps + slot)
    min_weight = tl.load(min_weights + slot)
    wait_for_inputs()
    if (warmth > 0) & (tl.load(rows + row) >= 0):
        every = tl.arange(0, CHUNKS)
        exists = every < num_chunks
        place, size = row * num_chunks + every, num_rows * num_chunks
        certain = tl.load(sums + place, mask=exists, other=0)
        above = tl.sum(tl.load(sums + size + place, mask=exists, other=0), axis=0)
        total = tl.sum(tl.load(sums + 2 * size + place, mask=exists, other=0), axis=0)
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        low = tl.load(bracket + 2 * row)
        length = tl.load(list_length + row)
        listed = length <= LIST
        reach = total.to(tl.float64) * share
        if listed & (top_k == 0) & (share < 1.0):  # does the bracket hold?
            inside = tl.zeros((TILE,), tl.int64)
            for start in range(0, length, TILE):
                values, _ = _tile(logits, list_values, list_ids, row, start, length, listed, vocab, LIST, TILE)
                inside += weights_of(values, highest, warmth)
            bounded = (above + tl.sum(inside, axis=0)).to(tl.float64) >= reach
            listed = (above.to(tl.float64) < reach) & (bounded | (low == -float("inf")))
        if not listed:
            certain, above, length = tl.zeros_like(certain), above * 0, length * 0 + vocab
            low = warmth * 0.0 - float("inf")
        last = key_of(warmth * 0.0 - float("inf"))  # key of the least likely token that top-k keeps
        first_key, last_key = key_of(low).to(tl.int64), key_of(highest).to(tl.int64)
        if top_k > 0:
            floor, ceiling = first_key, last_key
            while floor < ceiling:  # the largest key that at least top_k tokens reach
                middle = (floor + ceiling + 1) >> 1
                count = tl.zeros((TILE,), tl.int32)
                for start in range(0, length, TILE):
                    values, _ = _tile(logits, list_values, list_ids, row, start, length, listed, vocab, LIST, TILE)
                    count += (key_of(values) >= middle.to(tl.int32)).to(tl.int32)
                enough = tl.sum(count, axis=0) >= top_k
                floor, ceiling = tl.where(enough, middle, floor), tl.where(enough, ceiling, middle - 1)
            last = floor.to(tl.int32)
            inside = tl.zeros((TILE,), tl.int64)
            for start in range(0, length, TILE):
                values, _ = _tile(logits, list_values, list_ids, row, start, length, listed, vocab, LIST, TILE)
                inside += tl.where(key_of(values) >= last, weights_of(values, highest, warmth), 0)
            reach = tl.sum(inside, axis=0).to(tl.float64) * share
        cut = last  # key of the least likely token that top-p keeps
        last_id = length * 0 + vocab  # of the tokens at the cut, those up to this id are kept
        if share < 1.0:
            floor, ceiling = tl.maximum(first_key, last.to(tl.int64)), last_key
            while floor < ceiling:  # the smallest key with less than `reach` above it
                middle = (floor + ceiling) >> 1
                inside = tl.zeros((TILE,), tl.int64)
                for start in range(0, length, TILE):
                    values, _ = _tile(logits, list_values, list_ids, row, start, length, listed, vocab, LIST, TILE)
                    inside += tl.where(key_of(values) > middle.to(tl.int32), weights_of(values, highest, warmth), 0)
                few = (above + tl.sum(inside, axis=0)).to(tl.float64) < reach
                floor, ceiling = tl.where(few, floor, middle + 1), tl.where(few, middle, ceiling)
            cut = floor.to(tl.int32)
            inside = tl.zeros((TILE,), tl.int64)
            ties = tl.zeros((TILE,), tl.int32)
            for start in range(0, length, TILE):
                values, _ = _tile(logits, list_values, list_ids, row, start, length, listed, vocab, LIST, TILE)
                keys = key_of(values)
                inside += tl.where(keys > cut, weights_of(values, highest, warmth), 0)
                ties += ((keys == cut) & (values > -float("inf"))).to(tl.int32)
            before, num_ties = above + tl.sum(inside, axis=0), tl.sum(ties, axis=0)
            weight = weights_of(value_of(cut), highest, warmth)
            if (num_ties > 1) & (weight > 0):  # tie number j stays while before + j * weight < reach
                guess = ((reach - before.to(tl.float64)) / weight.to(tl.float64)).to(tl.int64) - 4
                tries = tl.maximum(guess, 0) + tl.arange(0, 8).to(tl.int64)
                fewer = (before + tries * weight).to(tl.float64) < reach
                kept = tl.maximum(guess, 0) + tl.sum(fewer.to(tl.int64), axis=0)
                if kept < num_ties:
                    low_id, high_id = slot * 0, slot * 0 + vocab - 1
                    while low_id < high_id:  # the smallest id up to which so many ties lie
                        middle_id = (low_id + high_id) // 2
                        count = tl.zeros((TILE,), tl.int32)
                        for start in range(0, length, TILE):
                            values, ids = _tile(
                                logits, list_values, list_ids, row, start, length, listed, vocab, LIST, TILE
                            )
                            at_cut = (key_of(values) == cut) & (values > -float("inf")) & (ids <= middle_id)
                            count += at_cut.to(tl.int32)
                        enough_ids = tl.sum(count, axis=0) >= kept
                        low_id = tl.where(enough_ids, low_id, middle_id + 1)
                        high_id = tl.where(enough_ids, middle_id, high_id)
                    last_id = low_id
        # the draw: total weight of the kept tokens, the chunk that holds the drawn one, and its place there
        inside = tl.zeros((TILE,), tl.int64)
        for start in range(0, length, TILE):
            values, ids = _tile(logits, list_values, list_ids, row, start, length, listed, vocab, LIST, TILE)
            inside += _kept(values, ids, cut, last_id, highest, warmth, min_weight)
        mass = tl.sum(certain, axis=0) + tl.sum(inside, axis=0)
        target = target_of(mass, tl.load(seeds + slot), tl.load(lengths + slot) + 1)
        low_chunk, high_chunk = slot * 0, slot * 0 + num_chunks - 1
        while low_chunk < high_chunk:  # the first chunk at whose end the running sum exceeds the target
            middle_chunk = (low_chunk + high_chunk) // 2
            inside = tl.zeros((TILE,), tl.int64)
            for start in range(0, length, TILE):
                values, ids = _tile(logits, list_values, list_ids, row, start, length, listed, vocab, LIST, TILE)
                part = _kept(values, ids, cut, last_id, highest, warmth, min_weight)
                inside += tl.where(ids < (middle_chunk + 1) * CHUNK, part, 0)
            running = tl.sum(inside, axis=0) + tl.sum(tl.where(every <= middle_chunk, certain, 0), axis=0)
            low_chunk = tl.where(running > target, low_chunk, middle_chunk + 1)
            high_chunk = tl.where(running > target, middle_chunk, high_chunk)
        inside = tl.zeros((TILE,), tl.int64)
        for start in range(0, length, TILE):
            values, ids = _tile(logits, list_values, list_ids, row, start, length, listed, vocab, LIST, TILE)
            part = _kept(values, ids, cut, last_id, highest, warmth, min_weight)
            inside += tl.where(ids < low_chunk * CHUNK, part, 0)
        before_chunk = tl.sum(inside, axis=0) + tl.sum(tl.where(every < low_chunk, certain, 0), axis=0)
        column = low_chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_logits(logits, row, column, vocab)
        running_sum = tl.cumsum(_kept(values, column, cut, last_id, highest, warmth, min_weight), axis=0) + before_chunk
        step = tl.sum((running_sum <= target).to(tl.int32), axis=0)
        tl.store(drawn + row, tl.minimum(low_chunk * CHUNK + step, vocab - 1))


@triton.jit
def _kept(
    values: tl.tensor,
    ids: tl.tensor,
    cut: tl.tensor,
    last_id: tl.tensor,
    highest: tl.tensor,
    warmth: tl.tensor,
    min_weight: tl.tensor,
) -> tl.tensor:
    """i64: weights of the tokens that the filters keep, 0 for others."""
    keys = key_of(values)
    weights = weights_of(values, highest, warmth)
    kept = ((keys > cut) | ((keys == cut) & (ids <= last_id))) & (weights.to(tl.float64) >= min_weight)
    return tl.where(kept, weights, 0)


def draw_filtered(
    logits: torch.Tensor,  # f32[r, vocab]
    best_value: torch.Tensor,  # f32[r, chunks]
    best_of_groups: torch.Tensor,  # f32[r, groups]
    rows: torch.Tensor,  # i32[r]
    state: DeviceState,
    chunk: int,
    list_size: int = LIST,
    tile: int = TILE,
) -> torch.Tensor:
    """i32[r]: a token for every row with a temperature."""
    (num_rows, vocab), num_chunks, device = logits.shape, best_value.shape[1], logits.device
    chunks, num_groups = triton.next_power_of_2(num_chunks), best_of_groups.shape[1]
    bracket = torch.empty((num_rows, 2), dtype=torch.float32, device=device)
    list_length = torch.empty(num_rows, dtype=torch.int32, device=device)
    sums = torch.empty((3, num_rows, num_chunks), dtype=torch.int64, device=device)
    list_values = torch.empty((num_rows, list_size), dtype=torch.float32, device=device)
    list_ids = torch.empty((num_rows, list_size), dtype=torch.int32, device=device)
    drawn = torch.empty(num_rows, dtype=torch.int32, device=device)
    _bracket_kernel[(num_rows,)](
        logits, best_value, best_of_groups, rows, state.temperatures, state.top_ks, state.top_ps, bracket, list_length,
        vocab, num_chunks, num_groups, GROUP=GROUP, GROUPS=triton.next_power_of_2(num_groups), CHUNKS=chunks,
        SECTORS=SECTORS, num_warps=8, **EXACT,
    )  # fmt: skip
    _divide_kernel[(num_chunks, num_rows)](
        logits, best_value, rows, state.temperatures, state.min_weights, bracket, sums, list_length, list_values,
        list_ids, vocab, num_chunks, num_rows, CHUNK=chunk, CHUNKS=chunks, LIST=list_size, num_warps=4, **EXACT,
    )  # fmt: skip
    _draw_kernel[(num_rows,)](
        logits, best_value, rows, state.temperatures, state.top_ks, state.top_ps, state.min_weights, state.lengths,
        state.seeds, bracket, sums, list_length, list_values, list_ids, drawn, vocab, num_chunks, num_rows,
        CHUNK=chunk, CHUNKS=chunks, LIST=list_size, TILE=tile, num_warps=8, **EXACT,
    )  # fmt: skip
    return drawn
