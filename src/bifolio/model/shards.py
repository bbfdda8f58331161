"""The part of a model that one rank of tensor parallelism holds: rows or columns of its matrices.

    matrix       rank holds                          exchange
    q, k, v      rows of its heads                   none; a kv head that several ranks need is on each; where one norm
                                                     covers all heads, q, k and v of all ranks are gathered for it
    latents      all rows, and those of its heads    none; the latents of a token are on each rank
                 of the projections around them
    recurrence   rows of its heads or channels       none (`model.recurrent_shards`)
    gates        rows of its heads                   none
    gate, up     rows of its columns of the MLP      none
    output, down rows, and the whole of each row     inputs and results are gathered      (exact)
                 columns, for its own inputs         results are added                    (not exact)
    experts      rows of down, all of up             results are gathered                 (exact)
                 a part of the MLP of each expert    results are added                    (not exact)
    head         rows: its part of the vocabulary    logits are gathered
    embedding    all rows (a view of the mapped file costs no memory), or columns, gathered, on a device

Parts are views of the mapped file. Exact parts give the bits of the whole model: every sum along a row is computed by
one rank, in the order of one process. Added parts exchange less, and the order of the addition differs from one
process. Columns of quantised matrices are cut on the borders of their blocks; a matrix whose parts do not end there is
cut into rows.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from bifolio.config import ModelConfig, RecurrentConfig
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Array, AttentionShape, Linear, Shards
from bifolio.model.latent_weights import LatentWeights
from bifolio.model.recurrent_shards import (
    RecurrentPart,
    Span,
    check_recurrence,
    config_part,
    fits_groups,
    group_spans,
    input_rows,
    shard_keyed,
    shard_recurrence,
)
from bifolio.model.weights import (
    HeadNorms,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    RecurrentWeights,
)
from bifolio.quant.tensor import QuantizedTensor


def check_size(config: ModelConfig, size: int) -> None:
    """Raise ConfigError if the heads of a model cannot be shared by `size` ranks."""
    heads, kv_heads = config.num_heads, config.num_kv_heads

    def fits(count: int) -> bool:
        return fits_groups(heads, kv_heads, count)

    differ = any(layer.head_dim or layer.kv_heads or layer.kv_source is not None for layer in config.layers)
    if size > 1 and (differ or config.layer_inputs is not None or config.streams is not None):
        raise ConfigError("tensor_parallel_size must be 1: the layers of this model have heads or inputs that differ")
    if size > 1 and config.compressed is not None:
        raise ConfigError("tensor_parallel_size must be 1: layers of this model attend to compressed entries")
    if size > 1 and config.shared_blocks is not None:
        raise ConfigError("tensor_parallel_size must be 1: layers of this model share blocks of attention and an MLP")
    if size > 1 and config.value_size:
        raise ConfigError("tensor_parallel_size must be 1: the values of this model are smaller than its keys")
    if size > 1 and config.sub_norms:
        raise ConfigError("tensor_parallel_size must be 1: norms of this model cover the heads or the MLP of all ranks")
    if config.moe is not None and config.moe.beside_mlp and size > 1:
        raise ConfigError("tensor_parallel_size must be 1: the experts of this model stand beside its MLPs")
    if config.recurrent is not None:
        check_recurrence(config.recurrent, size)
    if not fits(size):
        fitting = ", ".join(str(count) for count in range(1, heads + 1) if fits(count))
        raise ConfigError(
            f"{heads} query heads and {kv_heads} key/value heads cannot be shared by tensor_parallel_size={size} "
            f"processes: use one of {fitting}"
        )


def head_spans(config: ModelConfig, size: int) -> tuple[list[Span], list[Span]]:
    """The query heads and the kv heads of each rank; a kv head that several ranks need is on each of them."""
    return _spans_of_groups(config.num_heads, config.num_kv_heads, size)


def _spans_of_groups(heads: int, groups: int, size: int) -> tuple[list[Span], list[Span]]:
    return group_spans(heads, groups, size, spans(heads if size > groups else groups, size))


def spans(total: int, size: int, unit: int = 1) -> list[Span]:
    """Cut [0, total) into `size` spans whose borders are multiples of `unit`; they differ by one unit at most."""
    units = -(-total // unit)
    if units < size:
        raise ConfigError(f"{total} rows or columns in blocks of {unit} cannot be shared by {size} ranks: use fewer")
    borders = [min(units * rank // size * unit, total) for rank in range(size + 1)]
    return list(itertools.pairwise(borders))


def _count(span: Span) -> int:
    return span[1] - span[0]


def widths(parts: list[Span]) -> tuple[int, ...]:
    return tuple(_count(part) for part in parts)


def shard(weights: ModelWeights, rank: int, size: int, *, exact: bool, spread_embedding: bool = False) -> ModelWeights:
    """The part of `rank`; its configuration counts the rank's own heads and keeps the whole vocabulary."""
    config = weights.config
    check_size(config, size)
    if size == 1:
        return weights
    layers = tuple(_shard_layer(layer, config, rank, size, exact) for layer in weights.layers)
    vocabulary = spans(config.vocab_size, size)
    head = _rows(weights.head, [vocabulary[rank]])
    recurrent = config.recurrent
    own = replace(
        config,
        num_heads=layers[0].shape.num_heads,
        num_kv_heads=layers[0].shape.num_kv_heads,
        recurrent=None if recurrent is None else config_part(recurrent, recurrent_parts(recurrent, size)[rank], size),
    )
    sharded = replace(
        weights, config=own, layers=layers, head=replace(head, shards=Shards((), widths(vocabulary))), prepared_for=None
    )
    return _spread_embedding(sharded, rank, size) if spread_embedding else sharded


def _shard_layer(layer: LayerWeights, config: ModelConfig, rank: int, size: int, exact: bool) -> LayerWeights:
    query_heads, kv_heads = head_spans(config, size)
    sinks, is_wide = layer.shape.sinks, config.qk_norm_all_heads
    shape = replace(
        layer.shape,
        num_heads=_count(query_heads[rank]),
        num_kv_heads=_count(kv_heads[rank]),
        sinks=None if sinks is None else sinks[slice(*query_heads[rank])],
        slopes=None if layer.shape.slopes is None else layer.shape.slopes[slice(*query_heads[rank])],
        query_norm=None if is_wide else layer.shape.query_norm,
        key_norm=None if is_wide else layer.shape.key_norm,
    )
    up, down = _shard_mlp(layer.up, layer.down, config.gated_mlp, rank, size, exact)
    width = layer.output.in_features // config.num_heads if layer.has_attention else 0  # of a head in its output
    by_heads = [(start * width, stop * width) for start, stop in query_heads]
    gate = layer.gate
    return replace(
        layer,
        shape=shape,
        qkv=_rows(layer.qkv, _own_rows(config, query_heads[rank], kv_heads[rank])) if layer.qkv.parts else layer.qkv,
        latent=None if layer.latent is None else _shard_latent(layer.latent, *query_heads[rank]),
        norms=_shard_norms(layer.shape, config, rank, size) if is_wide else None,
        output=_joining(layer.output, by_heads, rank, exact) if layer.has_attention else layer.output,
        gate=None if gate is None else _rows(gate, [_of_heads(gate, config.num_heads, query_heads[rank])]),
        recurrent=_shard_recurrent(layer.recurrent, config.recurrent, rank, size, exact),
        up=up,
        down=down,
        moe=None if layer.moe is None else _shard_experts(layer.moe, rank, size, exact),
    )


def _of_heads(linear: Linear, num_heads: int, heads: Span) -> Span:
    """The rows of some heads in a product that has as many rows for each head."""
    each = linear.out_features // num_heads
    return heads[0] * each, heads[1] * each


def _own_rows(config: ModelConfig, query_heads: Span, kv_heads: Span) -> list[Span]:
    """The rows of a rank's heads in q, k and v."""
    dim = config.head_dim
    first, last = (head * dim for head in kv_heads)
    before_keys, before_values = config.query_size, config.query_size + config.kv_size
    queries = (query_heads[0] * dim, query_heads[1] * dim)
    return [queries, *((before + first, before + last) for before in (before_keys, before_values))]


def _shard_latent(latent: LatentWeights, start: int, stop: int) -> LatentWeights:
    """The projections of the heads [start, stop); latents and compressed queries are computed on every rank."""
    width = latent.query.out_features // len(latent.key_up.heads)
    return replace(
        latent,
        query=_rows(latent.query, [(start * width, stop * width)]),
        key_up=replace(latent.key_up, heads=latent.key_up.heads[start:stop]),
        value_up=replace(latent.value_up, heads=latent.value_up.heads[start:stop]),
    )


def _shard_norms(shape: AttentionShape, config: ModelConfig, rank: int, size: int) -> HeadNorms | None:
    """The norms over the heads of all ranks; a kv head that several ranks hold is taken from the first of them."""
    if shape.query_norm is None or shape.key_norm is None:
        return None
    dim, (query_heads, kv_heads) = config.head_dim, head_spans(config, size)
    counts = [_count(queries) + 2 * _count(keys) for queries, keys in zip(query_heads, kv_heads, strict=True)]
    queries, keys, first = [], [], 0  # columns of the gathered rows
    for number, (own, shared) in enumerate(zip(query_heads, kv_heads, strict=True)):
        before_keys = first + _count(own) * dim
        queries.append((first, before_keys))
        if number == 0 or shared != kv_heads[number - 1]:
            keys.append((before_keys, before_keys + _count(shared) * dim))
        first += counts[number] * dim
    own_queries, own_keys = ((start * dim, stop * dim) for start, stop in (query_heads[rank], kv_heads[rank]))
    widths_of_ranks = tuple(count * dim for count in counts)
    return HeadNorms(
        shape.query_norm, shape.key_norm, widths_of_ranks, tuple(queries), tuple(keys), own_queries, own_keys
    )


def recurrent_parts(own: RecurrentConfig, size: int) -> list[RecurrentPart]:
    """The part of each rank in the recurrent layers."""
    if own.kind == "conv":
        return [RecurrentPart((0, 0), (0, 0), channels) for channels in spans(own.channels, size)]
    return [RecurrentPart(*part) for part in zip(*_spans_of_groups(own.heads, own.groups, size), strict=True)]


def _shard_recurrent(
    weights: RecurrentWeights | None, config: RecurrentConfig | None, rank: int, size: int, exact: bool
) -> RecurrentWeights | None:
    """The rank's heads of a recurrence between its two projections."""
    if weights is None or config is None:
        return None
    parts, whole = recurrent_parts(config, size), weights.recurrence
    joined = [part.channels if config.kind == "conv" else part.heads for part in parts]
    width = 1 if config.kind == "conv" else config.value_size
    return RecurrentWeights(
        input=_rows(weights.input, input_rows(whole, parts[rank], config.step_rank)),
        recurrence=shard_recurrence(whole, parts[rank], config_part(config, parts[rank], size)),
        output=_joining(weights.output, [(start * width, stop * width) for start, stop in joined], rank, exact),
        keyed=None if weights.keyed is None else shard_keyed(weights.keyed, whole, parts[rank]),
    )


def _shard_mlp(up: Linear, down: Linear, gated: bool, rank: int, size: int, exact: bool) -> tuple[Linear, Linear]:
    """The rank's part of an MLP; one without parts, beside experts alone, stays as it is."""
    if not up.parts:
        return up, down
    ffn, unit = down.in_features, _block(down)
    own = spans(ffn, size, 1 if exact or ffn // unit < size else unit)
    start, stop = own[rank]
    rows = [(start, stop), (ffn + start, ffn + stop)] if gated else [(start, stop)]
    return _rows(up, rows), _joining(down, own, rank, exact)


def _shard_experts(moe: MoeWeights, rank: int, size: int, exact: bool) -> MoeWeights:
    """A part of every expert: rows of `down` beside the whole of `up` (exact), or one part of the MLP."""
    experts = moe.experts
    ffn, unit = experts.down[0].in_features, max(_block(linear) for linear in experts.down)
    if exact or ffn // unit < size:
        outputs = spans(experts.down[0].out_features, size)
        down = tuple(_rows(linear, [outputs[rank]]) for linear in experts.down)
        return replace(moe, experts=replace(experts, down=down), shards=Shards((), widths(outputs)))
    own = spans(ffn, size, unit)
    start, stop = own[rank]
    up = tuple(_rows(linear, [(start, stop), (ffn + start, ffn + stop)]) for linear in experts.up)
    added = tuple(replace(_joining(linear, own, rank, exact), shards=None) for linear in experts.down)
    return replace(moe, experts=replace(experts, up=up, down=added), shards=Shards((), ()))


def _joining(linear: Linear, inputs: list[Span], rank: int, exact: bool) -> Linear:
    """The rank's part of a product whose inputs are spread over the ranks."""
    if not exact and all(start % _block(linear) == 0 for start, _ in inputs):
        start, stop = inputs[rank]
        biases = linear.biases if rank == 0 else (None,) * len(linear.biases)  # added once
        parts = tuple(_columns(part, start, stop) for part in linear.parts)
        return replace(linear, parts=parts, biases=biases, shards=Shards((), ()))
    outputs = spans(linear.out_features, len(inputs))
    return replace(_rows(linear, [outputs[rank]]), shards=Shards(widths(inputs), widths(outputs)))


def _spread_embedding(weights: ModelWeights, rank: int, size: int) -> ModelWeights:
    table = weights.embedding
    unit = table.format.block_elements if isinstance(table, QuantizedTensor) else 1
    columns = spans(int(table.shape[1]), size, unit)
    return replace(weights, embedding=_columns(table, *columns[rank]), embedding_widths=widths(columns))


def _block(linear: Linear) -> int:
    """Values of a row between two borders of blocks."""
    return max((part.format.block_elements for part in linear.parts if isinstance(part, QuantizedTensor)), default=1)


def _rows(linear: Linear, wanted: list[Span]) -> Linear:
    """The given rows of the concatenated parts, in their order."""
    parts: list[QuantizedTensor | Array] = []
    biases: list[Array | None] = []
    for start, stop in wanted:
        before = 0
        for part, bias in zip(linear.parts, linear.biases, strict=True):
            count = int(part.shape[0])
            first, last = max(start - before, 0), min(stop - before, count)
            if first < last:
                rows = slice(first, last)
                parts.append(part.select_rows(rows) if isinstance(part, QuantizedTensor) else part[rows])
                biases.append(None if bias is None else bias[rows])
            before += count
    return replace(linear, parts=tuple(parts), biases=tuple(biases))


def _columns(matrix: QuantizedTensor | Array, start: int, stop: int) -> QuantizedTensor | Array:
    return matrix.select_columns(start, stop) if isinstance(matrix, QuantizedTensor) else matrix[:, start:stop]
