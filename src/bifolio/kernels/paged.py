"""Attention of one layer, bound to its storage: what the orchestrators of both phases call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bifolio.kernels.interface import (
    Array,
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Heads,
    PagedAttentionKernel,
    Storage,
)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """A kernel with its layer's constants and the cache it reads."""

    kernel: PagedAttentionKernel
    shape: AttentionShape
    storage: Storage

    def compute_paged_attention(self, query: Array, segment: AttentionSegment) -> Array:
        """Queries [t, num_heads, head_dim] over the cached context of their sequences: [t, num_heads * head_dim]."""
        return self.kernel.attend(Heads(query, None, None), self.shape, (segment,), self.storage)


def paged_segment(
    phase: AttentionPhase,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: np.ndarray,  # i32[s, max_blocks]
    token_start: int = 0,
) -> AttentionSegment:
    """A segment whose sequences all read their context from the cache."""
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return AttentionSegment(
        phase=phase,
        token_start=token_start,
        token_end=token_start + int(starts[-1]),
        query_starts=starts,
        context_lens=np.asarray(context_lens, dtype=np.int32),
        block_tables=block_tables,
        fresh=False,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
