"""The weights around attention over cached latents (MLA)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bifolio.kernels.interface import Array, AttentionShape, HeadLinear, KernelSet, Linear, Norm
from bifolio.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class IndexWeights:
    """The projections of an indexer, which chooses the positions that queries attend to."""

    shape: AttentionShape  # of its heads; its layer of the cache is behind those of all layers
    query: Linear  # [heads * size, rank]  of the compressed query
    key: Linear  # [size, d]
    key_norm: Norm
    weights: Linear  # [heads, d]

    def linears(self) -> list[Linear]:
        return [self.query, self.key, self.weights]

    def prepared(self, kernels: KernelSet) -> IndexWeights:
        return replace(
            self,
            query=kernels.prepare_linear(self.query),
            key=kernels.prepare_linear(self.key),
            key_norm=kernels.prepare_norm(self.key_norm),
            weights=kernels.prepare_linear(self.weights),
        )


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The projections around attention over cached latents."""

    rope_size: int
    query_down: Linear | None  # [rank, d]; None: `query` reads the layer's input
    query_norm: Norm | None
    query: Linear  # [heads * (nope + rope), d or rank]
    latent: Linear  # [latent + rope, d]
    latent_norm: Norm
    key_up: HeadLinear  # [latent, nope] of each head
    value_up: HeadLinear  # [value, latent] of each head
    index: IndexWeights | None = None  # None: there is no indexer, or a layer reads the choice of an earlier one

    def matrices(self) -> list[QuantizedTensor | Array]:
        linears = [self.query, self.latent, *self.key_up.heads, *self.value_up.heads]
        linears += [] if self.query_down is None else [self.query_down]
        linears += [] if self.index is None else self.index.linears()
        return [part for linear in linears for part in linear.parts]

    def prepared(self, kernels: KernelSet) -> LatentWeights:
        return replace(
            self,
            query_down=None if self.query_down is None else kernels.prepare_linear(self.query_down),
            query_norm=None if self.query_norm is None else kernels.prepare_norm(self.query_norm),
            query=kernels.prepare_linear(self.query),
            latent=kernels.prepare_linear(self.latent),
            latent_norm=kernels.prepare_norm(self.latent_norm),
            key_up=kernels.prepare_head_linear(self.key_up),
            value_up=kernels.prepare_head_linear(self.value_up),
            index=None if self.index is None else self.index.prepared(kernels),
        )
