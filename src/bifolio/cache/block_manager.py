"""The owner of the cache's bookkeeping: block ids, references, digests, rows and pending copies.

A *row* is what one sequence holds: an ordered list of blocks and a number of promised token slots (`row.py` draws it).
Four verbs change a row: `append`, `fork`, `truncate`, `release`. Prefix hits, parallel samples, beams and drafts are
all made of them. A shared block that is about to be written is replaced in the row by a fresh one, and the pair is
queued as a copy; the caller takes the copies (`take_copies`) and runs them before anything is written.

Nothing here touches a key or a value: see `KVStorage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import NamedTuple

from bifolio.cache.block_pool import BlockCopy, BlockPool
from bifolio.cache.digests import TokenIds, find_chain, next_digest, root_digest
from bifolio.cache.growth import count_needed_blocks, grow, merge_appends
from bifolio.cache.invariants import filled_slots, find_problems
from bifolio.cache.row import Row, find_holder, find_row
from bifolio.errors import CacheError, ConfigError, OutOfBlocksError


class BlockInfo(NamedTuple):
    """What is known of one block at the moment of asking."""

    block_id: int
    ref_count: int  # rows that hold the block
    token_count: int  # slots promised by the row that promises most of it
    is_cached: bool  # found by content: a new row with this prefix would share it


class KVCacheBlockManager:
    """Hands out fixed-size blocks to rows; every public method takes one lock and is atomic.

    `on_free` is called with ids of blocks whose content nobody may read any more, so that a debug mode can fill them
    with NaN: blocks that become free without a digest, and every block that is handed out (which covers an evicted
    prefix block, whose content was worth something until that moment, and a block that was the source of a copy: it
    is not announced when `take_copies` frees it, since the copy has not run yet). Hence one rule for the caller:
    *run the copies before calling the next verb*. The callback runs under the lock and must not call a verb.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks is {num_blocks}; block 0 is padding, so at least 2 are needed")
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}; a block holds at least 1 token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.lock = RLock()  # for views that must look and act in one piece
        self._rows: dict[int, Row] = {}
        self._pool = BlockPool(num_blocks)
        self._next_fresh_id = -1

    @property
    def on_free(self) -> Callable[[list[int]], None] | None:
        """Told of blocks whose content is worthless; see the class."""
        return self._pool.on_free

    @on_free.setter
    def on_free(self, callback: Callable[[list[int]], None] | None) -> None:
        self._pool.on_free = callback

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        with self.lock:
            return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are held by a row or read by a pending copy."""
        return self.num_blocks - 1 - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by content, whether a row holds them or not."""
        return len(self._pool.cached)

    def cached_block_ids(self) -> list[int]:
        """Blocks that can be found by content, in no order."""
        with self.lock:
            return list(self._pool.cached.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, appends: Iterable[tuple[int, int]]) -> int:
        """The exact number of free blocks these (sequence_id, num_tokens) appends take together, in any order.

        n sharers of a partly filled tail need n-1 copies: the last one to write keeps the original.
        """
        with self.lock:
            return count_needed_blocks(merge_appends(appends), self._rows, self._pool, self.block_size)

    def has_row(self, sequence_id: int) -> bool:
        return sequence_id in self._rows

    def rows(self) -> list[int]:
        """The sequences that hold a row."""
        with self.lock:
            return list(self._rows)

    def row_block_ids(self, sequence_id: int) -> list[int]:
        """The row's blocks, in order of position (a copy)."""
        with self.lock:
            return list(find_row(self._rows, sequence_id).block_ids)

    def row_num_tokens(self, sequence_id: int) -> int:
        """Token slots promised to the row."""
        return find_row(self._rows, sequence_id).num_tokens

    def ref_count(self, block_id: int) -> int:
        """Rows that hold the block."""
        return self._pool.ref_counts[self._checked(block_id)]

    def reference_counts(self) -> dict[int, int]:
        """Of every block that is in a row: how many rows hold it."""
        with self.lock:
            return {block_id: count for block_id, count in enumerate(self._pool.ref_counts) if count}

    def block_users(self, block_id: int) -> list[int]:
        """The sequences whose rows hold the block (a scan over all rows)."""
        with self.lock:
            self._checked(block_id)
            return [sequence_id for sequence_id, row in self._rows.items() if block_id in row.block_ids]

    def get_block(self, block_id: int) -> BlockInfo:
        """References, promised tokens and cachedness of one block (a scan over all rows)."""
        with self.lock:
            ref_count, is_cached = self.ref_count(block_id), self._pool.digests[block_id] is not None
            return BlockInfo(block_id, ref_count, filled_slots(self._rows, self.block_size)[block_id], is_cached)

    def utilisation(self) -> float:
        """Promised token slots over the slots of all blocks in use; 1.0 when none is in use."""
        with self.lock:
            filled = filled_slots(self._rows, self.block_size)
            return filled.total() / (len(filled) * self.block_size) if filled else 1.0

    def cached_prefix_length(
        self, token_ids: Sequence[int], *, salt: bytes = b"", max_cached: int | None = None
    ) -> int:
        """How many tokens `open_row` would find, without opening anything."""
        with self.lock:
            return len(self._find_prefix(token_ids, root_digest(salt), max_cached)) * self.block_size

    # -- the verbs ---------------------------------------------------------------------------------------------------

    def open_row(
        self, sequence_id: int, token_ids: Sequence[int] = (), *, salt: bytes = b"", max_cached: int | None = None
    ) -> int:
        """Open a row on the longest cached prefix of `token_ids`; return how many tokens it already holds.

        At least one token is left to compute, since its logits are wanted. `max_cached` bounds the tokens taken over.
        """
        with self.lock:
            self._check_new(sequence_id)
            row = self._rows[sequence_id] = Row(root_digest(salt), self.enable_prefix_caching)
            row.chain = self._find_prefix(token_ids, row.root, max_cached)
            row.block_ids = [self._pool.cached[digest] for digest in row.chain]
            row.num_tokens = len(row.chain) * self.block_size
            for block_id in row.block_ids:
                self._pool.retain(block_id)
            return row.num_tokens

    def append(self, sequence_id: int, num_tokens: int) -> None:
        """Promise `num_tokens` more slots; raises `OutOfBlocksError` with nothing changed."""
        if not self.try_append_many([(sequence_id, num_tokens)]):
            raise OutOfBlocksError(
                f"sequence {sequence_id} asks for {num_tokens} more tokens and {self.num_free_blocks} of "
                f"{self.num_blocks - 1} blocks are free: release a sequence, or make the cache larger"
            )

    def try_append(self, sequence_id: int, num_tokens: int) -> bool:
        """`append` that answers False, with nothing changed, when the blocks do not suffice."""
        return self.try_append_many([(sequence_id, num_tokens)])

    def try_append_many(self, appends: Iterable[tuple[int, int]]) -> bool:
        """All of these (sequence_id, num_tokens) appends, or False and none of them; one lock for a whole step."""
        with self.lock:
            merged = merge_appends(appends)
            if count_needed_blocks(merged, self._rows, self._pool, self.block_size) > self._pool.num_free:
                return False
            grow(merged, self._rows, self._pool, self.block_size)
            return True

    def fork(self, parent_id: int, child_id: int) -> None:
        """Open a row for `child_id` that shares every block of `parent_id`.

        Fork between steps. A parent that holds the destination of a pending copy cannot be forked (`CacheError`): the
        child's own copy of it would need to run after the first one, and copies run in no order. Slots that the parent
        was promised but has not written yet belong to the parent's write; write them before the child appends.
        """
        with self.lock:
            parent = find_row(self._rows, parent_id)
            self._check_new(child_id)
            self._check_no_pending_copy(parent.block_ids)
            child = self._rows[child_id] = Row(parent.root, parent.publishes)
            child.block_ids = list(parent.block_ids)
            child.num_tokens = parent.num_tokens
            child.chain = list(parent.chain)
            for block_id in child.block_ids:
                self._pool.retain(block_id)

    def truncate(self, sequence_id: int, num_tokens: int) -> list[int]:
        """Keep the first `num_tokens` slots; return the ids of the blocks that became free."""
        with self.lock:
            row = find_row(self._rows, sequence_id)
            if not 0 <= num_tokens <= row.num_tokens:
                raise CacheError(
                    f"sequence {sequence_id} cannot be truncated to {num_tokens} tokens: it has {row.num_tokens}"
                )
            row.num_tokens = num_tokens
            del row.chain[num_tokens // self.block_size :]
            return self._shrink(row, self.blocks_for(num_tokens))

    def release(self, sequence_id: int) -> list[int]:
        """Close the row; return the ids of the blocks that became free, the tail first: it is evicted first."""
        with self.lock:
            row = find_row(self._rows, sequence_id)
            del self._rows[sequence_id]
            return self._shrink(row, 0)

    def share(self, block_id: int, sequence_id: int) -> None:
        """Put a block that another row holds at the end of this row, at the same position behind the same blocks.

        Keys and values depend on all tokens before them, so a block means nothing elsewhere. Opens the row if needed;
        a row that already holds the block is left as it is. The row is promised what the other row has of the block.
        """
        with self.lock:
            if sequence_id in self._rows and block_id in self._rows[sequence_id].block_ids:
                return
            row = self._rows.get(sequence_id) or Row(b"", True)
            holder = find_holder(self._rows, self._checked(block_id), row, self.block_size)
            self._check_no_pending_copy([block_id])
            row.adopt(block_id, holder, self.block_size)
            self._pool.retain(block_id)
            self._rows[sequence_id] = row

    # -- after a step ------------------------------------------------------------------------------------------------

    def commit(self, sequence_id: int, token_ids: TokenIds, num_computed: int) -> None:
        """Make the full blocks among the first `num_computed` tokens findable by content.

        `token_ids` are the sequence's tokens from its first one on. Only what is written and accepted may be
        committed, never a draft. Costs a digest for each block that is newly full, whatever the length.
        """
        with self.lock:
            row = find_row(self._rows, sequence_id)
            if num_computed > row.num_tokens:
                raise CacheError(f"sequence {sequence_id} commits {num_computed} tokens and holds {row.num_tokens}")
            num_full = num_computed // self.block_size
            if row.publishes and num_full > len(row.chain):
                self._extend_chain(row, token_ids, num_full)

    def take_copies(self) -> list[BlockCopy]:
        """Hand over the pending copies; run them at once, before any write and before the next verb.

        No destination is named twice or is a source, so they may run in any order or all at once.
        """
        with self.lock:
            return self._pool.take_copies()

    def take_row_changes(self, sequence_id: int) -> tuple[int, list[int]]:
        """The first table index that changed since the last call, and the block ids from there on."""
        with self.lock:
            return find_row(self._rows, sequence_id).take_changes()

    def take_many_row_changes(self, sequence_ids: Iterable[int]) -> list[tuple[int, int, list[int]]]:
        """(sequence_id, first index, block ids) for those of the rows that changed; one lock for a whole step."""
        with self.lock:
            rows = self._rows
            changed = []
            for sequence_id in sequence_ids:
                row = rows.get(sequence_id) or find_row(rows, sequence_id)
                if row.first_changed < len(row.block_ids):
                    changed.append((sequence_id, *row.take_changes()))
            return changed

    def drop_cached(self) -> None:
        """Forget all digests: no later row is opened on what open rows hold now or compute from it later."""
        with self.lock:
            self._pool.forget_all()
            for row in self._rows.values():
                row.publishes = False

    # -- the specs' names --------------------------------------------------------------------------------------------

    def allocate_blocks(self, sequence_id: int, num_blocks: int) -> list[int]:
        """Give the row `num_blocks` more whole blocks, all or nothing, and promise every slot of them.

        Opens the row if needed. Truncate to what is really used, or append tokens instead.
        """
        with self.lock:
            if num_blocks < 0:
                raise CacheError(f"{num_blocks} blocks cannot be allocated: ask for 0 or more")
            if num_blocks > self.num_free_blocks:
                raise OutOfBlocksError(f"{num_blocks} blocks are asked for and {self.num_free_blocks} are free")
            if sequence_id not in self._rows:
                self.open_row(sequence_id)
            row = find_row(self._rows, sequence_id)
            held = len(row.block_ids)
            self.append(sequence_id, (held + num_blocks) * self.block_size - row.num_tokens)
            return row.block_ids[held:]

    def allocate_block(self, sequence_id: int) -> int | None:
        """One more whole block for the row, or None when the pool is empty."""
        try:
            return self.allocate_blocks(sequence_id, 1)[0]
        except OutOfBlocksError:
            return None

    def free_sequence(self, sequence_id: int) -> list[int]:
        """`release` under the specs' name."""
        return self.release(sequence_id)

    def get_sequence_blocks(self, sequence_id: int) -> list[int]:
        """`row_block_ids` under the specs' name."""
        return self.row_block_ids(sequence_id)

    def fresh_sequence_id(self) -> int:
        """An id that was never given out before: negative, so that it cannot meet a caller's own counter."""
        with self.lock:
            while self._next_fresh_id in self._rows:
                self._next_fresh_id -= 1
            self._next_fresh_id -= 1
            return self._next_fresh_id + 1

    def check_invariants(self) -> None:
        """Recompute every count from the rows; raises `CacheError` with the list of what does not hold."""
        with self.lock:
            problems = find_problems(self._rows, self._pool, self.block_size)
        if problems:
            raise CacheError("the block manager is inconsistent: " + "; ".join(problems))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _checked(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise CacheError(f"there is no block {block_id}: the cache has blocks 0 to {self.num_blocks - 1}")
        return block_id

    def _check_new(self, sequence_id: int) -> None:
        if sequence_id in self._rows:
            raise CacheError(f"sequence {sequence_id} already holds a row: release it first or take a fresh id")

    def _check_no_pending_copy(self, block_ids: list[int]) -> None:
        if not self._pool.copies.keys().isdisjoint(block_ids):
            raise CacheError("a block to be shared waits for its copy: take and run the copies first (between steps)")

    def _shrink(self, row: Row, num_kept: int) -> list[int]:
        """Give back the blocks behind the first `num_kept`, last one first; return what became free."""
        freed: list[int] = []
        while len(row.block_ids) > num_kept:
            self._pool.drop(row.block_ids.pop(), freed)
        row.mark_changed(num_kept)
        self._pool.announce(freed)
        return freed

    def _find_prefix(self, token_ids: Sequence[int], root: bytes, max_cached: int | None) -> list[bytes]:
        """Digests of the leading full blocks that are cached, short of the last token."""
        limit = len(token_ids) - 1 if max_cached is None else min(len(token_ids) - 1, max_cached)
        return find_chain(self._pool.cached, root, token_ids, limit // self.block_size, self.block_size)

    def _extend_chain(self, row: Row, token_ids: TokenIds, num_full: int) -> None:
        """Name the blocks from the end of the chain to the first `num_full`."""
        if len(token_ids) < num_full * self.block_size:
            raise CacheError(f"{num_full} full blocks are committed but only {len(token_ids)} token ids are given")
        self._check_no_pending_copy(row.block_ids[len(row.chain) : num_full])
        for index in range(len(row.chain), num_full):
            parent = row.chain[-1] if row.chain else row.root
            start = index * self.block_size
            row.chain.append(next_digest(parent, token_ids[start : start + self.block_size]))
            self._pool.name(row.block_ids[index], row.chain[-1])
