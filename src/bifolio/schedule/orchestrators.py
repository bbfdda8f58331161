"""Bookkeeping of the two phases: which blocks a pass will write, and attention over those that are there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.block_table import BlockTable
from bifolio.errors import OutOfBlocksError, PhaseError
from bifolio.kernels.interface import Array, AttentionPhase
from bifolio.kernels.paged import LayerAttention, paged_segment
from bifolio.sequence import Sequence


class PrefillOrchestrator:
    """Prompt tokens, many at a time: reserve all blocks of a pass before it runs, or none."""

    def __init__(self, block_manager: KVCacheBlockManager, block_table: BlockTable | None = None) -> None:
        self.blocks = block_manager
        self.table = block_table or BlockTable(block_manager)

    def prefill_allocate_blocks(self, sequence_id: int, prompt_length: int) -> list[int]:
        """Blocks for a whole prompt, all or nothing; the row is opened if the sequence has none."""
        if prompt_length < 1:
            raise PhaseError(f"sequence {sequence_id}: a prompt has at least one token, not {prompt_length}")
        with self.blocks.lock:
            needed, free = self.blocks.blocks_for(prompt_length), self.blocks.num_free_blocks
            if not self.blocks.has_row(sequence_id):
                if needed > free:
                    raise OutOfBlocksError(f"prefill of sequence {sequence_id} needs {needed} blocks, {free} are free")
                self.blocks.open_row(sequence_id)
            held = self.blocks.row_num_tokens(sequence_id)
            if held:
                raise PhaseError(f"sequence {sequence_id} already holds {held} tokens: prefill comes first")
            self.blocks.append(sequence_id, prompt_length)
            return self.blocks.row_block_ids(sequence_id)

    def reserve_chunk(self, sequence: Sequence, limit: int) -> int:
        """Reserve slots for the next chunk, at most `limit` tokens; 0 when blocks lack (nothing changed)."""
        num_new = min(sequence.num_uncomputed, limit)
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
        contexts = {}
        for sequence_id, query in queries.items():
            start, end = ranges[sequence_id]
            if end - start != query.shape[0] or start < 0:
                raise PhaseError(
                    f"sequence {sequence_id}: {query.shape[0]} queries do not fill tokens [{start}, {end})"
                )
            contexts[sequence_id] = end
        return _attend(self.blocks, self.table, queries, contexts, kernel, AttentionPhase.PREFILL)


class DecodeOrchestrator:
    """One token of every running sequence: a new block when the last is full, a copy when it is shared."""

    def __init__(self, block_manager: KVCacheBlockManager, block_table: BlockTable | None = None) -> None:
        self.blocks = block_manager
        self.table = block_table or BlockTable(block_manager)

    def allocate_decode_block(self, sequence_id: int, current_length: int) -> int | None:
        """Make room for the token after `current_length`; the new block's id, or None if the last had room."""
        with self.blocks.lock:
            held = self.blocks.row_num_tokens(sequence_id)
            if held != current_length:
                raise PhaseError(f"sequence {sequence_id} holds {held} tokens, not {current_length}")
            before = set(self.blocks.row_block_ids(sequence_id))
            self.blocks.append(sequence_id, 1)
            last = self.blocks.row_block_ids(sequence_id)[-1]
            return None if last in before else last

    def reserve(self, appends: list[tuple[int, int]]) -> bool:
        """Slots for (sequence id, number of tokens) of a whole step, all or nothing."""
        return self.blocks.try_append_many(appends)

    def compute_decode_attention(
        self, query: Array, sequence_id: int, current_length: int, kernel: LayerAttention
    ) -> Array:
        """The query of the newest token, at position `current_length`, over the whole context."""
        return self.batch_decode({sequence_id: query}, {sequence_id: current_length}, kernel)[sequence_id]

    def batch_decode(
        self, queries: Mapping[int, Array], lengths: Mapping[int, int], kernel: LayerAttention
    ) -> dict[int, Array]:
        """One query a sequence (or one and its drafts), all sequences in one kernel call."""
        contexts = {sequence_id: lengths[sequence_id] + query.shape[0] for sequence_id, query in queries.items()}
        return _attend(self.blocks, self.table, queries, contexts, kernel, AttentionPhase.DECODE)


def _attend(
    blocks: KVCacheBlockManager,
    table: BlockTable,
    queries: Mapping[int, Array],
    contexts: Mapping[int, int],
    kernel: LayerAttention,
    phase: AttentionPhase,
) -> dict[int, Array]:
    ids = list(queries)
    for sequence_id in ids:
        held = blocks.row_num_tokens(sequence_id)
        if held < contexts[sequence_id]:
            raise PhaseError(f"sequence {sequence_id} has slots for {held} tokens, not for {contexts[sequence_id]}")
    query_lens = [int(queries[i].shape[0]) for i in ids]
    segment = paged_segment(phase, query_lens, [contexts[i] for i in ids], table.as_array(ids))
    packed = np.concatenate if isinstance(queries[ids[0]], np.ndarray) else _torch_concatenate
    output = kernel.compute_paged_attention(packed([queries[i] for i in ids]), segment)
    starts = segment.query_starts
    return {sequence_id: output[int(starts[i]) : int(starts[i + 1])] for i, sequence_id in enumerate(ids)}


def _torch_concatenate(arrays: list[Array]) -> Array:
    import torch

    return torch.cat(arrays)
