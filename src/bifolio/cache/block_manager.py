"""The bookkeeping of the cache: block ids, reference counts, digests, block tables and pending moves.

Every sequence has one `BlockTable`. Four verbs change a table: `append`, `fork`, `truncate`, `release`. Prefix hits,
parallel samples, beams and drafts are built from them. A shared block that is about to be written is replaced in the
table by a new one, and the pair is queued as a move; `run_moves` takes the moves and runs them before a pass writes.

Keys and values themselves are in `KVStorage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import RLock

from bifolio.cache.block_pool import BlockMove, BlockPool
from bifolio.cache.block_queries import BlockQueries
from bifolio.cache.block_table import (
    BlockTable,
    checked_ids,
    count_needed_blocks,
    extend_chain,
    find_holder,
    find_table,
    grow,
    merge_appends,
    split_by_room,
)
from bifolio.cache.digests import TokenIds, root_digest
from bifolio.cache.events import CacheEvents
from bifolio.cache.invariants import find_problems, find_state_problems
from bifolio.cache.keeper import BlockKeeper
from bifolio.cache.session_blocks import RetainingBlocks
from bifolio.cache.table_states import StatePass, StateRequest, TableStates
from bifolio.counts import whole
from bifolio.errors import CacheError, ConfigError, OutOfBlocksError
from bifolio.images import Mark
from bifolio.kernels.storage import BlockMover


class KVCacheBlockManager(RetainingBlocks, BlockQueries):
    """Allocates fixed-size blocks to sequences; every public method takes one lock and is atomic.

    `on_free` is called with ids of blocks whose content must not be read any more, so that a debug mode can fill them
    with NaN: blocks that become free without a digest, and every block that is allocated (which covers an evicted
    prefix block, whose content was valid until that moment, and a block that was the source of a move: it is not
    reported when `take_moves` frees it, since the move has not run yet). Hence one rule for the caller: *run the moves
    before calling the next verb*. The callback runs under the lock and must not call a verb.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_states: int = 0,  # of recurrent layers, the empty state included; 0: the model has none
        checkpoint_tokens: int = 0,  # spacing of their checkpoints; 0: the end of each prompt and turn alone
    ) -> None:
        self.num_blocks = whole("num_blocks, with block 0 for padding,", num_blocks, least=2, error=ConfigError)
        self.block_size = whole("block_size", block_size, least=1, error=ConfigError)
        whole("num_states", num_states, error=ConfigError)
        whole("checkpoint_tokens", checkpoint_tokens, error=ConfigError)
        self.enable_prefix_caching = enable_prefix_caching
        self.lock = RLock()  # for views that check and change tables atomically
        self._tables: dict[int, BlockTable] = {}
        self._states = TableStates(num_states, block_size, checkpoint_tokens) if num_states else None
        self._pool = BlockPool(num_blocks)
        if self._states is not None:
            self._pool.on_forget = self._states.pool.forget
            self._states.pool.protected = self._pool.retention.protected
        self._next_fresh_id = -1

    @property
    def on_free(self) -> Callable[[list[int]], None] | None:
        """Callback for blocks that have lost their content; see the class."""
        return self._pool.on_free

    @on_free.setter
    def on_free(self, callback: Callable[[list[int]], None] | None) -> None:
        self._pool.on_free = callback

    # -- verbs -------------------------------------------------------------------------------------------------------

    def open_table(
        self,
        sequence_id: int,
        token_ids: Sequence[int] = (),
        *,
        salt: bytes = b"",
        max_cached: int | None = None,
        marks: tuple[Mark, ...] = (),
    ) -> int:
        """Open a table on the longest cached prefix of `token_ids`; return the number of tokens it already holds.

        At least one token is left to compute, since its logits are needed. `max_cached` limits the tokens reused.
        `marks`: of tokens whose ids do not tell their content.
        """
        with self.lock:
            self._check_new(sequence_id)
            table = BlockTable(self, sequence_id, root_digest(salt), self.enable_prefix_caching, marks)
            table.chain = self._find_prefix(token_ids, table.root, max_cached, marks)
            self._tables[sequence_id] = table
            if self._states is not None:
                table.state = self._states.open(table.chain)
                del table.chain[table.state.position // self.block_size :]
            table.block_ids = [self._pool.cached[digest] for digest in table.chain]
            table.num_tokens = len(table.chain) * self.block_size
            for block_id in table.block_ids:
                self._pool.retain(block_id)
            return table.num_tokens

    def append(self, sequence_id: int, num_tokens: int) -> None:
        """Reserve room for `num_tokens` more tokens; raises `OutOfBlocksError` with nothing changed."""
        if not self.try_append_many([(sequence_id, num_tokens)]):
            raise OutOfBlocksError(
                f"sequence {sequence_id} needs {num_tokens} more tokens and {self.num_free_blocks} of "
                f"{self.num_blocks - 1} blocks are free: release a sequence, or make the cache larger"
            )

    def try_append(self, sequence_id: int, num_tokens: int) -> bool:
        """`append` that returns False, with nothing changed, when too few blocks are free."""
        return self.try_append_many([(sequence_id, num_tokens)])

    def try_append_many(self, appends: Iterable[tuple[int, int]]) -> bool:
        """Run all of these (sequence_id, num_tokens) appends, or none and return False; one lock for a whole step."""
        with self.lock:
            merged = merge_appends(appends)
            if count_needed_blocks(merged, self._tables, self._pool, self.block_size) > self._pool.num_free:
                return False
            grow(merged, self._tables, self._pool, self.block_size)
            return True

    def try_append_each(self, sequence_ids: Iterable[int]) -> bool:
        """Append one token to each of these sequences, which differ, or none and return False: a decode step."""
        with self.lock:
            inside, others = split_by_room(sequence_ids, self._tables, self._pool, self.block_size)
            if others:
                free = len(self._pool.blank) + len(self._pool.evictable)
                if count_needed_blocks(others, self._tables, self._pool, self.block_size) > free:
                    return False
                grow(others, self._tables, self._pool, self.block_size)
            for table in inside:
                table.num_tokens += 1
            return True

    def fork(self, parent_id: int, child_id: int) -> None:
        """Open a table for `child_id` that shares every block of `parent_id`.

        A parent that holds the destination of a pending move cannot be forked (`CacheError`): the child's own copy of
        it would have to run after the first one, and the order of moves is undefined. Entries that the parent has
        reserved and not written yet belong to the parent's pass; it runs before the child appends.
        """
        with self.lock:
            parent = find_table(self._tables, parent_id)
            self._check_new(child_id)
            self.check_fork(parent_id)
            state = None if self._states is None or parent.state is None else self._states.fork(parent.state)
            child = self._tables[child_id] = BlockTable(self, child_id, parent.root, parent.publishes, parent.marks)
            child.block_ids = list(parent.block_ids)
            child.num_tokens = parent.num_tokens
            child.chain = list(parent.chain)
            child.state = state
            for block_id in child.block_ids:
                self._pool.retain(block_id)

    def check_fork(self, parent_id: int) -> None:
        """Raise `CacheError` unless the table can be forked now."""
        table = find_table(self._tables, parent_id)
        self._check_no_pending_move(table.block_ids)
        if table.state is not None and table.state.drafts:
            raise CacheError("a sequence with unverified drafts cannot be forked: verify them first")

    def truncate(self, sequence_id: int, num_tokens: int) -> list[int]:
        """Keep the first `num_tokens` tokens; return the ids of the blocks that became free.

        A table with recurrent states keeps fewer where no state exists for them: read `num_tokens_of` afterwards.
        """
        with self.lock:
            table = find_table(self._tables, sequence_id)
            if not 0 <= whole("a number of tokens", num_tokens, least=None) <= table.num_tokens:
                raise CacheError(
                    f"sequence {sequence_id} cannot be truncated to {num_tokens} tokens: it has {table.num_tokens}"
                )
            if self._states is not None and table.state is not None:
                num_tokens = self._states.cut(table.state, table.chain, num_tokens)
            table.num_tokens = num_tokens
            del table.chain[num_tokens // self.block_size :]
            return self._shrink(table, self.blocks_for(num_tokens))

    def release(self, sequence_id: int) -> list[int]:
        """Close the table; return the ids of the blocks that became free, the last first: it is evicted first."""
        with self.lock:
            table = find_table(self._tables, sequence_id)
            del self._tables[sequence_id]
            if self._states is not None and table.state is not None:
                self._states.release(table.state)
            return self._shrink(table, 0)

    def share(self, block_id: int, sequence_id: int) -> None:
        """Append a block that another table holds at the same position, after the same blocks.

        Keys and values depend on all tokens before them, so a block is valid at one position only. Opens the table if
        needed; a table that already holds the block stays unchanged. It gets as many tokens of the block as the other.
        """
        with self.lock:
            if self._states is not None:
                raise CacheError("a block of a model with recurrent layers cannot be shared alone: fork the sequence")
            self._checked(block_id)
            known = self._tables.get(whole("a sequence id", sequence_id, least=None))
            if known is not None and block_id in known.block_ids:
                return
            table = known or BlockTable(self, sequence_id, b"", True)
            holder = find_holder(self._tables, block_id, table)
            self._check_no_pending_move([block_id])
            table.adopt(block_id, holder)
            self._pool.retain(block_id)
            self._tables[sequence_id] = table

    # -- recurrent states ----------------------------------------------------------------------------------------------

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers."""
        return self._states is not None

    def use_states(self, requests: Iterable[StateRequest]) -> list[StatePass]:
        """The states that each sequence of a pass reads and writes, right before the pass; all run, or none."""
        with self.lock:
            if self._states is None:
                raise CacheError("the block manager has no recurrent states: pass num_states")
            return self._states.use(self._tables, requests)

    def rest(self, sequence_id: int) -> None:
        """Let the recurrent state of a sequence that waits be evicted."""
        with self.lock:
            table = find_table(self._tables, sequence_id)
            if self._states is not None and table.state is not None:
                self._states.rest(table.state)

    def resume(self, sequence_id: int) -> int:
        """Hold the state of a resting sequence again; return the tokens it keeps: fewer if the state was evicted."""
        with self.lock:
            table = find_table(self._tables, sequence_id)
            if self._states is not None and table.state is not None:
                kept = self._states.wake(table.state, table.chain, table.num_tokens)
                if kept < table.num_tokens:
                    self.truncate(sequence_id, kept)
            return table.num_tokens

    def state_of(self, sequence_id: int) -> int:
        """The state that a sequence continues from."""
        with self.lock:
            table = find_table(self._tables, sequence_id)
            if table.state is None:
                raise CacheError("the block manager has no recurrent states: pass num_states")
            return table.state.current

    def adopt_state(self, sequence_id: int) -> int | None:
        """A state for the caller to fill, the checkpoint of the last committed block; None: none is available."""
        with self.lock:
            table = find_table(self._tables, sequence_id)
            if self._states is None or table.state is None or not table.chain:
                return None
            return self._states.adopt(table.state, table.chain, self._pool.cached)

    def on_take_state(self, callback: Callable[[int], None]) -> None:
        """Call back with the id of every state that is about to be overwritten."""
        if self._states is not None:
            self._states.pool.on_take = callback

    # -- after a step ------------------------------------------------------------------------------------------------

    def commit(self, sequence_id: int, token_ids: TokenIds, num_computed: int) -> None:
        """Make the full blocks among the first `num_computed` tokens findable by content.

        `token_ids` are the sequence's tokens from its first one on. Commit only tokens that are written and accepted,
        never drafts. Computes one digest for each newly full block, independent of the sequence's length.
        """
        with self.lock:
            table = find_table(self._tables, sequence_id)
            if type(num_computed) is not int or num_computed < 0:
                num_computed = whole("num_computed", num_computed)
            if num_computed > table.num_tokens:
                raise CacheError(
                    f"sequence {sequence_id} cannot commit {num_computed} tokens: it holds {table.num_tokens}"
                )
            num_full = num_computed // self.block_size
            if table.publishes and num_full > len(table.chain):
                self._check_no_pending_move(table.block_ids[len(table.chain) : num_full])
                extend_chain(table, self._pool, token_ids, num_full)
                if self._states is not None and table.state is not None:
                    self._states.publish(table.state, table.chain, self._pool.cached)

    def take_moves(self) -> list[BlockMove]:
        """Take the pending moves; the caller runs them before any write and before the next verb.

        Destinations are unique and none is a source, so the moves may run in any order or in parallel.
        """
        with self.lock:
            return self._pool.take_moves() if self._pool.moves else []

    def run_moves(self, storages: Iterable[BlockMover]) -> list[BlockMove]:
        """Take the pending moves and queue them on every storage, right before a pass."""
        moves = self.take_moves()
        if moves:
            for storage in storages:
                storage.move_blocks(moves)
        return moves

    def take_changes(self, sequence_ids: Iterable[int]) -> list[tuple[int, int, list[int]]]:
        """(sequence_id, first index, block ids) of those tables that changed since the last call for them."""
        with self.lock:
            tables, ids = self._tables, checked_ids(sequence_ids)
            known = [tables.get(sequence_id) or find_table(tables, sequence_id) for sequence_id in ids]
            changed = [table for table in known if table.first_changed < len(table.block_ids)]
            return [(table.sequence_id, *table.take_changes()) for table in changed]

    def keep_in(self, keeper: BlockKeeper | None) -> None:
        """Offer blocks and checkpoints to `keeper`, from now on; None: to nothing."""
        with self.lock:
            self._pool.keeper = keeper
            if self._states is not None:
                self._states.pool.keeper = keeper

    def record_events(self, events: CacheEvents) -> None:
        """Record in `events` which blocks can be found by content, from now on."""
        with self.lock:
            self._pool.events = events

    def drop_cached(self) -> None:
        """Forget all digests: no later table is opened on blocks that are held now or computed from them later."""
        with self.lock:
            self._pool.forget_all()
            if self._states is not None:
                self._states.pool.forget_all()
            for table in self._tables.values():
                table.publishes = False

    # -- the specs' names --------------------------------------------------------------------------------------------

    def allocate_blocks(self, sequence_id: int, num_blocks: int) -> list[int]:
        """Give the sequence `num_blocks` more whole blocks, all or nothing, and reserve all of their tokens.

        Opens a table if needed. Truncate to the tokens in use, or append tokens instead.
        """
        with self.lock:
            if whole("a number of blocks", num_blocks) > self.num_free_blocks:
                raise OutOfBlocksError(f"{num_blocks} blocks are requested and {self.num_free_blocks} are free")
            if not self.has_table(sequence_id):
                self.open_table(sequence_id)
            table = find_table(self._tables, sequence_id)
            held = len(table.block_ids)
            self.append(sequence_id, (held + num_blocks) * self.block_size - table.num_tokens)
            return table.block_ids[held:]

    def allocate_block(self, sequence_id: int) -> int | None:
        """One more whole block for the sequence, or None when the pool is empty."""
        try:
            return self.allocate_blocks(sequence_id, 1)[0]
        except OutOfBlocksError:
            return None

    free_sequence = release
    get_sequence_blocks = BlockQueries.block_ids_of

    def fresh_sequence_id(self) -> int:
        """A new id; negative, so that it cannot collide with ids that a caller counts up."""
        with self.lock:
            while self._next_fresh_id in self._tables:
                self._next_fresh_id -= 1
            self._next_fresh_id -= 1
            return self._next_fresh_id + 1

    def check_invariants(self) -> None:
        """Recompute every count from the tables; raises `CacheError` with the list of violations."""
        with self.lock:
            problems = find_problems(self._tables, self._pool, self.block_size)
            if self._states is not None:
                problems += find_state_problems(self._tables, self._states.pool, self._pool.cached)
        if problems:
            raise CacheError("the block manager is inconsistent: " + "; ".join(problems))

    # -- internal ----------------------------------------------------------------------------------------------------

    def _check_new(self, sequence_id: int) -> None:
        if whole("a sequence id", sequence_id, least=None) in self._tables:
            raise CacheError(f"sequence {sequence_id} already has a block table: release it or take a fresh id")

    def _check_no_pending_move(self, block_ids: list[int]) -> None:
        if not self._pool.moves.keys().isdisjoint(block_ids):
            raise CacheError("a block to be shared is the destination of a pending move: run the moves first")

    def _shrink(self, table: BlockTable, num_kept: int) -> list[int]:
        """Drop the blocks after the first `num_kept`, last one first; return those that became free."""
        freed: list[int] = []
        while len(table.block_ids) > num_kept:
            self._pool.drop(table.block_ids.pop(), freed)
        table.mark_changed(num_kept)
        self._pool.announce(freed)
        return freed
