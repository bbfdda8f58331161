"""The state of each block, for `KVCacheBlockManager`: references, pins, digests, free lists, pending moves.

A block is in exactly one of these states:

    held       at least one table contains it                             ref_counts > 0
    pinned     no table contains it, but a pending move still reads it    ref_counts == 0, pins > 0
    evictable  free, but found by its digest: a prefix hit reuses it; evicted in LRU order otherwise
    blank      free, without content: allocated before any evictable block

Not thread-safe: the manager holds its lock during every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from bifolio.cache.events import CacheEvents, Cleared, Removed
from bifolio.cache.keeper import BlockKeeper
from bifolio.cache.retention import Retention, victim

PADDING_BLOCK = 0  # target of padded table entries and padded writes: never allocated, freed or hashed


class BlockMove(NamedTuple):
    """Copy the whole of block `src` to block `dst`, in every layer, before the step's first write."""

    src: int
    dst: int


class BlockPool:
    """Counts and free lists of blocks 1 to num_blocks - 1; the manager reads the fields and changes none."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks  # tables that hold the block
        self.pins = [0] * num_blocks  # pending moves that read the block
        self.digests: list[bytes | None] = [None] * num_blocks  # of full, verified blocks
        self.cached: dict[bytes, int] = {}  # digest -> the only block with it
        self.blank = list(range(num_blocks - 1, PADDING_BLOCK, -1))  # taken from the end
        self.evictable: OrderedDict[int, None] = OrderedDict()  # the first is evicted first
        self.moves: dict[int, int] = {}  # pending: dst -> src; a dst is held by the one table that will write it
        self.on_free: Callable[[list[int]], None] | None = None
        self.on_forget: Callable[[bytes], None] | None = None  # called with each digest that is removed alone
        self.events: CacheEvents | None = None  # record of stored and removed blocks
        self.keeper: BlockKeeper | None = None  # the tiers below the cache
        self.retention = Retention(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.evictable)

    def take(self) -> int:
        """A free block, now with one reference and no digest."""
        if self.blank:
            block_id = self.blank.pop()
        else:
            if self.retention.protected:
                self.retention.sweep()
            block_id = victim(self.evictable, self.digests, self.retention.protected)
            self.forget(block_id)
        self.ref_counts[block_id] = 1
        self.announce([block_id])
        return block_id

    def retain(self, block_id: int) -> None:
        """Add a reference to a block that is held, pinned or evictable."""
        if not self.ref_counts[block_id]:
            self.evictable.pop(block_id, None)  # not there while a pending move pins it
        self.ref_counts[block_id] += 1

    def drop(self, block_id: int, freed: list[int]) -> None:
        """Remove a reference; blocks that become free are added to `freed`."""
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id]:
            return
        src = self.moves.pop(block_id, None)
        if src is not None and self._unpin(src):  # the destination of the move is released
            freed.append(src)
        if not self.pins[block_id]:
            self._set_free(block_id)
            freed.append(block_id)

    def copy_for_writing(self, block_id: int) -> int:
        """Replace the shared `block_id` by a new block and queue the move that fills it; return the new block."""
        fresh = self.take()
        self.moves[fresh] = block_id
        self.pins[block_id] += 1  # keeps a release in the same step from recycling the source before the copy
        self.ref_counts[block_id] -= 1  # stays above zero: it is shared
        return fresh

    def take_moves(self) -> list[BlockMove]:
        """Remove and return the pending moves."""
        moves = [BlockMove(src, dst) for dst, src in self.moves.items()]
        self.moves.clear()
        for move in moves:
            self._unpin(move.src)
        return moves

    def name(self, block_id: int, digest: bytes) -> bool:
        """Give a full block its digest, unless another block with the same content has it."""
        is_new = digest not in self.cached and self.digests[block_id] is None
        if is_new:
            self.digests[block_id] = digest
            self.cached[digest] = block_id
        return is_new

    def forget(self, block_id: int) -> None:
        """Remove the digest of a block whose content is about to change."""
        digest = self.digests[block_id]
        if digest is not None:
            if self.keeper is not None:
                self.keeper.leaves(digest, block_id)
            del self.cached[digest]
            self.digests[block_id] = None
            if self.on_forget is not None:
                self.on_forget(digest)
            if self.events is not None:
                self.events.record(Removed(digest))

    def forget_all(self) -> None:
        """Remove all digests."""
        for block_id in self.cached.values():
            self.digests[block_id] = None
        self.cached.clear()
        if self.keeper is not None:
            self.keeper.dropped_all()
        if self.events is not None:
            self.events.record(Cleared())
        dropped = list(self.evictable)
        self.evictable.clear()
        self.blank.extend(reversed(dropped))
        self.announce(dropped)

    def announce(self, block_ids: list[int]) -> None:
        """Report blocks without valid content to `on_free`; blocks with a digest are left out."""
        if self.on_free is not None:
            lost = [block_id for block_id in block_ids if self.digests[block_id] is None]
            if lost:
                self.on_free(lost)

    def _unpin(self, block_id: int) -> bool:
        """Remove a pin; True when the block became free."""
        self.pins[block_id] -= 1
        idle = not self.pins[block_id] and not self.ref_counts[block_id]
        if idle:
            self._set_free(block_id)
        return idle

    def _set_free(self, block_id: int) -> None:
        if self.digests[block_id] is None:
            self.blank.append(block_id)
        else:
            self.evictable[block_id] = None
