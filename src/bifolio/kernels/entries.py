"""`EntryOperations`, written once for numpy arrays and torch tensors.

Queries and entries are computed from rows that are gathered for each of them, so the results of a query depend on its
position and its sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bifolio.arrays import array_namespace
from bifolio.errors import PhaseError
from bifolio.kernels.attention_interface import AttentionPhase, AttentionSegment, AttentionShape, Heads, Storage
from bifolio.kernels.batch import Batch
from bifolio.kernels.entry_interface import Compressor, StreamMix
from bifolio.kernels.host_math import as_float32
from bifolio.kernels.host_routing import expert_scores, weighed
from bifolio.kernels.operands import Array, Router, Routing

if TYPE_CHECKING:
    from bifolio.kernels.interface import KernelSet
    from bifolio.kernels.operations import Rotation

MOST_VALUES = 1 << 24  # of the keys that are gathered at once


# -- mixed streams ----------------------------------------------------------------------------------------------------
def stream_weights(logits: Array, mix: StreamMix) -> Array:
    xp, n = array_namespace(logits), mix.count
    logits = as_float32(xp, logits)
    pre = _sigmoid(xp, logits[:, :n] * mix.scale[0] + mix.base[:n]) + mix.eps
    if mix.base.shape[0] == n:
        return pre
    post = 2 * _sigmoid(xp, logits[:, n : 2 * n] * mix.scale[1] + mix.base[n : 2 * n])
    mixing = xp.reshape(logits[:, 2 * n :] * mix.scale[2] + mix.base[2 * n :], (-1, n, n))
    mixing = xp.exp(mixing - xp.max(mixing, axis=-1, keepdims=True))
    mixing = mixing / xp.sum(mixing, axis=-1, keepdims=True) + mix.eps
    for turn in range(2 * mix.iterations - 1):
        mixing = mixing / (xp.sum(mixing, axis=-2 if turn % 2 == 0 else -1, keepdims=True) + mix.eps)
    transposed = xp.reshape(xp.permute_dims(mixing, (0, 2, 1)), (-1, n * n))
    return xp.concat([pre, post, transposed], axis=-1)


def _sigmoid(xp: Any, x: Array) -> Array:
    return 0.5 * (1.0 + xp.tanh(0.5 * x))


# -- rope -------------------------------------------------------------------------------------------------------------
def turn_ends(x: Array, rotation: Rotation, size: int, back: bool) -> Array:
    xp = array_namespace(x)
    rotated = 2 * rotation.cos.shape[-1]
    heads = xp.reshape(x, (x.shape[0], -1, size))
    cos, sin = rotation.cos[:, None, :], rotation.sin[:, None, :]
    sin = -sin if back else sin
    pairs = heads[..., size - rotated :]
    first, second = pairs[..., 0::2], pairs[..., 1::2]
    turned = xp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = xp.astype(xp.reshape(turned, pairs.shape), x.dtype)
    return xp.reshape(xp.concat([heads[..., : size - rotated], turned], axis=-1), x.shape)


# -- sequences --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Queries:
    """The tokens of one sequence in a pass."""

    start: int  # rows of the batch
    stop: int
    before: int  # tokens of the sequence in front of them
    table: Array | None  # i32[blocks] of the sequence; None: there is no cache

    def rows_at(self, rows: Array, layer: int, storage: Storage | None, positions: NDArray[np.int64]) -> Array:
        """Rows at positions of the sequence [*positions, columns]; `rows` are those of this pass."""
        if storage is None or self.table is None:
            return rows[_beside(rows, self.start + positions)]
        return storage.keys_at(layer, self.table, _beside(rows, positions))[..., 0, :]

    def ends(self, tokens: int) -> NDArray[np.int64]:
        """The positions of these tokens at which runs of `tokens` end."""
        stop = self.before + self.stop - self.start
        return np.arange(self.before // tokens, stop // tokens) * tokens + tokens - 1


def sequences_of(segments: tuple[AttentionSegment, ...]) -> Iterator[Queries]:
    for segment in segments:
        if segment.block_tables is None and segment.phase is AttentionPhase.DECODE:
            raise PhaseError("decode reads the cache: pass a storage and block tables")
        starts = np.asarray(segment.query_starts).astype(np.int64)
        before = np.asarray(segment.context_lens).astype(np.int64) - np.diff(starts)
        for number in range(segment.num_sequences):
            first, last = (segment.token_start + int(starts[number + side]) for side in (0, 1))
            table = None if segment.block_tables is None else segment.block_tables[number]
            yield Queries(first, last, int(before[number]), table)


def _beside(x: Array, array: NDArray[Any]) -> Array:
    """The array beside `x`, on its device."""
    return array if isinstance(x, np.ndarray) else array_namespace(x).asarray(array, device=x.device)


def write_rows(rows: Array, layer: int, batch: Batch, storage: Storage | None) -> None:
    if storage is not None and batch.cache_index is not None:
        storage.write(layer, batch.cache_index, rows[:, None, :], rows[:, None, :])


# -- entries ----------------------------------------------------------------------------------------------------------
def compress(kernels: KernelSet, rows: Array, own: Compressor, batch: Batch, storage: Storage | None) -> Array:
    xp = array_namespace(rows)
    write_rows(rows, own.layer, batch, storage)
    places, found = [], []
    for part in sequences_of(batch.segments):
        ends = part.ends(own.tokens)
        if len(ends):
            places.append(part.start + ends - part.before)
            found.append(_entries_at(kernels, rows, own, part, storage, ends))
    entries = xp.zeros((rows.shape[0], own.size), dtype=rows.dtype, **_device_of(rows))
    if places:
        entries[_beside(rows, np.concatenate(places))] = xp.astype(xp.concat(found, axis=0), rows.dtype)
    write_rows(entries, own.layer + 1, batch, storage)
    return entries


def _entries_at(
    kernels: KernelSet, rows: Array, own: Compressor, part: Queries, storage: Storage | None, ends: NDArray[np.int64]
) -> Array:
    """The entries that end at these positions: [n, size]."""
    xp, starts = array_namespace(rows), ends - own.tokens + 1
    positions = starts[:, None] + np.arange(-own.tokens if own.overlaps else 0, own.tokens)
    stored = as_float32(xp, part.rows_at(rows, own.layer, storage, np.maximum(positions, 0)))
    values, gates = stored[..., : own.columns], stored[..., own.columns :]
    if own.overlaps:
        values = xp.concat([values[:, : own.tokens, : own.size], values[:, own.tokens :, own.size :]], axis=1)
        gates = gates + xp.concat([own.bias, own.bias], axis=0)
        gates = xp.concat([gates[:, : own.tokens, : own.size], gates[:, own.tokens :, own.size :]], axis=1)
        is_missing = _beside(rows, positions < 0)[..., None]
        gates = xp.where(is_missing, xp.full_like(gates, -np.inf), gates)
    else:
        gates = gates + own.bias
    shares = xp.exp(gates - xp.max(gates, axis=1, keepdims=True))
    mean = xp.sum(shares * values, axis=1) / xp.sum(shares, axis=1)
    places = _beside(rows, starts.astype(np.int32))
    rotation = kernels.rotation(own.inverse_frequencies, own.rope_scale, places)
    return kernels.turn_ends(kernels.norm(mean, own.norm), rotation, own.size)


def _device_of(x: Array) -> dict[str, Any]:
    return {} if isinstance(x, np.ndarray) else {"device": x.device}


# -- the choice of an indexer -----------------------------------------------------------------------------------------
def choose_entries(
    query: Array,
    weights: Array,
    entries: Array,
    own: Compressor,
    shape: AttentionShape,
    batch: Batch,
    storage: Storage | None,
) -> Array:
    xp = array_namespace(query)
    heads = xp.reshape(as_float32(xp, query), (-1, shape.num_heads, shape.head_dim))
    found = xp.full((query.shape[0], shape.top_k), -1, dtype=xp.int32, **_device_of(query))
    for part in sequences_of(batch.segments):
        seen = (part.before + 1 + np.arange(part.stop - part.start)) // own.tokens
        if not len(seen) or seen[-1] <= shape.top_k:
            continue
        ends = np.arange(seen[-1]) * own.tokens + own.tokens - 1
        keys = as_float32(xp, part.rows_at(entries, own.layer + 1, storage, ends))
        for row, count in zip(range(part.start, part.stop), seen.tolist(), strict=True):
            if count <= shape.top_k:
                continue
            scores = xp.clip(heads[row] @ keys[:count].T * shape.scale, 0.0, None)
            found[row] = xp.astype(_largest(xp, as_float32(xp, weights[row]) @ scores, shape.top_k), xp.int32)
    return found


def _largest(xp: Any, scores: Array, count: int) -> Array:
    """The places of the largest scores, ascending; of equal ones the first. NaN is the least."""
    if isinstance(scores, np.ndarray):
        return np.sort(np.argsort(-scores, kind="stable")[:count])
    return xp.sort(xp.argsort(-scores, stable=True)[:count])


# -- attention --------------------------------------------------------------------------------------------------------
def attend_entries(
    kernels: KernelSet,
    query: Array,
    key: Array,
    entries: Array | None,
    chosen: Array | None,
    own: Compressor | None,
    shape: AttentionShape,
    batch: Batch,
    storage: Storage | None,
    attend_rows: Any = None,
) -> Array:
    """`attend_rows` attends to keys that were gathered for each query."""
    xp = array_namespace(query)
    heads = xp.reshape(query, (-1, shape.num_heads, shape.head_dim))
    write_rows(key, shape.layer, batch, storage)
    if own is None or entries is None:
        return kernels.attend(Heads(heads, key[:, None, :], key[:, None, :]), shape, batch.segments, storage)
    numbers = None if chosen is None else np.asarray(kernels.to_host(chosen))
    mixed = []
    for part in sequences_of(batch.segments):
        for piece in _pieces(part, own, shape, 0 if numbers is None else numbers.shape[1]):
            keys, lengths = _keys_of(key, entries, numbers, own, shape, piece, part, storage)
            mixed.append((attend_rows or attend_gathered)(heads[piece.start : piece.stop], keys, lengths, shape))
    return xp.astype(xp.concat(mixed, axis=0), query.dtype)


def _pieces(part: Queries, own: Compressor, shape: AttentionShape, top_k: int) -> Iterator[Queries]:
    """The queries of a sequence in pieces whose keys are gathered at once."""
    seen = (part.before + part.stop - part.start) // own.tokens
    longest = (shape.window or 0) + (min(top_k, seen) if top_k else seen)
    size = max(MOST_VALUES // (longest * shape.head_dim), 1)
    for start in range(part.start, part.stop, size):
        yield replace(part, start=start, stop=min(start + size, part.stop), before=part.before + start - part.start)


def _keys_of(
    key: Array,
    entries: Array,
    chosen: NDArray[np.int32] | None,
    own: Compressor,
    shape: AttentionShape,
    piece: Queries,
    part: Queries,
    storage: Storage | None,
) -> tuple[Array, NDArray[np.int32]]:
    """The keys of each query [n, longest, dim], those of its window and then entries, and how many they are."""
    xp, window = array_namespace(key), shape.window or 0
    ends = piece.before + 1 + np.arange(piece.stop - piece.start)  # tokens that each query sees
    oldest = max(int(ends[0]) - window, 0)
    seen = [_entries_seen(int(end) // own.tokens, row, chosen) for row, end in enumerate(ends, start=piece.start)]
    used = np.unique(np.concatenate(seen))
    places = [
        np.concatenate([np.arange(max(end - window, 0), end) - oldest, ends[-1] - oldest + np.searchsorted(used, some)])
        for end, some in zip(ends.tolist(), seen, strict=True)
    ]
    lengths = np.array([len(each) for each in places], np.int32)
    index = np.zeros((len(places), lengths.max()), np.int64)
    for number, each in enumerate(places):
        index[number, : len(each)] = each
    rows = part.rows_at(key, shape.layer, storage, np.arange(oldest, ends[-1]))
    if len(used):
        added = part.rows_at(entries, own.layer + 1, storage, used * own.tokens + own.tokens - 1)
        rows = xp.concat([rows, added], axis=0)
    return rows[_beside(key, index)], lengths


def _entries_seen(count: int, row: int, chosen: NDArray[np.int32] | None) -> NDArray[np.int64]:
    """The numbers of the entries that a query attends to, of the `count` that it sees."""
    if chosen is None or not len(chosen[row]) or chosen[row][0] < 0:
        return np.arange(count)
    found: NDArray[np.int64] = chosen[row].astype(np.int64)
    return found


def attend_gathered(query: Array, keys: Array, lengths: NDArray[np.int32], shape: AttentionShape) -> Array:
    """Attention of each query [n, heads, dim] to the first of its keys [n, longest, dim], which are the values."""
    xp = array_namespace(query)
    query, keys = as_float32(xp, query), as_float32(xp, keys)
    scores = query * shape.scale @ xp.permute_dims(keys, (0, 2, 1))  # [n, heads, longest]
    is_seen = _beside(query, np.arange(keys.shape[1]) < lengths[:, None])[:, None, :]
    scores = xp.where(is_seen, scores, xp.full_like(scores, -np.inf))
    own: Array = shape.sinks
    sinks = xp.broadcast_to(own[None, :, None], (*scores.shape[:2], 1))
    shares = xp.concat([scores, as_float32(xp, sinks)], axis=-1)
    shares = xp.exp(shares - xp.max(shares, axis=-1, keepdims=True))
    shares = shares / xp.sum(shares, axis=-1, keepdims=True)
    return xp.reshape(shares[..., :-1] @ keys, (query.shape[0], -1))


# -- experts ----------------------------------------------------------------------------------------------------------
def route_by_token(logits: Array, router: Router, table: Array, ids: Array) -> Routing:
    xp = array_namespace(logits)
    experts = table[ids]
    return weighed(xp, experts, expert_scores(xp, as_float32(xp, logits), router.scoring), router)


def take_identities(x: Array, routing: Routing, count: int) -> tuple[Routing, Array]:
    xp = array_namespace(routing.weights)
    kept = xp.astype(routing.experts < count, routing.weights.dtype)
    share = xp.sum(routing.weights * (1 - kept), axis=-1, keepdims=True)
    experts = routing.experts * xp.astype(kept, routing.experts.dtype)
    return Routing(experts, routing.weights * kept, routing.shared), as_float32(xp, x) * share


class Entries:
    """The operations as members of a kernel set."""

    def stream_weights(self, logits: Array, mix: StreamMix) -> Array:
        return stream_weights(logits, mix)

    def turn_ends(self, x: Array, rotation: Rotation, size: int, *, back: bool = False) -> Array:
        return turn_ends(x, rotation, size, back)

    def compress(self: Any, rows: Array, compressor: Compressor, batch: Batch, storage: Storage | None) -> Array:
        return compress(self, rows, compressor, batch, storage)

    def choose_entries(
        self,
        query: Array,
        weights: Array,
        entries: Array,
        compressor: Compressor,
        shape: AttentionShape,
        batch: Batch,
        storage: Storage | None,
    ) -> Array:
        return choose_entries(query, weights, entries, compressor, shape, batch, storage)

    def attend_entries(
        self: Any,
        query: Array,
        key: Array,
        entries: Array | None,
        chosen: Array | None,
        compressor: Compressor | None,
        shape: AttentionShape,
        batch: Batch,
        storage: Storage | None,
    ) -> Array:
        return attend_entries(self, query, key, entries, chosen, compressor, shape, batch, storage)

    def take_identities(self, x: Array, routing: Routing, count: int) -> tuple[Routing, Array]:
        return take_identities(x, routing, count)

    def route_by_token(self, logits: Array, router: Router, table: Array, ids: Array) -> Routing:
        return route_by_token(logits, router, table, ids)
