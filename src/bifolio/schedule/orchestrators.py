"""The bookkeeping of both phases: reserve the blocks that a pass writes, and lay out its attention segment.

`lay_out` describes the queries of a phase for the kernels. The engine's steps (`HostBatch`), `batch_prefill` and
`batch_decode` all use it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bifolio.arrays import array_namespace
from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.counts import whole
from bifolio.errors import OutOfBlocksError, PhaseError
from bifolio.kernels.interface import Array, AttentionPhase, AttentionSegment, LayerAttention
from bifolio.sequence import Sequence


class _Orchestrator:
    """Common to both phases."""

    phase: AttentionPhase

    def __init__(self, block_manager: KVCacheBlockManager) -> None:
        self.blocks = block_manager

    @classmethod
    def lay_out(
        cls,
        starts: np.ndarray,  # i32[s]  position of each sequence's first query
        lengths: np.ndarray,  # i32[s]  queries of each sequence
        block_tables: Array | None,  # i32[s, max_blocks]  None: nothing is cached
        token_start: int = 0,
        causal: bool = True,
    ) -> AttentionSegment:
        """The segment of this phase: queries [start, start + length) of each sequence over [0, start + length)."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        contexts = (starts + lengths).astype(np.int32)
        return AttentionSegment(
            phase=cls.phase,
            token_start=token_start,
            token_end=token_start + int(offsets[-1]),
            query_starts=offsets,
            context_lens=contexts,
            block_tables=block_tables,
            fresh=cls.phase is AttentionPhase.PREFILL and not starts.any(),
            max_query_len=int(lengths.max()),
            max_context_len=int(contexts.max()),
            causal=causal,
        )

    def _attend(
        self, queries: Mapping[int, Array], starts: Mapping[int, int], kernel: LayerAttention
    ) -> dict[int, Array]:
        """Attention of several sequences' queries, from their start positions on, packed into one kernel call."""
        ids = list(queries)
        if not ids:
            return {}
        lengths = np.array([int(queries[i].shape[0]) for i in ids], dtype=np.int32)
        first = np.array([starts[i] for i in ids], dtype=np.int32)
        for sequence_id, end in zip(ids, (first + lengths).tolist(), strict=True):
            held = self.blocks.num_tokens_of(sequence_id)
            if held < end:
                raise PhaseError(f"sequence {sequence_id} has room for {held} tokens, not for {end}")
        segment = self.lay_out(first, lengths, self.blocks.tables_array(ids))
        packed = array_namespace(queries[ids[0]]).concat([queries[i] for i in ids], axis=0)
        output = kernel.compute_paged_attention(packed, segment)
        bounds = segment.query_starts.tolist()
        return {sequence_id: output[bounds[i] : bounds[i + 1]] for i, sequence_id in enumerate(ids)}


class PrefillOrchestrator(_Orchestrator):
    """Prompt tokens, many at a time: reserve all blocks of a pass before it runs, or none."""

    phase = AttentionPhase.PREFILL

    def prefill_allocate_blocks(self, sequence_id: int, prompt_length: int) -> list[int]:
        """Blocks for a whole prompt, all or nothing; a table is opened if the sequence has none."""
        if whole("the length of a prompt", prompt_length, least=None, error=PhaseError) < 1:
            raise PhaseError(f"sequence {sequence_id}: a prompt has at least one token, not {prompt_length}")
        with self.blocks.lock:
            needed, free = self.blocks.blocks_for(prompt_length), self.blocks.num_free_blocks
            if not self.blocks.has_table(sequence_id):
                if needed > free:
                    raise OutOfBlocksError(f"prefill of sequence {sequence_id} needs {needed} blocks, {free} are free")
                self.blocks.open_table(sequence_id)
            held = self.blocks.num_tokens_of(sequence_id)
            if held:
                raise PhaseError(f"sequence {sequence_id} already holds {held} tokens: prefill needs an empty sequence")
            self.blocks.append(sequence_id, prompt_length)
            return self.blocks.block_ids_of(sequence_id)

    def reserve_chunk(self, sequence: Sequence, limit: int) -> int:
        """Reserve the next chunk, at most `limit` tokens; 0, with nothing changed, when too few blocks are free."""
        num_new = min(sequence.num_uncomputed, whole("a limit of tokens", limit, error=PhaseError))
        return num_new if self.blocks.try_append(sequence.id, num_new) else 0

    def compute_prefill_attention(
        self, query: Array, sequence_id: int, start_token: int, end_token: int, kernel: LayerAttention
    ) -> Array:
        """Queries of tokens [start, end) over the context [0, end), each up to its own position."""
        return self.batch_prefill({sequence_id: query}, {sequence_id: (start_token, end_token)}, kernel)[sequence_id]

    def batch_prefill(
        self, queries: Mapping[int, Array], ranges: Mapping[int, tuple[int, int]], kernel: LayerAttention
    ) -> dict[int, Array]:
        """Several sequences packed into one kernel call, without padding."""
        for sequence_id, query in queries.items():
            start, end = _range_of(sequence_id, ranges)
            if end - start != query.shape[0]:
                raise PhaseError(
                    f"sequence {sequence_id}: {query.shape[0]} queries do not fill tokens [{start}, {end})"
                )
        return self._attend(queries, {sequence_id: ranges[sequence_id][0] for sequence_id in queries}, kernel)


class DecodeOrchestrator(_Orchestrator):
    """One token of every running sequence: a new block when the last is full, a move when it is shared."""

    phase = AttentionPhase.DECODE

    def allocate_decode_block(self, sequence_id: int, current_length: int) -> int | None:
        """Reserve the token after `current_length`; the new block's id, or None if the last block had room."""
        with self.blocks.lock:
            held = self.blocks.num_tokens_of(sequence_id)
            if held != whole("current_length", current_length, error=PhaseError):
                raise PhaseError(f"sequence {sequence_id} holds {held} tokens, not {current_length}")
            before = set(self.blocks.block_ids_of(sequence_id))
            self.blocks.append(sequence_id, 1)
            last = self.blocks.block_ids_of(sequence_id)[-1]
            return None if last in before else last

    def reserve(self, sequence_ids: list[int]) -> bool:
        """Reserve one token of each of these sequences, all or nothing."""
        return self.blocks.try_append_each(sequence_ids)

    def compute_decode_attention(
        self, query: Array, sequence_id: int, current_length: int, kernel: LayerAttention
    ) -> Array:
        """The query of the newest token, at position `current_length`, over the whole context."""
        return self.batch_decode({sequence_id: query}, {sequence_id: current_length}, kernel)[sequence_id]

    def batch_decode(
        self, queries: Mapping[int, Array], lengths: Mapping[int, int], kernel: LayerAttention
    ) -> dict[int, Array]:
        """One query per sequence (with its drafts), all sequences in one kernel call."""
        for sequence_id in queries:
            if sequence_id not in lengths:
                raise PhaseError(f"sequence {sequence_id} has queries and no length: pass its number of tokens")
            whole(f"the length of sequence {sequence_id}", lengths[sequence_id], error=PhaseError)
        return self._attend(queries, {sequence_id: lengths[sequence_id] for sequence_id in queries}, kernel)


def _range_of(sequence_id: int, ranges: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """[start, end) of a sequence's queries, checked."""
    if sequence_id not in ranges:
        raise PhaseError(f"sequence {sequence_id} has queries and no range: pass (start, end) of its tokens")
    try:
        start, end = ranges[sequence_id]
    except (TypeError, ValueError):
        raise PhaseError(f"the range of sequence {sequence_id} is a pair (start, end)") from None
    start, end = (whole(f"the range of sequence {sequence_id}", edge, error=PhaseError) for edge in (start, end))
    return start, end
