"""Operations on compressed entries and mixed streams, on torch tensors: deferred values are computed first."""

from __future__ import annotations

from typing import Any

from bifolio.kernels.entries import Entries
from bifolio.kernels.interface import (
    Array,
    AttentionShape,
    Batch,
    Compressor,
    Rotation,
    Router,
    Routing,
    Storage,
    StreamMix,
)
from bifolio.kernels.triton.lazy_fusion import tensor


class TensorEntries(Entries):
    """A part of the set for GPUs."""

    def stream_weights(self, logits: Array, mix: StreamMix) -> Array:
        return super().stream_weights(tensor(logits), mix)

    def turn_ends(self, x: Array, rotation: Rotation, size: int, *, back: bool = False) -> Array:
        return super().turn_ends(tensor(x), rotation, size, back=back)

    def compress(self: Any, rows: Array, compressor: Compressor, batch: Batch, storage: Storage | None) -> Array:
        return super().compress(tensor(rows), compressor, batch, storage)

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
        return super().choose_entries(tensor(query), tensor(weights), entries, compressor, shape, batch, storage)

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
        given = tensor(query), tensor(key), entries, chosen, compressor, shape, batch, storage
        return super().attend_entries(*given)

    def take_identities(self, x: Array, routing: Routing, count: int) -> tuple[Routing, Array]:
        return super().take_identities(tensor(x), routing, count)

    def route_by_token(self, logits: Array, router: Router, table: Array, ids: Array) -> Routing:
        return super().route_by_token(tensor(logits), router, table, ids)
