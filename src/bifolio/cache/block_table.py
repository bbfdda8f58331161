"""`BlockTable`: the blocks of one sequence, and the growth of tables.

    position p of a sequence  ->  block_ids[p // block_size], offset p % block_size
                              ->  cache index = block_id * block_size + offset

`KVCacheBlockManager` owns one table for each sequence and is the only caller of the functions that change it.
`count_needed_blocks` and `grow` are in one file because they must agree exactly: a batch of appends is admitted by the
count alone, and must not run out of blocks afterwards. Both apply these rules:

    room in the last block        no block
    room in a shared last block   one block to copy it to, except for the last sharer, which keeps the original
    beyond the last block         one block for each `block_size` missing tokens

Not thread-safe: the manager holds its lock during every call. Both run in every decode step, over every sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bifolio.cache.block_pool import PADDING_BLOCK, BlockPool
from bifolio.cache.digests import TokenIds, marks_in, next_digest
from bifolio.cache.events import Stored
from bifolio.cache.states import SequenceState
from bifolio.counts import whole, whole_ids
from bifolio.errors import CacheError, UnknownSequenceError
from bifolio.images import Mark

if TYPE_CHECKING:
    from bifolio.cache.block_manager import KVCacheBlockManager
    from bifolio.cache.storage import Page

INTEGERS = {int}


class BlockTable:
    """An ordered list of blocks and the number of tokens they are reserved for.

    |<---- block_ids[0] ---->|<---- block_ids[1] ---->|<---- block_ids[2] ---->|
    |<------------------------ num_tokens ----------------------->|<-- room -->|
    |<------ chain[0] ------>|    (chain: the full blocks whose tokens are known and verified)

    Under the name `PageTable` a table also allocates and frees pages at its end and returns views of them.
    """

    __slots__ = (
        "_manager", "block_ids", "block_size", "chain", "first_changed", "marks", "num_tokens", "publishes", "root",
        "sequence_id", "state",
    )  # fmt: skip

    def __init__(
        self,
        manager: KVCacheBlockManager,
        sequence_id: int,
        root: bytes,
        publishes: bool,
        marks: tuple[Mark, ...] = (),
    ) -> None:
        self._manager = manager
        self.sequence_id = sequence_id
        self.block_size = manager.block_size
        self.block_ids: list[int] = []
        self.num_tokens = 0  # len(block_ids) == ceil(num_tokens / block_size)
        self.root = root  # digest of the empty prefix: carries the salt
        self.marks = marks  # of tokens whose ids do not tell their content
        self.chain: list[bytes] = []  # digest of each leading full block that was committed
        self.publishes = publishes  # its full blocks may be found by content
        self.state: SequenceState | None = None  # of a model with recurrent layers
        self.first_changed = 0  # entries from here on are not known to the device yet

    # -- queries -----------------------------------------------------------------------------------------------------

    def lookup(self, token_index: int) -> tuple[int, int]:
        """(block id, offset in the block) of the token at `token_index`."""
        token_index = whole("a token's index", token_index, least=None)
        self._check_range(token_index, token_index + 1)
        return self.block_ids[token_index // self.block_size], token_index % self.block_size

    def cache_index(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """i64[end - start]: cache indices of the tokens [start, end)."""
        start, end = whole("start", start, least=None), whole("end", end, least=None)
        self._check_range(start, end)
        positions = np.arange(start, end, dtype=np.int64)
        blocks = np.array(self.block_ids, dtype=np.int64)[positions // self.block_size]
        return np.asarray(blocks * self.block_size + positions % self.block_size, dtype=np.int64)

    def get(self, seq_pos: int) -> Page | None:
        """The page that holds position `seq_pos`, or None when no page covers it."""
        if not 0 <= whole("a position", seq_pos, least=None) < len(self.block_ids) * self.block_size:
            return None
        return self._manager.get_block(self.block_ids[seq_pos // self.block_size])

    # -- pages --------------------------------------------------------------------------------------------------------

    def allocate(self, seq_start: int) -> int | None:
        """The page for the positions from `seq_start` on, the first uncovered one; None when the pool is empty.

        Pages are contiguous: the first starts at position 0, the next at `block_size`, and so on.
        """
        with self._manager.lock:
            self._check_open()
            covered = len(self.block_ids) * self.block_size
            if whole("a position", seq_start, least=None) != covered:
                raise CacheError(f"the next page starts at position {covered}, not at {seq_start}")
            return self._manager.allocate_block(self.sequence_id)

    def free(self, page_ids: Iterable[int]) -> list[int]:
        """Release pages from the end of the sequence, in any order; return those that no other table holds."""
        unwanted = set(whole_ids("page ids", page_ids))
        with self._manager.lock:
            self._check_open()
            num_kept = len(self.block_ids) - len(unwanted)
            if num_kept < 0 or set(self.block_ids[num_kept:]) != unwanted:
                raise CacheError(f"pages {sorted(unwanted)} are not the last ones of the sequence: {self.block_ids}")
            if not unwanted:
                return []
            return self._manager.truncate(self.sequence_id, num_kept * self.block_size)

    # -- for the manager ---------------------------------------------------------------------------------------------

    def take_changes(self) -> tuple[int, list[int]]:
        """The first entry that changed since the last call, and the entries from there on."""
        first, self.first_changed = self.first_changed, len(self.block_ids)
        return first, self.block_ids[first:]

    def mark_changed(self, index: int) -> None:
        """Record that the entries from `index` on differ from those last taken."""
        if index < self.first_changed:
            self.first_changed = index

    def adopt(self, block_id: int, holder: BlockTable) -> None:
        """Continue with the block that `holder` has at the same index, and with its digest if it has one."""
        index = len(self.block_ids)
        if index == 0:
            self.root, self.marks = holder.root, holder.marks
        self.publishes = self.publishes and holder.publishes
        if self.root == holder.root and len(self.chain) == index < len(holder.chain):
            self.chain.append(holder.chain[index])
        self.block_ids.append(block_id)
        self.num_tokens = min(holder.num_tokens, (index + 1) * self.block_size)
        self.mark_changed(index)

    def _check_open(self) -> None:
        """The id of a released table may belong to another sequence by now."""
        if not self._manager.has_table(self.sequence_id) or self._manager.table(self.sequence_id) is not self:
            raise UnknownSequenceError(f"this table of sequence {self.sequence_id} was released: open a new one")

    def _check_range(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= self.num_tokens:
            raise CacheError(
                f"tokens [{start}, {end}) are outside sequence {self.sequence_id}, which holds {self.num_tokens}"
            )


PageTable = BlockTable


def find_table(tables: Mapping[int, BlockTable], sequence_id: int) -> BlockTable:
    """The sequence's table, or `UnknownSequenceError`."""
    if type(sequence_id) is not int:  # else the call would cost as much as the look-up, in every step
        sequence_id = whole("a sequence id", sequence_id, least=None, error=UnknownSequenceError)
    table = tables.get(sequence_id)
    if table is None:
        raise UnknownSequenceError(f"sequence {sequence_id} has no block table: open one first")
    return table


def checked_ids(sequence_ids: Iterable[int]) -> list[int]:
    """These ids as a list; `CacheError` unless all are ints."""
    known = list(sequence_ids)
    if known and set(map(type, known)) != INTEGERS:
        whole_ids("sequence ids", known)  # names the wrong one
        raise CacheError("sequence ids are whole numbers: pass ints")
    return known


def find_holder(tables: Mapping[int, BlockTable], block_id: int, table: BlockTable) -> BlockTable:
    """A table that holds `block_id` directly after the blocks of `table`, all of them full; else `CacheError`."""
    wanted = [*table.block_ids, block_id]
    if table.num_tokens == len(table.block_ids) * table.block_size:
        for holder in tables.values():
            if holder.block_ids[: len(wanted)] == wanted:
                return holder
    raise CacheError(
        f"block {block_id} cannot be shared here: no table holds it after the same {len(table.block_ids)} full "
        "blocks; share the blocks before it first, or fork the sequence"
    )


def padded(tables: Sequence[list[int]]) -> npt.NDArray[np.int32]:
    """i32[len(tables), longest]: block ids of several sequences, padded with block 0."""
    width = max((len(block_ids) for block_ids in tables), default=0)
    array = np.full((len(tables), width), PADDING_BLOCK, dtype=np.int32)
    for index, block_ids in enumerate(tables):
        array[index, : len(block_ids)] = block_ids
    return array


# -- growing ---------------------------------------------------------------------------------------------------------


def merge_appends(appends: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Total tokens of each sequence in (sequence_id, num_tokens) pairs; `CacheError` unless it is an integer >= 0."""
    try:
        pairs = appends if isinstance(appends, list) else list(appends)
        merged = dict(pairs)
    except (TypeError, ValueError):
        raise CacheError("appends are pairs of a sequence id and a number of tokens") from None
    if len(merged) != len(pairs):  # a sequence that occurs twice gets the sum
        merged = dict.fromkeys(merged, 0)
        for sequence_id, num_tokens in pairs:
            merged[whole("a sequence id", sequence_id, least=None)] += whole("a number of tokens", num_tokens)
    if merged:
        checked_ids(merged)
        if set(map(type, merged.values())) != INTEGERS:
            raise CacheError("a table grows by a whole number of tokens: pass an int")
        if min(merged.values()) < 0:
            raise CacheError("a table cannot grow by a negative number of tokens: truncate it instead")
    return merged


def count_needed_blocks(
    merged: dict[int, int], tables: Mapping[int, BlockTable], pool: BlockPool, block_size: int
) -> int:
    """The exact number of free blocks that `grow` takes for these appends."""
    ref_counts = pool.ref_counts
    needed = 0
    leaving: dict[int, int] = {}  # shared last block -> sharers of this batch that leave it
    for sequence_id, num_tokens in merged.items():
        table = tables.get(sequence_id) or find_table(tables, sequence_id)
        missing = table.num_tokens + num_tokens - len(table.block_ids) * block_size
        if missing > 0:
            needed += -(-missing // block_size)
        if num_tokens and table.num_tokens % block_size:
            tail = table.block_ids[-1]
            if ref_counts[tail] > 1:
                left = leaving.get(tail, 0)
                if ref_counts[tail] - left > 1:
                    needed += 1
                    leaving[tail] = left + 1
    return needed


def split_by_room(
    sequence_ids: Iterable[int], tables: Mapping[int, BlockTable], pool: BlockPool, block_size: int
) -> tuple[list[BlockTable], dict[int, int]]:
    """(Tables whose last block takes one token more as it is, {id: 1} of the others), of sequences that differ."""
    ref_counts, digests = pool.ref_counts, pool.digests
    inside, others = [], {}
    known = checked_ids(sequence_ids)
    if len(set(known)) != len(known):
        raise CacheError(f"sequences {known} name one twice: a step appends one token to each")
    for sequence_id in known:
        table = tables.get(sequence_id) or find_table(tables, sequence_id)
        if table.num_tokens % block_size:
            tail = table.block_ids[-1]
            if ref_counts[tail] == 1 and digests[tail] is None:
                inside.append(table)
                continue
        others[sequence_id] = 1
    return inside, others


def grow(merged: dict[int, int], tables: Mapping[int, BlockTable], pool: BlockPool, block_size: int) -> None:
    """Reserve each table's tokens; at least `count_needed_blocks` blocks must be free."""
    ref_counts, digests = pool.ref_counts, pool.digests
    for sequence_id, num_tokens in merged.items():
        table = tables[sequence_id]
        if table.num_tokens % block_size and num_tokens:
            tail = table.block_ids[-1]
            if ref_counts[tail] > 1 or digests[tail] is not None:
                _own_tail(table, pool)
        table.num_tokens += num_tokens
        if table.num_tokens > len(table.block_ids) * block_size:
            _extend(table, pool, block_size)


def _own_tail(table: BlockTable, pool: BlockPool) -> None:
    """Make the partly filled last block, about to be written, exclusive to this table and remove its digest."""
    tail = table.block_ids[-1]
    if pool.ref_counts[tail] > 1:
        table.block_ids[-1] = pool.copy_for_writing(tail)
        table.mark_changed(len(table.block_ids) - 1)
    else:
        pool.forget(tail)


def _extend(table: BlockTable, pool: BlockPool, block_size: int) -> None:
    """Take blocks until all reserved tokens are covered."""
    table.mark_changed(len(table.block_ids))
    for _ in range(-(-table.num_tokens // block_size) - len(table.block_ids)):
        table.block_ids.append(pool.take())


# -- digests -----------------------------------------------------------------------------------------------------------


def extend_chain(table: BlockTable, pool: BlockPool, token_ids: TokenIds, num_full: int) -> None:
    """Compute the digests of the first `num_full` blocks from the end of the chain on, and record the new ones."""
    size, chain = table.block_size, table.chain
    if len(token_ids) < num_full * size:
        raise CacheError(f"{num_full} full blocks are committed but only {len(token_ids)} token ids are given")
    run = first = len(chain)  # [run, index): new blocks that no event has reported yet
    digests, last = [], chain[-1] if chain else table.root
    try:
        for start in range(first * size, num_full * size, size):
            own = marks_in(table.marks, start, start + size) if table.marks else b""
            last = next_digest(last, token_ids[start : start + size], own)
            digests.append(last)
    except (TypeError, OverflowError):
        raise CacheError("token ids are whole numbers of 32 bits") from None
    for index, digest in enumerate(digests, start=first):
        chain.append(digest)
        if not pool.name(table.block_ids[index], chain[-1]):
            _record_stored(table, pool, token_ids, run, index)
            run = index + 1
    _record_stored(table, pool, token_ids, run, num_full)
    if pool.keeper is not None:
        pool.keeper.stored(table.chain[first:num_full], table.root)


def _record_stored(table: BlockTable, pool: BlockPool, token_ids: TokenIds, first: int, end: int) -> None:
    """Record the blocks [first, end) of a table as stored."""
    if pool.events is not None and first < end:
        parent = table.chain[first - 1] if first else table.root
        tokens = token_ids[first * table.block_size : end * table.block_size]
        pool.events.record(Stored(table.chain[first:end], parent, table.root, tokens))
