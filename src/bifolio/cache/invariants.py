"""The invariants between block tables and blocks, recomputed from the tables alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from bifolio.cache.block_pool import PADDING_BLOCK, BlockPool
from bifolio.cache.block_table import BlockTable
from bifolio.cache.states import EMPTY_STATE, StatePool


def find_problems(tables: Mapping[int, BlockTable], pool: BlockPool, block_size: int) -> list[str]:
    """Descriptions of all violated invariants; one scan over all blocks and tables."""
    references = Counter(block_id for table in tables.values() for block_id in table.block_ids)
    return [
        *_block_problems(pool, references),
        *_digest_problems(pool),
        *_table_problems(tables, block_size),
        *_move_problems(pool, references),
    ]


def find_state_problems(tables: Mapping[int, BlockTable], pool: StatePool, cached: Mapping[bytes, int]) -> list[str]:
    """Descriptions of all violated invariants of recurrent states."""
    owners = [table.state for table in tables.values() if table.state is not None]
    held = Counter(owner.current for owner in owners if not owner.is_resting)
    held += Counter(state for owner in owners for _, state in owner.drafts)
    held += Counter(checkpoint.state for owner in owners for checkpoint in owner.pending)
    resting = Counter(owner.current for owner in owners if owner.is_resting)
    problems = [] if len(owners) == len(tables) else ["a table has no recurrent state"]
    free = Counter(pool.free)
    for state in range(1, pool.num_states):
        if pool.ref_counts[state] != held[state]:
            problems.append(f"state {state} counts {pool.ref_counts[state]} references, tables have {held[state]}")
        if len(pool.resting.get(state, ())) != resting[state]:
            problems.append(f"state {state} counts other resting tables than {resting[state]}")
        idle = not held[state]
        needed = pool.digests[state] is not None or resting[state] > 0
        if (state in pool.evictable) != (idle and needed) or free[state] != (idle and not needed):
            problems.append(f"state {state} is on the wrong free list")
    for digest, state in pool.checkpoints.items():
        if pool.digests[state] != digest or digest not in cached:
            problems.append(f"the checkpoint {state} has another digest, or a digest without a block")
    if sum(digest is not None for digest in pool.digests) != len(pool.checkpoints) or pool.digests[EMPTY_STATE]:
        problems.append("a state has a digest that finds another state")
    if not pool.rolling <= pool.checkpoints.keys():
        problems.append("a rolling checkpoint does not exist")
    return problems


def filled_entries(tables: Mapping[int, BlockTable], block_size: int) -> Counter[int]:
    """For each block in a table: the tokens reserved in it by the table that reserves most."""
    filled: Counter[int] = Counter()
    for table in tables.values():
        for index, block_id in enumerate(table.block_ids):
            filled[block_id] = max(filled[block_id], min(table.num_tokens - index * block_size, block_size))
    return filled


def _block_problems(pool: BlockPool, references: Counter[int]) -> Iterator[str]:
    pins = Counter(pool.moves.values())
    free = Counter(pool.blank) + Counter(pool.evictable.keys())
    for block_id in range(pool.num_blocks):
        if pool.ref_counts[block_id] != references[block_id]:
            yield f"block {block_id} counts {pool.ref_counts[block_id]} references, tables have {references[block_id]}"
        if pool.pins[block_id] != pins[block_id]:
            yield f"block {block_id} counts {pool.pins[block_id]} pins, pending moves have {pins[block_id]}"
        idle = block_id != PADDING_BLOCK and not references[block_id] and not pins[block_id]
        if free[block_id] != idle:
            yield f"block {block_id} is {free[block_id]} times on the free list instead of {int(idle)}"
        if (block_id in pool.evictable) != (free[block_id] > 0 and pool.digests[block_id] is not None):
            yield f"block {block_id} is on the wrong free list"
    if references[PADDING_BLOCK]:
        yield "block 0 is in a table"


def _digest_problems(pool: BlockPool) -> Iterator[str]:
    for block_id, digest in enumerate(pool.digests):
        if digest is not None and pool.cached.get(digest) != block_id:
            yield f"block {block_id} has a digest that maps to another block"
    for digest, block_id in pool.cached.items():
        if pool.digests[block_id] != digest:
            yield f"a digest maps to block {block_id}, which has another digest"
    if pool.digests[PADDING_BLOCK] is not None:
        yield "block 0 has a digest"


def _table_problems(tables: Mapping[int, BlockTable], block_size: int) -> Iterator[str]:
    for sequence_id, table in tables.items():
        if len(table.block_ids) != -(-table.num_tokens // block_size):
            yield f"sequence {sequence_id} has {len(table.block_ids)} blocks for {table.num_tokens} tokens"
        if len(set(table.block_ids)) != len(table.block_ids):
            yield f"sequence {sequence_id} holds a block twice"
        if len(table.chain) > table.num_tokens // block_size:
            yield f"sequence {sequence_id} has a digest for a block that is not full"


def _move_problems(pool: BlockPool, references: Counter[int]) -> Iterator[str]:
    for dst, src in pool.moves.items():
        if src in pool.moves:
            yield f"block {src} is both source and destination of pending moves"
        if references[dst] != 1 or pool.digests[dst] is not None:
            yield f"block {dst} is the destination of a move and is shared or has a digest"
