"""The weights of attention to compressed entries, and of mixed residual streams, by role."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bifolio.kernels.interface import Array, AttentionShape, Compressor, HeadLinear, KernelSet, Linear, Norm, StreamMix
from bifolio.quant.tensor import QuantizedTensor

Matrix = QuantizedTensor | Array


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """The weights by which streams are mixed around a part of a layer, or at the end of the network."""

    norm: Norm  # over all streams of a token, without weights
    logits: Linear  # [(2 + streams) * streams, streams * d]; at the end [streams, streams * d]
    mix: StreamMix

    def prepared(self, kernels: KernelSet) -> HyperWeights:
        base, scale = kernels.from_host(np.asarray(self.mix.base)), kernels.from_host(np.asarray(self.mix.scale))
        return HyperWeights(
            kernels.prepare_norm(self.norm),
            kernels.prepare_linear(self.logits),
            replace(self.mix, base=base, scale=scale),
        )


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """The projections of tokens whose means are entries."""

    rows: Linear  # [columns, d] twice: rows that are averaged, and gates
    entries: Compressor

    def prepared(self, kernels: KernelSet) -> CompressorWeights:
        own = self.entries
        entries = replace(
            own,
            bias=kernels.from_host(np.asarray(own.bias)),
            norm=kernels.prepare_norm(own.norm),
            inverse_frequencies=kernels.from_host(np.asarray(own.inverse_frequencies)),
        )
        return CompressorWeights(kernels.prepare_linear(self.rows), entries)


@dataclass(frozen=True, slots=True)
class EntryIndexWeights:
    """The projections of an indexer, which chooses the entries that queries attend to."""

    shape: AttentionShape  # of its heads
    compressor: CompressorWeights
    query: Linear  # [heads * size, rank]  of the compressed query
    weights: Linear  # [heads, d]

    def linears(self) -> list[Linear]:
        return [self.compressor.rows, self.query, self.weights]

    def prepared(self, kernels: KernelSet) -> EntryIndexWeights:
        return replace(
            self,
            compressor=self.compressor.prepared(kernels),
            query=kernels.prepare_linear(self.query),
            weights=kernels.prepare_linear(self.weights),
        )


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """The projections around attention to compressed entries; the last one is the layer's `output`."""

    query_down: Linear  # [rank, d]
    query_norm: Norm
    query: Linear  # [heads * dim, rank]
    head_norm: Norm  # of dim, without weights
    key: Linear  # [dim, d]
    key_norm: Norm
    groups: HeadLinear  # [rank, heads of a group * dim] of each group
    compressor: CompressorWeights | None  # None: the layer has no entries
    index: EntryIndexWeights | None  # None: queries attend to all entries

    def matrices(self) -> list[Matrix]:
        linears = [self.query_down, self.query, self.key, *self.groups.heads]
        linears += [] if self.compressor is None else [self.compressor.rows]
        linears += [] if self.index is None else self.index.linears()
        return [part for linear in linears for part in linear.parts]

    def prepared(self, kernels: KernelSet) -> CompressedWeights:
        return replace(
            self,
            query_down=kernels.prepare_linear(self.query_down),
            query_norm=kernels.prepare_norm(self.query_norm),
            query=kernels.prepare_linear(self.query),
            head_norm=kernels.prepare_norm(self.head_norm),
            key=kernels.prepare_linear(self.key),
            key_norm=kernels.prepare_norm(self.key_norm),
            groups=kernels.prepare_head_linear(self.groups),
            compressor=None if self.compressor is None else self.compressor.prepared(kernels),
            index=None if self.index is None else self.index.prepared(kernels),
        )
