"""Sharing blocks between sequences: what beam search and speculative decoding ask of the block manager.

All of it is fork, append, truncate and release underneath; a reference is counted once per row that holds a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.errors import CacheError, ConfigError


@dataclass(frozen=True, slots=True)
class ShareStats:
    """How much is shared at one moment."""

    total_shared_blocks: int  # blocks held by more than one row
    total_blocks_referenced: int  # blocks held by at least one row
    total_references: int  # blocks as the rows count them: what they would take without sharing
    average_reference_count: float  # references per referenced block; 0.0 when there is none

    def __str__(self) -> str:
        return (
            f"ShareStats: Shared={self.total_shared_blocks}, Referenced={self.total_blocks_referenced}, "
            f"AvgRefCount={self.average_reference_count:.2f}"
        )


class BlockShareManager:
    """The block manager seen as sequences that share blocks; keeps no counts of its own."""

    def __init__(self, blocks: KVCacheBlockManager) -> None:
        self.blocks = blocks

    def share_block(self, block_id: int, sequence_ids: Iterable[int]) -> None:
        """Let each of these sequences hold the block as well, next in its row; all of them or none.

        The sequences' rows (opened if needed) must already share the blocks before it. A row counts once.
        """
        with self.blocks.lock:
            sharers = list(dict.fromkeys(sequence_ids))
            done: list[tuple[int, bool]] = []  # those that did not hold the block: (sequence, had a row)
            try:
                for sequence_id in sharers:
                    had_row = self.blocks.has_row(sequence_id)
                    if had_row and block_id in self.blocks.row_block_ids(sequence_id):
                        continue
                    self.blocks.share(block_id, sequence_id)
                    done.append((sequence_id, had_row))
            except CacheError:
                for sequence_id, had_row in done:
                    self._take_back(sequence_id, had_row)
                raise

    def release_sequence(self, sequence_id: int) -> list[int]:
        """Drop the sequence's references; return the blocks that are free by that."""
        return self.blocks.release(sequence_id)

    def is_block_shared(self, block_id: int) -> bool:
        """More than one row holds the block."""
        return self.blocks.ref_count(block_id) > 1

    def get_reference_count(self, block_id: int) -> int:
        """Rows that hold the block."""
        return self.blocks.ref_count(block_id)

    def get_sequence_blocks(self, sequence_id: int) -> list[int]:
        """The sequence's blocks, in order of position."""
        return self.blocks.row_block_ids(sequence_id)

    def get_block_users(self, block_id: int) -> list[int]:
        """The sequences that hold the block."""
        return self.blocks.block_users(block_id)

    def get_stats(self) -> ShareStats:
        """Counts over all blocks, taken in one piece."""
        counts = self.blocks.reference_counts()
        total = sum(counts.values())
        return ShareStats(
            total_shared_blocks=sum(count > 1 for count in counts.values()),
            total_blocks_referenced=len(counts),
            total_references=total,
            average_reference_count=total / len(counts) if counts else 0.0,
        )

    def _take_back(self, sequence_id: int, had_row: bool) -> None:
        if not had_row:
            self.blocks.release(sequence_id)
            return
        num_full = len(self.blocks.row_block_ids(sequence_id)) - 1
        self.blocks.truncate(sequence_id, num_full * self.blocks.block_size)


@dataclass(slots=True)
class BeamInfo:
    """One beam of a search."""

    beam_index: int
    base_sequence_id: int
    divergence_point: int  # tokens it has in common with its base; the token at this index is its own


class BeamSearchBlockSharing:
    """Beams share the blocks of their prefix until they diverge.

    `fresh_id` gives beams their ids; by default the block manager's own, which meet nobody else's.
    """

    def __init__(
        self, share_manager: BlockShareManager, beam_width: int, *, fresh_id: Callable[[], int] | None = None
    ) -> None:
        if beam_width < 1:
            raise ConfigError(f"beam_width is {beam_width}; a search has at least 1 beam")
        self._blocks = share_manager.blocks
        self._beam_width = beam_width
        self._fresh_id = fresh_id or self._blocks.fresh_sequence_id
        self._beam_infos: dict[int, BeamInfo] = {}

    def initialize_beams(self, base_sequence_id: int, prefix_length: int) -> list[int]:
        """Fork `beam_width` beams that hold the base's first `prefix_length` tokens; takes no block. Returns their ids.

        The base keeps its own row: release it when only the beams go on.
        """
        with self._blocks.lock:
            num_tokens = self._blocks.row_num_tokens(base_sequence_id)
            if not 0 <= prefix_length <= num_tokens:
                raise CacheError(
                    f"sequence {base_sequence_id} has {num_tokens} tokens and no prefix of {prefix_length}"
                )
            beam_ids: list[int] = []
            for index in range(self._beam_width):
                beam_id = self._fresh_id()
                self._blocks.fork(base_sequence_id, beam_id)
                self._blocks.truncate(beam_id, prefix_length)
                self._beam_infos[beam_id] = BeamInfo(index, base_sequence_id, prefix_length)
                beam_ids.append(beam_id)
            return beam_ids

    def on_beam_divergence(self, beam_id: int, divergence_point: int) -> None:
        """The beam goes its own way at token `divergence_point`: it gets a slot for that token which is its own.

        What the beam held from there on is given back. If that slot lies in a shared block, a copy becomes pending.
        When the pool is empty (`OutOfBlocksError`), the beam ends at the divergence point and can be appended to later.
        """
        with self._blocks.lock:
            info = self._info(beam_id)
            num_tokens = self._blocks.row_num_tokens(beam_id)
            if not 0 <= divergence_point <= num_tokens:
                raise CacheError(f"beam {beam_id} has {num_tokens} tokens and cannot diverge at {divergence_point}")
            self._blocks.truncate(beam_id, divergence_point)
            info.divergence_point = divergence_point
            self._blocks.append(beam_id, 1)

    def cleanup_beams(self, beam_ids: Sequence[int]) -> list[int]:
        """Release these beams; return the blocks that are free by that. All must be beams of this search."""
        with self._blocks.lock:
            for beam_id in beam_ids:
                self._info(beam_id)
            freed: list[int] = []
            for beam_id in dict.fromkeys(beam_ids):
                freed += self._blocks.release(beam_id)
                del self._beam_infos[beam_id]
            return freed

    def get_beam_info(self, beam_id: int) -> BeamInfo | None:
        """What is known of a beam; None if it is not one of this search."""
        return self._beam_infos.get(beam_id)

    def _info(self, beam_id: int) -> BeamInfo:
        info = self._beam_infos.get(beam_id)
        if info is None:
            raise CacheError(f"{beam_id} is not a beam of this search")
        return info


class SpeculativeDecodingSharing:
    """Room for drafted tokens behind a sequence, kept or given back once the drafts are verified.

    |<------- base_sequence_length ------->|<- verified drafts ->|<- rejected drafts ->|
    """

    def __init__(self, share_manager: BlockShareManager, speculation_length: int = 4) -> None:
        if speculation_length < 1:
            raise ConfigError(f"speculation_length is {speculation_length}; at least 1 token is drafted")
        self._blocks = share_manager.blocks
        self._speculation_length = speculation_length
        self._base_lengths: dict[int, int] = {}  # sequence -> its length before the drafts, while they are unverified

    def allocate_speculative_blocks(
        self, sequence_id: int, base_sequence_length: int, num_tokens: int | None = None
    ) -> list[int]:
        """Promise slots for `num_tokens` drafts (by default the speculation length); return the blocks they lie in.

        The sequence must hold `base_sequence_length` tokens. Raises `OutOfBlocksError` with nothing changed.
        """
        with self._blocks.lock:
            held = self._blocks.row_num_tokens(sequence_id)
            if held != base_sequence_length:
                raise CacheError(
                    f"sequence {sequence_id} holds {held} tokens, not {base_sequence_length}: verify or reject its "
                    "earlier drafts first"
                )
            self._blocks.append(sequence_id, self._speculation_length if num_tokens is None else num_tokens)
            self._base_lengths[sequence_id] = base_sequence_length
            return self._draft_blocks(sequence_id, base_sequence_length)

    def verify_speculation(self, sequence_id: int, verified_tokens: int) -> tuple[list[int], list[int]]:
        """Keep the first `verified_tokens` drafts; return the blocks they lie in, and the blocks freed."""
        with self._blocks.lock:
            base = self._base_length(sequence_id)
            drafted = self._blocks.row_num_tokens(sequence_id) - base
            if not 0 <= verified_tokens <= drafted:
                raise CacheError(f"{verified_tokens} drafts of sequence {sequence_id} verified, of {drafted} made")
            del self._base_lengths[sequence_id]
            freed = self._blocks.truncate(sequence_id, base + verified_tokens)
            return (self._draft_blocks(sequence_id, base) if verified_tokens else []), freed

    def reject_all_speculation(self, sequence_id: int) -> list[int]:
        """Go back to the length before the drafts; return the blocks freed."""
        return self.verify_speculation(sequence_id, 0)[1]

    def _base_length(self, sequence_id: int) -> int:
        if not self._blocks.has_row(sequence_id):  # released with its drafts
            self._base_lengths.pop(sequence_id, None)
        if sequence_id not in self._base_lengths:
            raise CacheError(f"sequence {sequence_id} has no drafts to verify")
        return self._base_lengths[sequence_id]

    def _draft_blocks(self, sequence_id: int, base: int) -> list[int]:
        return self._blocks.row_block_ids(sequence_id)[base // self._blocks.block_size :]
