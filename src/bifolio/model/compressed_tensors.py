"""The tensors of attention to compressed entries, and of mixed residual streams: names in files, weights by role."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bifolio.config import CompressedConfig, ModelConfig
from bifolio.errors import ModelFileError
from bifolio.kernels.interface import Array, AttentionShape, Compressor, HeadLinear, Linear, Norm, StreamMix
from bifolio.model.compressed_weights import CompressedWeights, CompressorWeights, EntryIndexWeights, HyperWeights
from bifolio.model.fetch import Fetch, FetchVector, Tensor
from bifolio.model.rope_frequencies import inverse_frequencies
from bifolio.quant.tensor import QuantizedTensor

Part = tuple[str, Tensor]  # full name


@dataclass(frozen=True, slots=True)
class CompressorNames:
    """Names with the prefix of a layer; the last with its suffix."""

    values: str
    gates: str
    norm: str
    bias: str


@dataclass(frozen=True, slots=True)
class HyperNames:
    """Names with their suffixes."""

    logits: str
    base: str
    scale: str


@dataclass(frozen=True, slots=True)
class CompressedNames:
    """Names without `.weight`, with the prefix of a layer."""

    query_down: str
    query_norm: str
    query: str
    key: str
    key_norm: str
    groups: str  # one tensor [groups * rank, inputs of a group]
    compressor: CompressorNames
    index: CompressorNames
    index_query: str
    index_weights: str
    attention: HyperNames
    mlp: HyperNames
    end: HyperNames  # without the prefix of a layer
    table: str  # with its suffix


# -- weights ----------------------------------------------------------------------------------------------------------
def assemble_compressed(
    config: ModelConfig, names: CompressedNames | None, layer: int, prefix: str, fetch: Fetch, vector: FetchVector
) -> CompressedWeights | None:
    """The attention of a layer; None: it is of another kind."""
    own = config.compressed
    if own is None or names is None:
        return None
    d, dim = config.hidden_size, config.head_dim

    def linear(name: str, rows: int, columns: int) -> Linear:
        return Linear((fetch(f"{prefix}{name}.weight", (rows, columns)),), (None,))

    def norm(name: str, size: int) -> Norm:
        return Norm(vector(f"{prefix}{name}.weight", (size,)), None, config.norm_eps)

    tokens, chooses = config.layers[layer].entry_tokens, config.layers[layer].chooses_entries
    places = [number for number, (index, _) in enumerate(config.entry_rows) if index == layer][::2]
    cached = [len(config.cached_layers) + place for place in places]

    def compressor(parts: CompressorNames, number: int, size: int) -> CompressorWeights:
        columns, rope = size * (1 + chooses), config.ropes[config.layers[layer].rope or 0]
        rows = [fetch(f"{prefix}{name}.weight", (columns, d)) for name in (parts.values, parts.gates)]
        frequencies, scale = inverse_frequencies(rope)
        bias = vector(prefix + parts.bias, (tokens, columns))
        entries = Compressor(
            cached[number], tokens, size, chooses, bias, norm(parts.norm, size), frequencies, scale
        )  # fmt: skip
        return CompressorWeights(Linear(tuple(rows), (None, None)), entries)

    def indexer() -> EntryIndexWeights:
        heads, size = own.index_heads, own.index_size
        scale = 1 / math.sqrt(heads * size)
        return EntryIndexWeights(
            shape=AttentionShape(cached[1], heads, 1, size, scale, top_k=own.index_top_k, has_entries=True),
            compressor=compressor(names.index, 1, size),
            query=linear(names.index_query, heads * size, own.query_rank),
            weights=linear(names.index_weights, heads, d),
        )

    return CompressedWeights(
        query_down=linear(names.query_down, own.query_rank, d),
        query_norm=norm(names.query_norm, own.query_rank),
        query=linear(names.query, config.query_size, own.query_rank),
        head_norm=Norm(np.ones(dim, np.float32), None, config.norm_eps),
        key=linear(names.key, dim, d),
        key_norm=norm(names.key_norm, dim),
        groups=_groups(config, own, prefix + names.groups, fetch),
        compressor=compressor(names.compressor, 0, dim) if tokens else None,
        index=indexer() if chooses else None,
    )


def _groups(config: ModelConfig, own: CompressedConfig, name: str, fetch: Fetch) -> HeadLinear:
    """One matrix of each group of heads; files have them below each other."""
    rank, inputs = own.output_rank, config.query_size // own.output_groups
    whole = fetch(name + ".weight", (own.output_groups * rank, inputs))
    spans = [slice(number * rank, (number + 1) * rank) for number in range(own.output_groups)]
    parts = [whole.select_rows(rows) if isinstance(whole, QuantizedTensor) else whole[rows] for rows in spans]
    return HeadLinear(tuple(Linear((part,), (None,)) for part in parts))


def assemble_hyper(
    config: ModelConfig, names: HyperNames | None, prefix: str, fetch: Fetch, vector: FetchVector, *, ends: bool = False
) -> HyperWeights | None:
    own = config.hyper
    if own is None or names is None:
        return None
    width, inputs = own.count if ends else own.width, own.count * config.hidden_size
    return HyperWeights(
        Norm(np.ones(inputs, np.float32), None, config.norm_eps),
        Linear((fetch(prefix + names.logits, (width, inputs)),), (None,)),
        StreamMix(
            own.count,
            vector(prefix + names.base, (width,)),
            vector(prefix + names.scale, (1 if ends else 3,)),
            own.iterations,
            own.eps,
        ),
    )


def assemble_layer_hyper(
    config: ModelConfig, names: CompressedNames | None, prefix: str, fetch: Fetch, vector: FetchVector
) -> tuple[HyperWeights, HyperWeights] | None:
    """Around attention and around the MLP of a layer."""
    if names is None:
        return None
    first, second = (
        assemble_hyper(config, each, prefix, fetch, vector) for each in (names.attention, names.mlp)
    )  # fmt: skip
    return None if first is None or second is None else (first, second)


def read_table(config: ModelConfig, names: CompressedNames | None, prefix: str, vector: FetchVector) -> Array | None:
    """The experts of each token by its id: i32[vocab, top_k]."""
    if config.moe is None or names is None:
        return None
    name, count = prefix + names.table, config.moe.num_experts
    stored = vector(name, (config.vocab_size, config.moe.top_k))
    table = stored.astype(np.int32)
    if not np.array_equal(table, stored) or table.min() < 0 or table.max() >= count:
        raise ModelFileError(f"the tensor {name!r} must hold the numbers of experts, from 0 to {count - 1}")
    return table


# -- the reverse ------------------------------------------------------------------------------------------------------
def hyper_parts(prefix: str, names: HyperNames, own: HyperWeights) -> Iterator[Part]:
    yield prefix + names.logits, own.logits.parts[0]
    yield prefix + names.base, own.mix.base
    yield prefix + names.scale, own.mix.scale


def compressor_parts(prefix: str, names: CompressorNames, own: CompressorWeights) -> Iterator[Part]:
    for name, part in zip((names.values, names.gates), own.rows.parts, strict=True):
        yield f"{prefix}{name}.weight", part


def compressor_states(prefix: str, names: CompressorNames, own: CompressorWeights) -> Iterator[Part]:
    yield prefix + names.bias, own.entries.bias
    yield f"{prefix}{names.norm}.weight", own.entries.norm.weight


def grouped_rows(own: CompressedWeights) -> Tensor:
    """The matrices of all groups below each other."""
    parts = [head.parts[0] for head in own.groups.heads]
    quantized = [part if isinstance(part, QuantizedTensor) else QuantizedTensor.from_array(part) for part in parts]
    first = quantized[0]
    same = [each.converted(first.format) for each in quantized]
    data = np.concatenate([each.data for each in same])
    return QuantizedTensor(first.format, data, (len(data), first.shape[-1]), first.name)


def compressed_matrices(prefix: str, names: CompressedNames, own: CompressedWeights) -> Iterator[Part]:
    yield f"{prefix}{names.query_down}.weight", own.query_down.parts[0]
    yield f"{prefix}{names.query}.weight", own.query.parts[0]
    yield f"{prefix}{names.key}.weight", own.key.parts[0]
    yield f"{prefix}{names.groups}.weight", grouped_rows(own)
    if own.compressor is not None:
        yield from compressor_parts(prefix, names.compressor, own.compressor)
    if own.index is not None:
        yield from compressor_parts(prefix, names.index, own.index.compressor)
        yield f"{prefix}{names.index_query}.weight", own.index.query.parts[0]


def compressed_states(prefix: str, names: CompressedNames, own: CompressedWeights) -> Iterator[Part]:
    """Vectors, and small matrices that are not quantised."""
    yield f"{prefix}{names.query_norm}.weight", own.query_norm.weight
    yield f"{prefix}{names.key_norm}.weight", own.key_norm.weight
    if own.compressor is not None:
        yield from compressor_states(prefix, names.compressor, own.compressor)
    if own.index is not None:
        yield from compressor_states(prefix, names.index, own.index.compressor)
        yield f"{prefix}{names.index_weights}.weight", own.index.weights.parts[0]
