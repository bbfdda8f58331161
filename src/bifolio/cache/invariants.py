"""What must hold between rows and blocks at every moment, recomputed from the rows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from bifolio.cache.block_pool import PADDING_BLOCK, BlockPool
from bifolio.cache.row import Row


def find_problems(rows: Mapping[int, Row], pool: BlockPool, block_size: int) -> list[str]:
    """Everything that is broken, in words; empty when all is well. Cheap enough for tests and idle moments."""
    references = Counter(block_id for row in rows.values() for block_id in row.block_ids)
    return [
        *_block_problems(pool, references),
        *_digest_problems(pool),
        *_row_problems(rows, block_size),
        *_copy_problems(pool, references),
    ]


def filled_slots(rows: Mapping[int, Row], block_size: int) -> Counter[int]:
    """For each block in a row: its slots promised by the row that was promised most of it."""
    filled: Counter[int] = Counter()
    for row in rows.values():
        for index, block_id in enumerate(row.block_ids):
            filled[block_id] = max(filled[block_id], min(row.num_tokens - index * block_size, block_size))
    return filled


def _block_problems(pool: BlockPool, references: Counter[int]) -> Iterator[str]:
    pins = Counter(pool.copies.values())
    free = Counter(pool.blank) + Counter(pool.evictable.keys())
    for block_id in range(pool.num_blocks):
        if pool.ref_counts[block_id] != references[block_id]:
            yield f"block {block_id} counts {pool.ref_counts[block_id]} references, rows have {references[block_id]}"
        if pool.pins[block_id] != pins[block_id]:
            yield f"block {block_id} counts {pool.pins[block_id]} pins, pending copies have {pins[block_id]}"
        idle = block_id != PADDING_BLOCK and not references[block_id] and not pins[block_id]
        if free[block_id] != idle:
            yield f"block {block_id} is {free[block_id]} times on the free list instead of {int(idle)}"
        if (block_id in pool.evictable) != (free[block_id] > 0 and pool.digests[block_id] is not None):
            yield f"block {block_id} is on the wrong free list"
    if references[PADDING_BLOCK]:
        yield "block 0 is in a row"


def _digest_problems(pool: BlockPool) -> Iterator[str]:
    for block_id, digest in enumerate(pool.digests):
        if digest is not None and pool.cached.get(digest) != block_id:
            yield f"block {block_id} has a digest that does not lead to it"
    for digest, block_id in pool.cached.items():
        if pool.digests[block_id] != digest:
            yield f"a digest leads to block {block_id}, which does not carry it"
    if pool.digests[PADDING_BLOCK] is not None:
        yield "block 0 has a digest"


def _row_problems(rows: Mapping[int, Row], block_size: int) -> Iterator[str]:
    for sequence_id, row in rows.items():
        if len(row.block_ids) != -(-row.num_tokens // block_size):
            yield f"sequence {sequence_id} has {len(row.block_ids)} blocks for {row.num_tokens} tokens"
        if len(set(row.block_ids)) != len(row.block_ids):
            yield f"sequence {sequence_id} holds a block twice"
        if len(row.chain) > row.num_tokens // block_size:
            yield f"sequence {sequence_id} has a digest for a block that is not full"


def _copy_problems(pool: BlockPool, references: Counter[int]) -> Iterator[str]:
    for dst, src in pool.copies.items():
        if src in pool.copies:
            yield f"block {src} is both source and destination of pending copies"
        if references[dst] != 1 or pool.digests[dst] is not None:
            yield f"block {dst} awaits a copy and is shared or has a digest"
