"""The tensors of parallel residual streams and of the inputs of layers: their names in files, and weights by role."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bifolio.config import ModelConfig
from bifolio.kernels.interface import Array, HeadLinear, Linear, Norm
from bifolio.model.fetch import Fetch, FetchVector, Tensor, stacked_matrices
from bifolio.model.stream_weights import GatedInputWeights, LayerInputWeights, LayerStreamWeights, StreamWeights


@dataclass(frozen=True, slots=True)
class LayerInputNames:
    """Names without `.weight`; the last three are prefixed by that of the layer."""

    table: str
    model_projection: str
    model_norm: str
    gate: str
    projection: str
    norm: str


@dataclass(frozen=True, slots=True)
class StreamNames:
    """Names without `.weight`, all but the first two with the prefix of a layer."""

    spread: str  # with {}: a matrix for each stream; without: one tensor [streams - 1, d, d]
    merge: str
    router_norm: str
    router: str
    predict: str
    correct: str
    output_scale: str  # with its suffix
    low_rank_down: str
    low_rank_up: str
    low_rank_norm: str


HF_LAYER_INPUTS = LayerInputNames(
    table="model.embed_tokens_per_layer",
    model_projection="model.per_layer_model_projection",
    model_norm="model.per_layer_projection_norm",
    gate="per_layer_input_gate",
    projection="per_layer_projection",
    norm="post_per_layer_input_norm",
)
GGUF_LAYER_INPUTS = LayerInputNames(
    table="per_layer_token_embd",
    model_projection="per_layer_model_proj",
    model_norm="per_layer_proj_norm",
    gate="inp_gate",
    projection="proj",
    norm="post_norm",
)


def assemble_layer_inputs(
    config: ModelConfig, names: LayerInputNames | None, fetch: Fetch, vector: FetchVector
) -> LayerInputWeights | None:
    own, d = config.layer_inputs, config.hidden_size
    if own is None or names is None:
        return None
    width = config.num_layers * own.size
    norm = _norm(config, names.model_norm, own.size, vector)
    return LayerInputWeights(
        table=fetch(names.table + ".weight", (own.vocab_size, width)),
        is_partial=own.vocab_size < config.vocab_size,
        scale=math.sqrt(own.size),
        projection=_linear(names.model_projection, width, d, fetch),
        norm=replace(norm, eps=norm.eps * d),  # the projection is divided by sqrt(d), and then normed
    )


def assemble_gated_inputs(
    config: ModelConfig, names: LayerInputNames | None, layer: int, prefix: str, fetch: Fetch, vector: FetchVector
) -> GatedInputWeights | None:
    own, d = config.layer_inputs, config.hidden_size
    if own is None or names is None:
        return None
    return GatedInputWeights(
        start=layer * own.size,
        gate=_linear(prefix + names.gate, own.size, d, fetch),
        projection=_linear(prefix + names.projection, d, own.size, fetch),
        norm=_norm(config, prefix + names.norm, d, vector),
    )


def assemble_streams(config: ModelConfig, names: StreamNames | None, fetch: Fetch) -> StreamWeights | None:
    own, d = config.streams, config.hidden_size
    if own is None or names is None:
        return None
    spread, merge = (stacked_matrices(name, own.count - 1, (d, d), fetch) for name in (names.spread, names.merge))
    return StreamWeights(
        Linear(tuple(spread), (None,) * len(spread)),
        HeadLinear(tuple(Linear((matrix,), (None,)) for matrix in merge)),
    )


def assemble_layer_streams(
    config: ModelConfig, names: StreamNames | None, prefix: str, fetch: Fetch, vector: FetchVector
) -> LayerStreamWeights | None:
    own, d = config.streams, config.hidden_size
    if own is None or names is None:
        return None
    count = own.count
    norm = _norm(config, prefix + names.router_norm, d, vector)
    identity = np.eye(count, dtype=np.float32).reshape(-1)
    return LayerStreamWeights(
        router_norm=replace(norm, weight=norm.weight / d),
        router=_linear(prefix + names.router, count, d, fetch),
        predict=_linear(prefix + names.predict, count * count, count, fetch, identity),
        correct=_linear(prefix + names.correct, count, count, fetch, np.ones(count, np.float32)),
        output_scale=vector(prefix + names.output_scale, (d,)) if own.scales_output else None,
        low_rank_down=_linear(prefix + names.low_rank_down, own.low_rank, d, fetch),
        low_rank_up=_linear(prefix + names.low_rank_up, d, own.low_rank, fetch),
        low_rank_norm=_norm(config, prefix + names.low_rank_norm, d, vector),
    )


# -- the reverse -----------------------------------------------------------------------------------------------------
Part = tuple[str, Tensor | tuple[Tensor, ...]]  # full name; several matrices are one tensor


def layer_input_parts(names: LayerInputNames, own: LayerInputWeights) -> Iterator[Part]:
    yield names.table + ".weight", own.table
    yield names.model_projection + ".weight", own.projection.parts[0]
    yield names.model_norm + ".weight", own.norm.weight


def gated_input_parts(prefix: str, names: LayerInputNames, own: GatedInputWeights) -> Iterator[Part]:
    yield f"{prefix}{names.gate}.weight", own.gate.parts[0]
    yield f"{prefix}{names.projection}.weight", own.projection.parts[0]
    yield f"{prefix}{names.norm}.weight", own.norm.weight


def stream_parts(names: StreamNames, own: StreamWeights) -> Iterator[Part]:
    """Matrices by stream, or a tuple of them that are one tensor."""
    for name, matrices in ((names.spread, own.spread.parts), (names.merge, [h.parts[0] for h in own.merge.heads])):
        if "{}" not in name:
            yield name + ".weight", tuple(matrices)
            continue
        for number, matrix in enumerate(matrices):
            yield name.format(number) + ".weight", matrix


def layer_stream_parts(prefix: str, names: StreamNames, own: LayerStreamWeights) -> Iterator[Part]:
    d = own.router_norm.weight.shape[0]
    yield f"{prefix}{names.router_norm}.weight", own.router_norm.weight * d
    by_name = (names.router, names.predict, names.correct, names.low_rank_down, names.low_rank_up)
    for name, linear in zip(by_name, own.linears(), strict=True):
        yield f"{prefix}{name}.weight", linear.parts[0]
    yield f"{prefix}{names.low_rank_norm}.weight", own.low_rank_norm.weight
    if own.output_scale is not None:
        yield prefix + names.output_scale, own.output_scale


def _linear(name: str, rows: int, columns: int, fetch: Fetch, bias: Array | None = None) -> Linear:
    return Linear((fetch(name + ".weight", (rows, columns)),), (bias,))


def _norm(config: ModelConfig, name: str, size: int, vector: FetchVector) -> Norm:
    return Norm(vector(name + ".weight", (size,)), None, config.norm_eps)  # stored without an offset in all families
