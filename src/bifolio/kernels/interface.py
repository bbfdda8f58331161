"""What a kernel set offers, and the data it is handed: one flat batch of tokens, cut into attention segments.

    tokens  |<- sequence 7 ->|<- sequence 9 ->|<------ chunk of sequence 12 ------>|
    segment |<------------- DECODE ---------->|<------------- PREFILL ------------>|

Matrix products run over all tokens at once; attention runs once per segment, specialised for its phase. The network
(`model/transformer.py`) is written with these verbs alone, so every kernel set runs the same network.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

Array = Any  # numpy array or torch tensor: the kernel set that allocates it knows


class AttentionPhase(Enum):
    """What a kernel call is for; each phase may have its own kernel."""

    PREFILL = "prefill"  # many queries per sequence: bound by compute
    DECODE = "decode"  # one query (and drafts) per sequence: bound by bandwidth


@dataclass(frozen=True, slots=True)
class Linear:
    """One or several matrices applied to the same input; the outputs lie side by side."""

    parts: tuple[QuantizedTensor | Array, ...]  # each [out_i, in]
    biases: tuple[Array | None, ...]  # each f32[out_i]
    prepared: Any = None  # what a kernel set made of it at load: packed, fused, on the device

    @property
    def out_features(self) -> int:
        return sum(int(part.shape[0]) for part in self.parts)

    @property
    def in_features(self) -> int:
        return int(self.parts[0].shape[1])


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or layer norm when `centered`."""

    weight: Array  # f32[d], the offset already added
    bias: Array | None
    eps: float
    centered: bool = False


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
    query_norm: Norm | None = None
    key_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """A run of tokens of one phase: whole sequences, one after the other."""

    phase: AttentionPhase
    token_start: int
    token_end: int
    query_starts: Array  # i32[s + 1]  where each sequence's queries begin, counted from token_start
    context_lens: Array  # i32[s]      tokens visible to the last query of the sequence, itself included
    block_tables: Array | None  # i32[s, max_blocks]  padded with block 0; None: nothing is cached (training)
    fresh: bool  # no sequence has anything before its queries: the cache is written but not read
    max_query_len: int
    max_context_len: int

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. Arrays are the kernel set's own."""

    token_ids: Array  # i32[t]
    positions: Array  # i32[t]  index of each token in its sequence
    slots: Array | None  # i64[t]  block * block_size + offset where K and V go; None: nothing is cached
    segments: tuple[AttentionSegment, ...]  # partition [0, t)
    logit_rows: Array | None  # i32[r]  tokens whose logits are wanted; None: all
    max_position: int = 0  # largest of `positions`

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


class Rotation(NamedTuple):
    """Cosine and sine for the tokens of a batch, computed once per pass."""

    cos: Array  # f32[t, rotary_dim / 2]
    sin: Array


class Heads(NamedTuple):
    """Queries, keys and values of a batch, rotated and split into heads."""

    query: Array  # [t, num_heads, head_dim]
    key: Array  # [t, num_kv_heads, head_dim]
    value: Array


class Storage(Protocol):
    """The K/V numbers as kernels see them (implemented by `cache.storage.KVStorage`)."""

    block_size: int
    keys: list[Array]  # per layer [num_blocks, num_kv_heads, block_size, head_dim]
    values: list[Array]

    def write(self, layer: int, slots: Array, keys: Array, values: Array) -> None: ...

    def gather(self, layer: int, block_ids: Array, length: int) -> tuple[Array, Array]: ...


class PagedAttentionKernel(Protocol):
    """Attention of one segment's queries over their paged context."""

    def attend(
        self, heads: Heads, shape: AttentionShape, segments: tuple[AttentionSegment, ...], storage: Storage | None
    ) -> Array:
        """[t, num_heads * head_dim]: causal, grouped heads, optional window."""
        ...


class KernelSet(PagedAttentionKernel, Protocol):
    """One implementation of every operation the network is made of."""

    name: str
    array_backend: str  # "numpy" or "torch": what arrays are
    device: str
    formats: frozenset[
        QuantFormat
    ]  # taken as they are by `prepare_linear` and `prepare_embedding`; others are converted

    def from_host(self, array: np.ndarray) -> Array: ...

    def to_host(self, array: Array) -> np.ndarray: ...

    def prepare_linear(self, linear: Linear) -> Linear:
        """Convert, repack, fuse or move the weights once, at load. Converted copies live only as long as it runs."""
        ...

    def prepare_norm(self, norm: Norm) -> Norm: ...

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any: ...

    def embed(self, table: Any, ids: Array, scale: float) -> Array:
        """Rows of a table: [t, d]."""
        ...

    def rotation(self, inverse_frequencies: Array, scale: float, positions: Array) -> Rotation: ...

    def norm(self, x: Array, norm: Norm) -> Array: ...

    def add(self, x: Array, y: Array) -> Array: ...

    def add_norm(self, x: Array, delta: Array, norm: Norm) -> tuple[Array, Array]:
        """(x + delta, norm of that): the residual stream and the next layer's input."""
        ...

    def linear(self, x: Array, linear: Linear) -> Array: ...

    def rope_and_write(
        self, qkv: Array, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        """Split into heads, norm and rotate queries and keys, write keys and values to the cache."""
        ...

    def act_mul(self, x: Array, activation: str) -> Array:
        """act(gate) * up for [t, 2 * ffn] holding gate and up side by side: [t, ffn]."""
        ...

    def act(self, x: Array, activation: str) -> Array: ...

    def take(self, x: Array, rows: Array) -> Array: ...

    def logits(self, x: Array, head: Linear, softcap: float) -> Array:
        """f32[r, vocab]."""
        ...
