"""Sharing blocks between sequences: the block operations of beam search and speculative decoding.

The engine's beam searches fork and release tables through `BeamSearchBlockSharing`, and its drafts are reserved and
verified through `SpeculativeDecodingSharing`. Both use fork, append, truncate and release; each table that
holds a block counts as one reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.block_table import BlockTable
from bifolio.counts import distinct_ids, whole, whole_ids
from bifolio.errors import CacheError, ConfigError


@dataclass(frozen=True, slots=True)
class ShareStats:
    """Counts of shared blocks and references at one moment."""

    total_shared_blocks: int  # blocks held by more than one table
    total_blocks_referenced: int  # blocks held by at least one table
    total_references: int  # blocks that the tables would take without sharing
    average_reference_count: float  # references per referenced block; 0.0 when there is none

    def __str__(self) -> str:
        return (
            f"ShareStats: Shared={self.total_shared_blocks}, Referenced={self.total_blocks_referenced}, "
            f"AvgRefCount={self.average_reference_count:.2f}"
        )


class BlockShareManager:
    """A view of the block manager as sequences that share blocks; stores no counts."""

    def __init__(self, blocks: KVCacheBlockManager) -> None:
        self.blocks = blocks

    def share_block(self, block_id: int, sequence_ids: Iterable[int]) -> None:
        """Append the block to the tables of these sequences, all of them or none.

        Another table must hold the block at the same position, after the same blocks. A sequence without a table gets
        one; a sequence that already holds the block is skipped.
        """
        blocks, wanted = self.blocks, whole_ids("sequence ids", sequence_ids)
        with blocks.lock:
            done: list[tuple[int, bool]] = []  # (sequence, whether it had a table before)
            try:
                for sequence_id in dict.fromkeys(wanted):
                    had_table = blocks.has_table(sequence_id)
                    if had_table and block_id in blocks.table(sequence_id).block_ids:
                        continue
                    blocks.share(block_id, sequence_id)
                    done.append((sequence_id, had_table))
            except CacheError:
                for sequence_id, had_table in done:
                    self._take_back(sequence_id, had_table)
                raise

    def release_sequence(self, sequence_id: int) -> list[int]:
        """Drop the sequence's references; return the blocks that became free."""
        return self.blocks.release(sequence_id)

    def is_block_shared(self, block_id: int) -> bool:
        """Whether more than one table holds the block."""
        return self.blocks.ref_count(block_id) > 1

    def get_reference_count(self, block_id: int) -> int:
        """Tables that hold the block."""
        return self.blocks.ref_count(block_id)

    def get_sequence_blocks(self, sequence_id: int) -> list[int]:
        """The sequence's blocks, in order of position."""
        return self.blocks.block_ids_of(sequence_id)

    def get_block_users(self, block_id: int) -> list[int]:
        """The sequences that hold the block."""
        return self.blocks.block_users(block_id)

    def get_stats(self) -> ShareStats:
        """Counts over all blocks, taken atomically."""
        counts = self.blocks.reference_counts()
        total = sum(counts.values())
        return ShareStats(
            total_shared_blocks=sum(count > 1 for count in counts.values()),
            total_blocks_referenced=len(counts),
            total_references=total,
            average_reference_count=total / len(counts) if counts else 0.0,
        )

    def _take_back(self, sequence_id: int, had_table: bool) -> None:
        if not had_table:
            self.blocks.release(sequence_id)
            return
        num_full = len(self.blocks.block_ids_of(sequence_id)) - 1
        self.blocks.truncate(sequence_id, num_full * self.blocks.block_size)


@dataclass(slots=True)
class BeamInfo:
    """One beam of a search."""

    beam_index: int
    base_sequence_id: int
    divergence_point: int  # tokens shared with its base; the first token that differs has this index


class BeamSearchBlockSharing:
    """Beams share the blocks of their prefix until they diverge.

    `fresh_id` gives new beams their ids; by default the block manager's own, which never collide with a caller's.
    """

    def __init__(
        self, share_manager: BlockShareManager, beam_width: int, *, fresh_id: Callable[[], int] | None = None
    ) -> None:
        self._blocks = share_manager.blocks
        self._beam_width = whole("beam_width", beam_width, least=1, error=ConfigError)
        self._fresh_id = fresh_id or self._blocks.fresh_sequence_id
        self._beam_infos: dict[int, BeamInfo] = {}

    def initialize_beams(
        self, base_sequence_id: int, prefix_length: int, beam_ids: Sequence[int] | None = None
    ) -> list[int]:
        """Fork beams that hold the base's first `prefix_length` tokens; takes no block. Returns their ids.

        `beam_ids` names the beams (at most `beam_width`); by default `beam_width` fresh ids are made. The base keeps
        its own table: release it when only the beams continue. All beams are forked, or none.
        """
        blocks = self._blocks
        with blocks.lock:
            num_tokens = blocks.num_tokens_of(base_sequence_id)
            if not 0 <= whole("prefix_length", prefix_length, least=None) <= num_tokens:
                raise CacheError(
                    f"sequence {base_sequence_id} has {num_tokens} tokens and no prefix of {prefix_length}"
                )
            if beam_ids is None:
                beam_ids = [self._fresh_id() for _ in range(self._beam_width)]
            beam_ids = distinct_ids("beam ids", beam_ids)
            if len(beam_ids) > self._beam_width:
                raise CacheError(f"{len(beam_ids)} beams are requested and the search has {self._beam_width}")
            self._fork_all([(base_sequence_id, beam_id) for beam_id in beam_ids])
            for index, beam_id in enumerate(beam_ids):
                blocks.truncate(beam_id, prefix_length)
                self._beam_infos[beam_id] = BeamInfo(index, base_sequence_id, prefix_length)
            return list(beam_ids)

    def reorder_beams(self, dropped: Iterable[int], forks: Sequence[tuple[int, int]]) -> None:
        """After a step of the search: release the beams that end, then fork (parent, child) for those that branch.

        A child's id may be that of a dropped beam. A parent without blocks, or a child that keeps its own, is an error
        with nothing changed. A new beam has the smallest index that no other beam has.
        """
        blocks = self._blocks
        ended, pairs = whole_ids("dropped beams", dropped), _checked_pairs(forks)
        with blocks.lock:
            gone = [beam_id for beam_id in dict.fromkeys(ended) if blocks.has_table(beam_id)]
            for parent, child in pairs:
                if parent in gone or not blocks.has_table(parent):
                    raise CacheError(f"beam {parent} has no blocks to share: it was dropped or never started")
                if child not in gone and blocks.has_table(child):
                    raise CacheError(f"beam {child} has blocks already: drop it before another takes its id")
                blocks.check_fork(parent)
            for beam_id in gone:
                blocks.release(beam_id)
                self._beam_infos.pop(beam_id, None)
            self._fork_all(pairs)
            for parent, child in pairs:
                self._beam_infos.pop(child, None)
                used = {info.beam_index for info in self._beam_infos.values()}
                index = next(number for number in count() if number not in used)
                self._beam_infos[child] = BeamInfo(index, parent, blocks.num_tokens_of(parent))

    def on_beam_divergence(self, beam_id: int, divergence_point: int) -> None:
        """Diverge the beam at token `divergence_point`: reserve an exclusive entry for that token.

        The beam's tokens from there on are truncated. If the entry is in a shared block, a move becomes pending. When
        the pool is empty (`OutOfBlocksError`), the beam ends at the divergence point and can be appended
        to later.
        """
        with self._blocks.lock:
            info = self._info(beam_id)
            num_tokens = self._blocks.num_tokens_of(beam_id)
            if not 0 <= whole("divergence_point", divergence_point, least=None) <= num_tokens:
                raise CacheError(f"beam {beam_id} has {num_tokens} tokens and cannot diverge at {divergence_point}")
            self._blocks.truncate(beam_id, divergence_point)
            info.divergence_point = divergence_point
            self._blocks.append(beam_id, 1)

    def cleanup_beams(self, beam_ids: Sequence[int]) -> list[int]:
        """Release these beams; return the blocks that became free. All must be beams of this search.

        Of a beam whose table is already released, only the record is removed.
        """
        with self._blocks.lock:
            ended = whole_ids("beam ids", beam_ids)
            for beam_id in ended:
                self._info(beam_id)
            freed: list[int] = []
            for beam_id in dict.fromkeys(ended):
                if self._blocks.has_table(beam_id):
                    freed += self._blocks.release(beam_id)
                del self._beam_infos[beam_id]
            return freed

    def get_beam_info(self, beam_id: int) -> BeamInfo | None:
        """The record of a beam; None if it is not one of this search."""
        return self._beam_infos.get(whole("a beam id", beam_id, least=None))

    def _fork_all(self, forks: Sequence[tuple[int, int]]) -> None:
        done: list[int] = []
        try:
            for parent, child in forks:
                self._blocks.fork(parent, child)
                done.append(child)
        except CacheError:
            for child in done:
                self._blocks.release(child)
            raise

    def _info(self, beam_id: int) -> BeamInfo:
        info = self._beam_infos.get(whole("a beam id", beam_id, least=None))
        if info is None:
            raise CacheError(f"{beam_id} is not a beam of this search")
        return info


class SpeculativeDecodingSharing:
    """Blocks for drafted tokens at the end of a sequence, kept or released once the drafts are verified.

    |<------- base_sequence_length ------->|<- verified drafts ->|<- rejected drafts ->|
    """

    def __init__(self, share_manager: BlockShareManager, speculation_length: int = 4) -> None:
        self._blocks = share_manager.blocks
        self._speculation_length = whole("speculation_length", speculation_length, least=1, error=ConfigError)
        self._drafts: dict[int, tuple[BlockTable, int]] = {}  # sequence -> its table, its length before the drafts

    def allocate_speculative_blocks(
        self, sequence_id: int, base_sequence_length: int, num_tokens: int | None = None
    ) -> list[int]:
        """Reserve room for `num_tokens` drafts (by default the speculation length); return their blocks.

        The sequence must hold `base_sequence_length` tokens and no unverified drafts. Raises `OutOfBlocksError` with
        nothing changed.
        """
        with self._blocks.lock:
            table = self._blocks.table(sequence_id)
            if self._is_drafting(sequence_id):
                raise CacheError(f"sequence {sequence_id} has unverified drafts: verify or reject them first")
            if table.num_tokens != whole("base_sequence_length", base_sequence_length):
                raise CacheError(f"sequence {sequence_id} holds {table.num_tokens} tokens, not {base_sequence_length}")
            drafts = self._speculation_length if num_tokens is None else whole("num_tokens", num_tokens)
            self._blocks.append(sequence_id, drafts)
            self._drafts[sequence_id] = table, base_sequence_length
            return self._draft_blocks(table, base_sequence_length)

    def verify_speculation(self, sequence_id: int, verified_tokens: int) -> tuple[list[int], list[int]]:
        """Keep the first `verified_tokens` drafts; return their blocks, and the blocks freed."""
        with self._blocks.lock:
            if not self._is_drafting(sequence_id):
                raise CacheError(f"sequence {sequence_id} has no drafts to verify")
            table, base = self._drafts[sequence_id]
            drafted = table.num_tokens - base
            if not 0 <= whole("verified_tokens", verified_tokens, least=None) <= drafted:
                raise CacheError(
                    f"{verified_tokens} drafts of sequence {sequence_id} cannot be verified: it has {drafted}"
                )
            del self._drafts[sequence_id]
            freed = self._blocks.truncate(sequence_id, base + verified_tokens)
            return self._draft_blocks(table, base), freed

    def reject_all_speculation(self, sequence_id: int) -> list[int]:
        """Truncate to the length before the drafts; return the blocks freed."""
        return self.verify_speculation(sequence_id, 0)[1]

    def forget(self, sequence_id: int) -> None:
        """Remove the record of a sequence whose table is released with its drafts: it ended, or was preempted."""
        self._drafts.pop(sequence_id, None)

    def _is_drafting(self, sequence_id: int) -> bool:
        """Whether the sequence's present table has drafts; the record of a released table is removed."""
        if whole("a sequence id", sequence_id, least=None) not in self._drafts:
            return False
        if self._blocks.has_table(sequence_id) and self._blocks.table(sequence_id) is self._drafts[sequence_id][0]:
            return True
        del self._drafts[sequence_id]
        return False

    def _draft_blocks(self, table: BlockTable, base: int) -> list[int]:
        """Blocks that hold tokens from `base` on."""
        return table.block_ids[base // table.block_size :] if table.num_tokens > base else []


def _checked_pairs(forks: Any) -> list[tuple[int, int]]:
    """Pairs (parent, child) of ids whose children differ."""
    try:
        pairs = [(parent, child) for parent, child in forks]
    except (TypeError, ValueError):
        raise CacheError("forks are pairs of a parent and a child") from None
    parents = whole_ids("parents of beams", [parent for parent, _ in pairs])
    children = distinct_ids("children of beams", [child for _, child in pairs])
    return list(zip(parents, children, strict=True))
