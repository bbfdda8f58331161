# mypy: disallow-untyped-decorators=False
"""The cut of a row by bisection, and the draw behind it: the last kernels of `kernels.triton.filters`.

Logits are compared as integers (*keys*) in the same order. Sums of weights are integers too, so that the bisection
ends at the one key that the definition in `sampling.filters` names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.pdl import wait_for_inputs
from bifolio.kernels.triton.weights import highest_of, load_logits, target_of, weights_of


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
def kept_weights_of(
    keys: tl.tensor, weights: tl.tensor, ids: tl.tensor, cut: tl.tensor, last_id: tl.tensor, min_weight: tl.tensor
) -> tl.tensor:
    """i64: weights of the tokens that the filters keep, 0 for others."""
    kept = ((keys > cut) | ((keys == cut) & (ids <= last_id))) & (weights >= min_weight)
    return tl.where(kept, weights, 0)


@triton.jit
def _ties_kept(reach: tl.tensor, before: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """i64: of equal tokens that follow the weight `before`, those that begin below `reach`; `weight` is above 0."""
    guess = tl.maximum(((reach - before.to(tl.float64)) / weight.to(tl.float64)).to(tl.int64) - 4, 0)
    tries = guess + tl.arange(0, 8).to(tl.int64)
    return guess + tl.sum(((before + tries * weight).to(tl.float64) < reach).to(tl.int64), axis=0)


@triton.jit
def _place_in_chunk(
    logits: tl.tensor,
    row: tl.tensor,
    chunk: tl.tensor,
    before: tl.tensor,
    target: tl.tensor,
    cut: tl.tensor,
    last_id: tl.tensor,
    highest: tl.tensor,
    warmth: tl.tensor,
    min_weight: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """i32: the first token of a chunk whose running sum, `before` included, is above the target."""
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_logits(logits, row, column, vocab)
    kept = kept_weights_of(key_of(values), weights_of(values, highest, warmth), column, cut, last_id, min_weight)
    step = tl.sum((tl.cumsum(kept, axis=0) + before <= target).to(tl.int32), axis=0)
    return tl.minimum(chunk * CHUNK + step, vocab - 1)


@triton.jit
def _place_in_lists(starts: tl.tensor, index: tl.tensor, num_chunks: tl.tensor, ROOM: tl.constexpr) -> tl.tensor:
    """i32 like `index`: where the lists of all chunks, one behind the other, hold these elements."""
    chunk, start = tl.zeros_like(index), tl.zeros_like(index)
    for number in range(1, num_chunks):
        first = tl.load(starts + number)
        chunk = tl.where(index >= first, number, chunk)
        start = tl.where(index >= first, first, start)
    return chunk * ROOM + index - start


@triton.jit(
    do_not_specialize=["num_chunks"],
    do_not_specialize_on_alignment=["rows", "warmths", "top_ks", "top_ps", "min_weights", "lengths", "seeds"],
)
def draw_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,
    rows: tl.tensor,
    warmths: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_weights: tl.tensor,
    lengths: tl.tensor,  # i32[slots]
    seeds: tl.tensor,  # i64[slots]
    bracket: tl.tensor,
    sums: tl.tensor,
    list_lengths: tl.tensor,
    list_starts: tl.tensor,  # i32[r, CHUNKS]  scratch
    list_values: tl.tensor,
    list_ids: tl.tensor,
    drawn: tl.tensor,  # i32[r]  -1: the bracket does not hold
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_rows: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
    ROOM: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.maximum(tl.load(rows + row), 0)
    warmth, top_k, share = tl.load(warmths + slot), tl.load(top_ks + slot), tl.load(top_ps + slot)
    min_weight = tl.load(min_weights + slot)
    is_padding = tl.load(rows + row) < 0
    wait_for_inputs()
    every = tl.arange(0, CHUNKS)
    exists = every < num_chunks
    parts = tl.load(list_lengths + row * num_chunks + every, mask=exists, other=0)
    length = tl.sum(parts, axis=0)
    has_room = (length <= LIST) & (tl.max(parts, axis=0) <= ROOM)
    token = slot * 0
    if (warmth > 0) & has_room & (not is_padding):
        tl.store(list_starts + row * CHUNKS + every, tl.cumsum(parts, axis=0) - parts)
        tl.debug_barrier()
        place, size = row * num_chunks + every, num_rows * num_chunks
        certain = tl.load(sums + place, mask=exists, other=0)
        above = tl.sum(tl.load(sums + size + place, mask=exists, other=0), axis=0)
        reach = tl.sum(tl.load(sums + 2 * size + place, mask=exists, other=0), axis=0).to(tl.float64) * share
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        low, high = tl.load(bracket + 2 * row), tl.load(bracket + 2 * row + 1)
        index = tl.arange(0, LIST)
        place_in_lists = _place_in_lists(list_starts + row * CHUNKS, index, num_chunks, ROOM)
        first = row * num_chunks * ROOM
        values = tl.load(list_values + first + place_in_lists, mask=index < length, other=-float("inf"))
        ids = tl.load(list_ids + first + place_in_lists, mask=index < length, other=0)
        keys, weights = key_of(values), weights_of(values, highest, warmth)
        cut = key_of(warmth * 0.0 - float("inf"))  # key of the least likely token that is kept
        last_id = slot * 0 + vocab  # of the tokens at the cut, those up to this id are kept
        holds = top_k >= 0
        if top_k > 0:
            floor, ceiling = key_of(low).to(tl.int64), key_of(highest).to(tl.int64)
            while floor < ceiling:  # the largest key that at least top_k tokens reach
                middle = (floor + ceiling + 1) >> 1
                enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= top_k
                floor, ceiling = tl.where(enough, middle, floor), tl.where(enough, ceiling, middle - 1)
            cut = floor.to(tl.int32)
            reach = tl.sum(tl.where(keys >= cut, weights, 0), axis=0).to(tl.float64) * share
        if share < 1.0:
            if top_k == 0:
                bounded = (above + tl.sum(weights, axis=0)).to(tl.float64) >= reach
                holds = (above.to(tl.float64) < reach) & (bounded | (low == -float("inf")))
            floor = tl.maximum(key_of(low), cut).to(tl.int64)
            ceiling = key_of(tl.minimum(highest, high)).to(tl.int64)
            while floor < ceiling:  # the smallest key with less than `reach` above it
                middle = (floor + ceiling) >> 1
                inside = tl.sum(tl.where(keys > middle.to(tl.int32), weights, 0), axis=0)
                few = (above + inside).to(tl.float64) < reach
                floor, ceiling = tl.where(few, floor, middle + 1), tl.where(few, middle, ceiling)
            cut = floor.to(tl.int32)
            at_cut = (keys == cut) & (values > -float("inf"))
            num_ties = tl.sum(at_cut.to(tl.int32), axis=0)
            weight = weights_of(value_of(cut), highest, warmth)
            if (num_ties > 1) & (weight > 0):
                kept = _ties_kept(reach, above + tl.sum(tl.where(keys > cut, weights, 0), axis=0), weight)
                if kept < num_ties:
                    low_id, high_id = slot * 0, slot * 0 + vocab - 1
                    while low_id < high_id:  # the smallest id up to which so many ties lie
                        middle_id = (low_id + high_id) // 2
                        enough_ids = tl.sum((at_cut & (ids <= middle_id)).to(tl.int32), axis=0) >= kept
                        low_id = tl.where(enough_ids, low_id, middle_id + 1)
                        high_id = tl.where(enough_ids, middle_id, high_id)
                    last_id = low_id
        if holds:
            kept_weights = kept_weights_of(keys, weights, ids, cut, last_id, min_weight)
            mass = tl.sum(certain, axis=0) + tl.sum(kept_weights, axis=0)
            target = target_of(mass, tl.load(seeds + slot), tl.load(lengths + slot) + 1)
            low_chunk, high_chunk = slot * 0, slot * 0 + num_chunks - 1
            while low_chunk < high_chunk:  # the first chunk at whose end the running sum exceeds the target
                middle_chunk = (low_chunk + high_chunk) // 2
                running = tl.sum(tl.where(ids < (middle_chunk + 1) * CHUNK, kept_weights, 0), axis=0)
                running += tl.sum(tl.where(every <= middle_chunk, certain, 0), axis=0)
                low_chunk = tl.where(running > target, low_chunk, middle_chunk + 1)
                high_chunk = tl.where(running > target, middle_chunk, high_chunk)
            before = tl.sum(tl.where(ids < low_chunk * CHUNK, kept_weights, 0), axis=0)
            before += tl.sum(tl.where(every < low_chunk, certain, 0), axis=0)
            token = _place_in_chunk(
                logits, row, low_chunk, before, target, cut, last_id, highest, warmth, min_weight, vocab, CHUNK
            )
        else:
            token = slot * 0 - 1
    elif (warmth > 0) & (not is_padding):
        token = slot * 0 - 1
    tl.store(drawn + row, token)


@triton.jit
def _sum_above(
    logits: tl.tensor,
    row: tl.tensor,
    key: tl.tensor,
    highest: tl.tensor,
    warmth: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """i64: weights of the tokens of a row whose key is larger."""
    total = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, vocab, CHUNK):
        values = load_logits(logits, row, start + tl.arange(0, CHUNK), vocab)
        total += tl.where(key_of(values) > key, weights_of(values, highest, warmth), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _count_between(
    logits: tl.tensor,
    row: tl.tensor,
    key: tl.tensor,
    last_key: tl.tensor,
    last_id: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """i32: the tokens up to an id whose key lies between two keys, both included; excluded tokens do not count."""
    count = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, vocab, CHUNK):
        column = start + tl.arange(0, CHUNK)
        values = load_logits(logits, row, column, vocab)
        keys = key_of(values)
        inside = (keys >= key) & (keys <= last_key) & (column <= last_id) & (values > -float("inf"))
        count += inside.to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def cut_of_row(
    logits: tl.tensor,
    row: tl.tensor,
    highest: tl.tensor,
    warmth: tl.tensor,
    top_k: tl.tensor,
    share: tl.tensor,  # top_p; 2: off
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """(cut, last_id) of top-k and top-p, by bisection of the whole row."""
    lowest_key, highest_key = key_of(warmth * 0.0 - float("inf")), key_of(highest)
    cut, last_id = lowest_key, top_k * 0 + vocab
    if top_k > 0:
        floor, ceiling = lowest_key.to(tl.int64), highest_key.to(tl.int64)
        while floor < ceiling:
            middle = (floor + ceiling + 1) >> 1
            enough = _count_between(logits, row, middle.to(tl.int32), highest_key, last_id, vocab, CHUNK) >= top_k
            floor, ceiling = tl.where(enough, middle, floor), tl.where(enough, ceiling, middle - 1)
        cut = floor.to(tl.int32)
    if share < 1.0:
        reach = _sum_above(logits, row, cut - 1, highest, warmth, vocab, CHUNK).to(tl.float64) * share
        floor, ceiling = cut.to(tl.int64), highest_key.to(tl.int64)
        while floor < ceiling:
            middle = (floor + ceiling) >> 1
            few = _sum_above(logits, row, middle.to(tl.int32), highest, warmth, vocab, CHUNK).to(tl.float64) < reach
            floor, ceiling = tl.where(few, floor, middle + 1), tl.where(few, middle, ceiling)
        cut = floor.to(tl.int32)
        num_ties = _count_between(logits, row, cut, cut, last_id, vocab, CHUNK)
        weight = weights_of(value_of(cut), highest, warmth)
        if (num_ties > 1) & (weight > 0):
            kept = _ties_kept(reach, _sum_above(logits, row, cut, highest, warmth, vocab, CHUNK), weight)
            low_id, high_id = top_k * 0, top_k * 0 + vocab - 1
            while low_id < high_id:
                middle_id = (low_id + high_id) // 2
                enough_ids = _count_between(logits, row, cut, cut, middle_id, vocab, CHUNK) >= kept
                low_id = tl.where(enough_ids, low_id, middle_id + 1)
                high_id = tl.where(enough_ids, middle_id, high_id)
            last_id = tl.where(kept < num_ties, low_id, last_id)
    return cut, last_id


@triton.jit(
    do_not_specialize=["num_chunks"],
    do_not_specialize_on_alignment=["rows", "warmths", "top_ks", "top_ps", "min_weights", "lengths", "seeds"],
)
def redraw_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,
    rows: tl.tensor,
    warmths: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_weights: tl.tensor,
    lengths: tl.tensor,
    seeds: tl.tensor,
    drawn: tl.tensor,  # i32[r]  rows that hold -1 are drawn
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.maximum(tl.load(rows + row), 0)
    warmth, top_k, share = tl.load(warmths + slot), tl.load(top_ks + slot), tl.load(top_ps + slot)
    min_weight = tl.load(min_weights + slot)
    wait_for_inputs()
    if tl.load(drawn + row) < 0:
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        cut, last_id = cut_of_row(logits, row, highest, warmth, top_k, share, vocab, CHUNK)
        every = tl.arange(0, CHUNKS)
        kept_sums = tl.zeros((CHUNKS,), tl.int64)
        for chunk in range(num_chunks):
            column = chunk * CHUNK + tl.arange(0, CHUNK)
            values = load_logits(logits, row, column, vocab)
            part = kept_weights_of(
                key_of(values), weights_of(values, highest, warmth), column, cut, last_id, min_weight
            )
            kept_sums = tl.where(every == chunk, tl.sum(part, axis=0), kept_sums)
        target = target_of(tl.sum(kept_sums, axis=0), tl.load(seeds + slot), tl.load(lengths + slot) + 1)
        passed = (tl.cumsum(kept_sums, axis=0) <= target) & (every < num_chunks)
        chosen = tl.minimum(tl.sum(passed.to(tl.int32), axis=0), num_chunks - 1)
        before = tl.sum(tl.where(every < chosen, kept_sums, 0), axis=0)
        token = _place_in_chunk(
            logits, row, chosen, before, target, cut, last_id, highest, warmth, min_weight, vocab, CHUNK
        )
        tl.store(drawn + row, token)
