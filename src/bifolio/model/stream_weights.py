"""The weights of parallel residual streams and of the inputs of layers, by role."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bifolio.kernels.interface import Array, HeadLinear, KernelSet, Linear, Norm
from bifolio.quant.tensor import QuantizedTensor

Matrix = QuantizedTensor | Array


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """A second embedding of each token, with a part for each layer."""

    table: Any  # [vocab, layers * size]
    is_partial: bool  # the table lacks rows for the last tokens, which read row 0
    scale: float  # of the rows of the table
    projection: Linear  # [layers * size, d]
    norm: Norm  # [size], for the part of each layer

    def matrices(self) -> list[Matrix]:
        return [self.table, *self.projection.parts]

    def prepared(self, kernels: KernelSet) -> LayerInputWeights:
        return replace(
            self,
            table=kernels.prepare_embedding(self.table),
            projection=kernels.prepare_linear(self.projection),
            norm=kernels.prepare_norm(self.norm),
        )


@dataclass(frozen=True, slots=True)
class GatedInputWeights:
    """How a layer adds its inputs to the residual stream."""

    start: int  # column of the layer's part
    gate: Linear  # [size, d]
    projection: Linear  # [d, size]
    norm: Norm

    def matrices(self) -> list[Matrix]:
        return [*self.gate.parts, *self.projection.parts]

    def prepared(self, kernels: KernelSet) -> GatedInputWeights:
        return replace(
            self,
            gate=kernels.prepare_linear(self.gate),
            projection=kernels.prepare_linear(self.projection),
            norm=kernels.prepare_norm(self.norm),
        )


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """The streams behind the first: from the embedding, and back to one stream."""

    spread: Linear  # [d, d] of each
    merge: HeadLinear  # [d, d] of each

    def matrices(self) -> list[Matrix]:
        return [*self.spread.parts, *(part for head in self.merge.heads for part in head.parts)]

    def prepared(self, kernels: KernelSet) -> StreamWeights:
        return StreamWeights(kernels.prepare_linear(self.spread), kernels.prepare_head_linear(self.merge))


@dataclass(frozen=True, slots=True)
class LayerStreamWeights:
    """Prediction and correction of the streams in one layer, and its low-rank residual."""

    router_norm: Norm  # its weights are divided by d
    router: Linear  # [streams, d]
    predict: Linear  # [streams * streams, streams]  the bias is the identity: streams predict themselves
    correct: Linear  # [streams, streams]  the bias is 1
    output_scale: Array | None  # f32[d], of the active stream where it gates the inputs of the layer
    low_rank_down: Linear  # [rank, d]
    low_rank_up: Linear  # [d, rank]
    low_rank_norm: Norm

    def linears(self) -> tuple[Linear, ...]:
        return self.router, self.predict, self.correct, self.low_rank_down, self.low_rank_up

    def matrices(self) -> list[Matrix]:
        return [part for linear in self.linears() for part in linear.parts]

    def prepared(self, kernels: KernelSet) -> LayerStreamWeights:
        router, predict, correct, down, up = (kernels.prepare_linear(linear) for linear in self.linears())
        return LayerStreamWeights(
            router_norm=kernels.prepare_norm(self.router_norm),
            router=router,
            predict=predict,
            correct=correct,
            output_scale=None if self.output_scale is None else kernels.from_host(self.output_scale),
            low_rank_down=down,
            low_rank_up=up,
            low_rank_norm=kernels.prepare_norm(self.low_rank_norm),
        )
