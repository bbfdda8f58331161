"""Places in a device's cache for blocks that a tier returns, held until the blocks are there.

    engine's thread   `open`: allocates blocks under an id of its own, and marks the end of the launched work
    a thread          `store`: queues copies into them behind the mark, on a stream of its own; waits for the last one
    engine's thread   `close`: commits the blocks, so that any sequence finds them, and gives up its hold

Steps go on meanwhile: no table that they read has these blocks before `close`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.engine.tiers.content import BlockContent
from bifolio.engine.transfer.blocks import Arrival
from bifolio.kernels.block_copies import BlockCopies
from bifolio.sequence import Sequence as TokenSequence

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine

SPARE_BLOCKS = 4  # that stay free, beside one for each running sequence


class Landing:
    """The places of one ticket. `open` and `close` run on the engine's thread, `store` on one of the tiers."""

    def __init__(self, blocks: KVCacheBlockManager, content: BlockContent, sequence: TokenSequence) -> None:
        self._blocks, self._content, self._sequence = blocks, content, sequence
        self._copies = _required(content.copies)
        request = sequence.request
        self._id = blocks.fresh_sequence_id()
        self._tokens = list(sequence.token_ids)
        self._num_held = blocks.open_table(self._id, self._tokens, salt=request.cache_salt, marks=request.marks)
        self._block_ids: list[int] = []
        self._num_stored = 0
        self._state: Any = None  # behind the last block, on the device
        self._after: Any = None

    @classmethod
    def open(
        cls,
        blocks: KVCacheBlockManager,
        content: BlockContent,
        sequence: TokenSequence,
        first: int,  # number of the first block that arrives
        digests: list[bytes],  # of those that a tier has; cut to those that get a place
        states: Container[bytes],
        num_running: int,
    ) -> Landing | None:
        """Places for as many blocks as there is room for; None without any."""
        landing, size = cls(blocks, content, sequence), blocks.block_size
        del digests[max(blocks.num_free_blocks - num_running - SPARE_BLOCKS, 0) :]
        while digests and blocks.has_states and digests[-1] not in states:
            digests.pop()  # blocks of a hybrid are of use up to a state
        if not digests or landing._num_held != first * size:
            blocks.release(landing._id)
            return None
        blocks.append(landing._id, len(digests) * size)
        landing._block_ids = blocks.block_ids_of(landing._id)[first:]
        content.forget_head(landing._block_ids)
        landing._after = landing._copies.mark()
        return landing

    def store(self, arrived: Sequence[np.ndarray]) -> None:
        """Queue the next blocks."""
        places = self._block_ids[self._num_stored : self._num_stored + len(arrived)]
        self._copies.write_blocks(places, arrived[: len(places)], self._after)
        self._num_stored += len(places)

    def finish(self, num_blocks: int, state: np.ndarray | None) -> None:
        """Wait for the blocks; the first `num_blocks` are of use, and `state` is behind them."""
        self._copies.finish_writes()
        self._num_stored = min(num_blocks, self._num_stored)
        if state is not None:
            self._state = self._copies.upload_state(state)

    def close(self, engine: InferenceEngine) -> int:
        """Make the blocks findable and hand them to the sequence if it still waits; the tokens gained."""
        blocks, sequence, size = self._blocks, self._sequence, self._blocks.block_size
        count = self._num_stored
        try:
            if not count or (blocks.has_states and self._state is None):
                return 0
            blocks.commit(self._id, self._tokens, self._num_held + count * size)
            if self._state is not None:
                with blocks.lock:
                    place = blocks.adopt_state(self._id)
                    if place is not None:
                        self._copies.write_state(place, self._state)
            if sequence.finish_reason is None and not blocks.has_table(sequence.id):
                request = sequence.request
                Arrival(engine, self._tokens, request.cache_salt, sequence.id, request.marks)
                blocks.rest(sequence.id)
        finally:
            blocks.release(self._id)
            self._state = None
        return count * size


def _required(copies: BlockCopies | None) -> BlockCopies:
    assert copies is not None, "blocks land on a device"
    return copies
