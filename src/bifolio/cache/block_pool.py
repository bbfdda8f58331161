"""The state of each block, behind `KVCacheBlockManager`: references, pins, digests, free order, pending moves.

A block is in exactly one of these states:

    held       some table contains it                                     ref_counts > 0
    pinned     no table contains it, but a pending move still reads it    ref_counts == 0, pins > 0
    evictable  free, yet its digest can be found: a prefix hit takes it back; else evicted, oldest first
    blank      free, without content: handed out before any evictable block

Not thread-safe by itself: the manager's lock is around every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

PADDING_BLOCK = 0  # target of padded table entries and padded writes: never handed out, freed or hashed


class BlockMove(NamedTuple):
    """Copy the whole of block `src` to block `dst`, in every layer, before the step's first write."""

    src: int
    dst: int


class BlockPool:
    """Counts and lists over blocks 1 to num_blocks - 1; the fields are read by the manager, changed only here."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks  # tables that hold the block
        self.pins = [0] * num_blocks  # pending moves that read the block
        self.digests: list[bytes | None] = [None] * num_blocks  # of full, verified blocks
        self.cached: dict[bytes, int] = {}  # digest -> the one block that carries it
        self.blank = list(range(num_blocks - 1, PADDING_BLOCK, -1))  # taken from the end
        self.evictable: OrderedDict[int, None] = OrderedDict()  # the first is evicted first
        self.moves: dict[int, int] = {}  # pending: dst -> src; a dst is held by the one table that will write it
        self.on_free: Callable[[list[int]], None] | None = None

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.evictable)

    def take(self) -> int:
        """A free block, now with one reference and no digest."""
        if self.blank:
            block_id = self.blank.pop()
        else:
            block_id, _ = self.evictable.popitem(last=False)
            self.forget(block_id)
        self.ref_counts[block_id] = 1
        self.announce([block_id])
        return block_id

    def retain(self, block_id: int) -> None:
        """One more table holds the block, which is held, pinned or evictable."""
        if not self.ref_counts[block_id]:
            self.evictable.pop(block_id, None)  # not there while a pending move pins it
        self.ref_counts[block_id] += 1

    def drop(self, block_id: int, freed: list[int]) -> None:
        """One table less holds the block; blocks that become free by that are added to `freed`."""
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id]:
            return
        src = self.moves.pop(block_id, None)
        if src is not None and self._unpin(src):  # the move has lost its target
            freed.append(src)
        if not self.pins[block_id]:
            self._set_free(block_id)
            freed.append(block_id)

    def copy_for_writing(self, block_id: int) -> int:
        """A fresh block to hold instead of the shared `block_id`, and the move that fills it, pending."""
        fresh = self.take()
        self.moves[fresh] = block_id
        self.pins[block_id] += 1  # else a release in the same step could recycle the source before it is copied
        self.ref_counts[block_id] -= 1  # stays above zero: it is shared
        return fresh

    def take_moves(self) -> list[BlockMove]:
        """The pending moves, which are then no longer pending."""
        moves = [BlockMove(src, dst) for dst, src in self.moves.items()]
        self.moves.clear()
        for move in moves:
            self._unpin(move.src)
        return moves

    def name(self, block_id: int, digest: bytes) -> None:
        """Make a full block findable, unless another one with the same content already is."""
        if digest not in self.cached and self.digests[block_id] is None:
            self.digests[block_id] = digest
            self.cached[digest] = block_id

    def forget(self, block_id: int) -> None:
        """The block's content is about to change: it can no longer be found."""
        digest = self.digests[block_id]
        if digest is not None:
            del self.cached[digest]
            self.digests[block_id] = None

    def forget_all(self) -> None:
        """No block can be found by content any more."""
        for block_id in self.cached.values():
            self.digests[block_id] = None
        self.cached.clear()
        dropped = list(self.evictable)
        self.evictable.clear()
        self.blank.extend(reversed(dropped))
        self.announce(dropped)

    def announce(self, block_ids: list[int]) -> None:
        """Tell the debug mode which blocks have lost their content; blocks with a digest are passed over."""
        if self.on_free is not None:
            lost = [block_id for block_id in block_ids if self.digests[block_id] is None]
            if lost:
                self.on_free(lost)

    def _unpin(self, block_id: int) -> bool:
        """One move less reads the block; True when that made it free."""
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
