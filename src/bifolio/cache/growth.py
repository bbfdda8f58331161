"""How rows grow, behind `KVCacheBlockManager`: what a batch of appends takes, and taking it.

Counting (`count_needed_blocks`) and doing (`grow`) stand side by side because they must agree to the block: a batch is
admitted by the count alone, and then must not run dry half-way. Both look at a row's promised slots in the same way:

    room in the tail            nothing is taken
    room in a shared tail       one block to copy it to, except for the last sharer, who keeps the original
    beyond the last block       one block for each `block_size` slots that are missing

Not thread-safe by itself: the manager's lock is around every call. Both run in every decode step, over every sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bifolio.cache.block_pool import BlockPool
from bifolio.cache.row import Row, find_row
from bifolio.errors import CacheError


def merge_appends(appends: Iterable[tuple[int, int]]) -> dict[int, int]:
    """(sequence_id, num_tokens) pairs as one number for each sequence; `CacheError` if one is negative."""
    pairs = appends if isinstance(appends, list) else list(appends)
    merged = dict(pairs)
    if len(merged) != len(pairs):  # a sequence named twice gets the sum
        merged = dict.fromkeys(merged, 0)
        for sequence_id, num_tokens in pairs:
            merged[sequence_id] += num_tokens
    if merged and min(merged.values()) < 0:
        raise CacheError("a row cannot grow by a negative number of tokens: truncate it instead")
    return merged


def count_needed_blocks(merged: dict[int, int], rows: Mapping[int, Row], pool: BlockPool, block_size: int) -> int:
    """The exact number of free blocks that `grow` takes for these."""
    ref_counts = pool.ref_counts
    needed = 0
    leaving: dict[int, int] = {}  # shared tail -> sharers of this batch that leave it
    for sequence_id, num_tokens in merged.items():
        row = rows.get(sequence_id) or find_row(rows, sequence_id)
        missing = row.num_tokens + num_tokens - len(row.block_ids) * block_size
        if missing > 0:
            needed += -(-missing // block_size)
        if num_tokens and row.num_tokens % block_size:
            tail = row.block_ids[-1]
            if ref_counts[tail] > 1:
                left = leaving.get(tail, 0)
                if ref_counts[tail] - left > 1:
                    needed += 1
                    leaving[tail] = left + 1
    return needed


def grow(merged: dict[int, int], rows: Mapping[int, Row], pool: BlockPool, block_size: int) -> None:
    """Promise each row its tokens; the pool must have `count_needed_blocks` of these."""
    ref_counts, digests = pool.ref_counts, pool.digests
    for sequence_id, num_tokens in merged.items():
        row = rows[sequence_id]
        if row.num_tokens % block_size and num_tokens:
            tail = row.block_ids[-1]
            if ref_counts[tail] > 1 or digests[tail] is not None:
                _own_tail(row, pool)
        row.num_tokens += num_tokens
        if row.num_tokens > len(row.block_ids) * block_size:
            _extend(row, pool, block_size)


def _own_tail(row: Row, pool: BlockPool) -> None:
    """The partly filled tail is about to be written: it must be this row's alone, and not findable."""
    tail = row.block_ids[-1]
    if pool.ref_counts[tail] > 1:
        row.block_ids[-1] = pool.copy_for_writing(tail)
        row.mark_changed(len(row.block_ids) - 1)
    else:
        pool.forget(tail)


def _extend(row: Row, pool: BlockPool, block_size: int) -> None:
    """Take blocks until the promised slots are covered."""
    row.mark_changed(len(row.block_ids))
    for _ in range(-(-row.num_tokens // block_size) - len(row.block_ids)):
        row.block_ids.append(pool.take())
