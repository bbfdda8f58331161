"""Attention over the paged cache: the constants of a layer, the segments of a batch, and the protocol of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

from bifolio.kernels.operands import Array, Norm
from bifolio.kernels.storage import KVStorage

Storage = KVStorage


class AttentionPhase(Enum):
    """The phase of a segment: it selects the attention kernel."""

    PREFILL = "prefill"  # many queries per sequence: bound by compute
    DECODE = "decode"  # one query (and drafts) per sequence: bound by bandwidth


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The constants of one attention layer."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # tokens a query sees, itself included; None: all
    rope_interleaved: bool = False
    query_norm: Norm | None = None  # of head_dim: for each head; wider: one for all heads of a token
    key_norm: Norm | None = None
    value_norm: Norm | None = None  # of head_dim
    norm_after_rope: bool = False
    queries_only: bool = False  # keys and values are those of another layer: `layer` is read and not written
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: off
    temperature: float = 0.0  # queries at position p grow by 1 + temperature * log(1 + p // temperature_period)
    temperature_period: int = 1
    temperature_start: int = 0  # added to the positions that the temperature counts
    in_chunks: bool = False  # a query sees the positions from the last multiple of `window` on
    slopes: Array | None = None  # f32[num_heads]  scores fall by slope * distance (ALiBi)
    sinks: Array | None = None  # f32[num_heads]  score of a position without a value that every query sees
    bidirectional: bool = False  # queries see the tokens after them, too; a window reaches as far in both directions
    causal: bool = False  # queries see no later token in segments that are not causal, either
    top_k: int = 0  # positions that an indexer chooses for a query (`choose`, `attend_chosen`); 0: all that it sees
    has_entries: bool = False  # of a network with compressed entries (`attend_entries`): passes are not recorded
    has_identities: bool = False  # of a network with `take_identities`: a CPU records no passes
    bias: Array | None = None  # f32[num_heads, 2 * r + 1]  added to scores, by the key's position minus the query's:
    #                            column r is the distance 0; distances beyond r have the bias of r

    @property
    def reach(self) -> int:
        """The window as one number: 0 without one, below 0 for chunks, whose length it is."""
        window = self.window or 0
        return -window if self.in_chunks else window

    def is_causal(self, segment: AttentionSegment) -> bool:
        """Whether queries of a segment see no later token."""
        return self.causal or segment.causal


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """Consecutive tokens of one phase: whole sequences, one after the other."""

    phase: AttentionPhase
    token_start: int
    token_end: int
    query_starts: Array  # i32[s + 1]  start of each sequence's queries, relative to token_start
    context_lens: Array  # i32[s]      tokens visible to the last query of the sequence, itself included
    block_tables: Array | None  # i32[s, max_blocks]  padded with block 0; None: no cache (training)
    fresh: bool  # no sequence has tokens before its queries: the cache is written but not read
    max_query_len: int
    max_context_len: int
    causal: bool = True  # False: every query sees the whole context of its sequence, from the start of its window on

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])


Segments = tuple[AttentionSegment, ...]  # of a batch


class Heads(NamedTuple):
    """Queries, keys and values of a batch, rotated and split into heads."""

    query: Array  # [t, num_heads, head_dim]
    key: Array  # [t, num_kv_heads, head_dim]; None, as the value: they are in the cache
    value: Array


class PagedAttentionKernel(Protocol):
    """Attention of one segment's queries over their paged context."""

    def attend(self, heads: Heads, shape: AttentionShape, segments: Segments, storage: Storage | None) -> Array:
        """[t, num_heads * head_dim]: causal or bidirectional, grouped heads, optional window."""
        ...

    def choose(
        self, heads: Heads, weights: Array, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> Array:
        """The positions that the heads of an indexer choose for each query: i32[t, shape.top_k], ascending.

        They are those of the largest scores up to the query's own position, of equal scores the first:

            score[j] = sum over heads of weights[head] * max(0, scale * query[head] . key[j])

        heads: one head of keys, as `rope_and_write` returns them; weights: [t, num_heads]. The row of a query that sees
        at most top_k positions is -1: it attends to all of them.
        """
        ...

    def attend_chosen(
        self, heads: Heads, chosen: Array, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> Array:
        """`attend`, where a query that sees more than `shape.top_k` positions attends to the chosen ones alone.

        There is one head of keys, which are the values. All other queries have the results of `attend`.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """A kernel with one layer's constants and the cache it reads."""

    kernel: PagedAttentionKernel
    shape: AttentionShape
    storage: Storage

    def compute_paged_attention(self, query: Array, segment: AttentionSegment) -> Array:
        """Queries [t, num_heads, head_dim] over the cached context of their sequences: [t, num_heads * head_dim]."""
        cached = replace(segment, fresh=False)  # keys and values are already in the cache
        return self.kernel.attend(Heads(query, None, None), self.shape, (cached,), self.storage)
