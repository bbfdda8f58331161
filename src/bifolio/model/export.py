"""The weights of a model as named tensors, for the file writers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.kernels.interface import Array, Linear, Norm
from bifolio.model.compressed_tensors import HyperNames, compressed_matrices, compressed_states, hyper_parts
from bifolio.model.keyed_tensors import keyed_parts
from bifolio.model.latent_names import LatentNames
from bifolio.model.latent_weights import LatentWeights
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.rwkv_tensors import rwkv_matrices, rwkv_states
from bifolio.model.selective_tensors import selective_parts
from bifolio.model.shared_tensors import shared_parts
from bifolio.model.stream_tensors import (
    Part,
    gated_input_parts,
    layer_input_parts,
    layer_stream_parts,
    stream_parts,
)
from bifolio.model.tensor_names import TensorNames, final_norm_name
from bifolio.model.unit_tensors import unit_parts
from bifolio.model.weights import NO_LINEAR, LayerWeights, ModelWeights, MoeWeights, RecurrentWeights
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor, concatenate_rows

Kind = Literal["matrix", "embedding", "head", "positions", "norm", "bias", "router", "state", "numbers"]


@dataclass(frozen=True, slots=True)
class TensorStack:
    """Matrices of equal shape as one tensor [count, out, in]; they are joined when they are written."""

    matrices: tuple[QuantizedTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.matrices), *self.matrices[0].shape)

    @property
    def format(self) -> QuantFormat:
        return self.matrices[0].format

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    def joined(self) -> QuantizedTensor:
        same = [matrix.converted(self.format) for matrix in self.matrices]
        return QuantizedTensor(self.format, np.concatenate([matrix.data for matrix in same]), self.shape)


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Matrices, or vectors, whose rows are mixed in one tensor; they are joined when they are written."""

    parts: tuple[QuantizedTensor, ...]
    rows: tuple[NDArray[np.int64], ...]  # numbers of the rows of each part in the whole

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(map(len, self.rows)), *self.parts[0].shape[1:])

    @property
    def format(self) -> QuantFormat:
        return self.parts[0].format

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def joined(self) -> QuantizedTensor:
        if len(self.shape) == 1:
            values = np.empty(self.shape, np.float32)
            for part, rows in zip(self.parts, self.rows, strict=True):
                values[rows] = part.dequantize()
            return QuantizedTensor.from_array(values)
        format = self.format if len({part.format for part in self.parts}) == 1 else QuantFormat.F32
        data = np.empty((self.shape[0], format.row_bytes(self.shape[-1])), np.uint8)
        for part, rows in zip(self.parts, self.rows, strict=True):
            data[rows] = part.converted(format).data
        return QuantizedTensor(format, data, self.shape)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One tensor under its name in a file."""

    name: str
    tensor: QuantizedTensor | TensorStack | JoinedRows
    kind: Kind
    row_order: NDArray[np.int64] | None = None  # i64[rows]  new order of the rows; None: unchanged

    def rearranged(self) -> QuantizedTensor:
        """The tensor with its rows (or the values of a vector) in the order of the file."""
        if isinstance(self.tensor, TensorStack | JoinedRows):
            return self.tensor.joined()
        if self.row_order is None:
            return self.tensor.held()
        if len(self.tensor.shape) == 1:
            return QuantizedTensor.from_array(self.tensor.dequantize()[self.row_order])
        return self.tensor.select_rows(self.row_order).held()


def named_tensors(weights: ModelWeights, names: TensorNames, *, interleaved: bool) -> Iterator[NamedTensor]:
    """Yield every tensor once, layer by layer. `interleaved`: the file uses rope on neighbouring pairs."""
    found = _network(weights, names, interleaved)
    return found if weights.config.norm_weight else (tensor for tensor in found if tensor.kind != "norm")


def _network(weights: ModelWeights, names: TensorNames, interleaved: bool) -> Iterator[NamedTensor]:
    yield NamedTensor(names.embedding + ".weight", _quantized(weights.embedding), "embedding")
    if weights.position_embedding is not None:
        yield NamedTensor(names.positions + ".weight", _quantized(weights.position_embedding), "positions")
    if weights.type_embedding is not None:
        yield NamedTensor(names.types + ".weight", _quantized(weights.type_embedding), "positions")
    yield from norm_tensors(names.embedding_norm, weights.embedding_norm)
    if weights.layer_inputs is not None and names.layer_inputs is not None:
        yield from _parts(layer_input_parts(names.layer_inputs, weights.layer_inputs))
    if weights.streams is not None and names.streams is not None:
        yield from _parts(stream_parts(names.streams, weights.streams), "state")
    if weights.hyper is not None and names.compressed is not None:
        yield from _parts(hyper_parts("", names.compressed.end, weights.hyper), "state")
    for index, layer in enumerate(weights.layers):
        prefix, home = (names.layer.format(place) for place in (index, weights.config.block_source(index)))
        if layer.shared is not None and names.shared is not None:
            yield from _parts(shared_parts(weights.config, names.shared, index, prefix, home, layer.shared))
        yield from _layer(
            weights.config, names, prefix, layer if home == prefix else _without_block(layer), interleaved
        )
    yield from norm_tensors(final_norm_name(weights.config, names), _final_norm(weights))
    if not weights.config.language_head:
        return
    if not weights.config.tie_embeddings:
        yield NamedTensor(names.head + ".weight", _quantized(weights.head.parts[0]), "head")
    if weights.head.biases[0] is not None:
        yield NamedTensor(names.head + ".bias", _quantized(weights.head.biases[0]), "bias")


def _without_block(layer: LayerWeights) -> LayerWeights:
    return replace(layer, qkv=NO_LINEAR, output=NO_LINEAR, mlp_norm=None, up=NO_LINEAR, down=NO_LINEAR)


def _layer(
    config: ModelConfig, names: TensorNames, prefix: str, layer: LayerWeights, interleaved: bool
) -> Iterator[NamedTensor]:
    if layer.qkv.parts and names.qkv[1:]:
        layer = replace(layer, qkv=_distinct(layer.qkv))
    orders: tuple[NDArray[np.int64] | None, ...] = (None,) * len(layer.qkv.parts)
    if interleaved != config.rope_interleaved and config.ropes and layer.qkv.parts:
        orders = row_orders(config, to_interleaved=interleaved, num_parts=len(layer.qkv.parts))
    yield from norm_tensors(prefix + names.attention_norm, layer.attention_norm)
    if layer.recurrent is not None and names.recurrent is not None:
        yield from _recurrence(prefix, names.recurrent, config, layer.recurrent)
    if layer.has_attention:
        yield from _attention(prefix, names, layer, orders)
    yield from norm_tensors(prefix + names.post_attention_norm, layer.post_attention_norm)
    yield from norm_tensors(prefix + names.mlp_norm, layer.mlp_norm)
    if layer.mlp_shift is not None and names.recurrent is not None and names.recurrent.rwkv is not None:
        values = np.asarray(layer.mlp_shift.factors).reshape(-1)
        yield NamedTensor(prefix + names.recurrent.rwkv.mlp_shift, _quantized(values), "state")
    if layer.moe is not None:
        yield from _experts(prefix, names, layer, layer.moe)
    elif layer.has_mlp:
        yield from _linear(prefix, names.up, layer.up)
        yield from _linear(prefix, (names.down,), layer.down)
        yield from norm_tensors(prefix + names.mlp_sub_norm, layer.mlp_sub_norm)
        for name, value in zip(names.xielu, layer.xielu or (), strict=False):
            yield NamedTensor(prefix + name, _quantized(np.array([value], np.float32)), "state")
    yield from norm_tensors(prefix + names.post_mlp_norm, layer.post_mlp_norm)
    if layer.inputs is not None and names.layer_inputs is not None:
        yield from _parts(gated_input_parts(prefix, names.layer_inputs, layer.inputs))
    for own, around in zip(layer.hyper or (), _hyper_names(names), strict=False):
        yield from _parts(hyper_parts(prefix, around, own), "state")
    if layer.streams is not None and names.streams is not None:
        yield from _parts(layer_stream_parts(prefix, names.streams, layer.streams), "state")
    if config.layer_scales:
        yield NamedTensor(prefix + names.layer_scale, _quantized(np.array([layer.scale], np.float32)), "state")


def _hyper_names(names: TensorNames) -> tuple[HyperNames, ...]:
    """Of the weights around attention and around the MLP."""
    return () if names.compressed is None else (names.compressed.attention, names.compressed.mlp)


def linear_tensors(name: str, linear: Linear) -> Iterator[NamedTensor]:
    """A dense layer behind the network: its matrix is no matrix of a layer."""
    for part in _linear("", (name,), linear):
        yield replace(part, kind="positions") if part.kind == "matrix" else part


def _parts(parts: Iterator[Part], kind: Kind = "matrix") -> Iterator[NamedTensor]:
    """Tensors by name: several matrices are one tensor; vectors stay dense."""
    for name, value in parts:
        if isinstance(value, tuple):
            yield NamedTensor(name, TensorStack(tuple(_quantized(matrix) for matrix in value)), kind)
        else:
            yield NamedTensor(name, _quantized(value), kind if len(value.shape) == 2 else "state")


def _attention(
    prefix: str, names: TensorNames, layer: LayerWeights, orders: tuple[NDArray[np.int64] | None, ...]
) -> Iterator[NamedTensor]:
    if layer.compressed is not None and names.compressed is not None:
        yield from _parts(compressed_matrices(prefix, names.compressed, layer.compressed))
        yield from _parts(compressed_states(prefix, names.compressed, layer.compressed), "state")
    elif layer.latent is None:
        qkv = names.qkv if len(names.qkv) == 1 else names.qkv[: len(layer.qkv.parts)]
        yield from _linear(prefix, qkv, layer.qkv, orders)
    elif names.latent is not None:
        yield from _latent(prefix, names.latent, layer.latent)
    if layer.gate is not None:
        yield from _linear(prefix, (names.gate,), layer.gate)
    if names.query_norm:
        yield from norm_tensors(prefix + names.query_norm, layer.shape.query_norm)
        yield from norm_tensors(prefix + names.key_norm, layer.shape.key_norm)
    if layer.shape.sinks is not None:
        yield NamedTensor(prefix + names.sinks, _quantized(layer.shape.sinks), "bias")
    yield from norm_tensors(prefix + names.attention_sub_norm, layer.attention_sub_norm)
    yield from _linear(prefix, (names.output,), layer.output)


def _recurrence(
    prefix: str, names: RecurrentNames, config: ModelConfig, recurrent: RecurrentWeights
) -> Iterator[NamedTensor]:
    own, recurrence = config.recurrent, recurrent.recurrence
    if own is None:
        return

    def vector(name: str, values: Array | None, shape: tuple[int, ...], kind: Kind = "state") -> Iterator[NamedTensor]:
        if values is not None:
            yield NamedTensor(prefix + name, _quantized(np.asarray(values).reshape(shape)), kind)

    if names.rwkv is not None:
        yield from _parts((prefix + name, part) for name, part in rwkv_matrices(names.rwkv, recurrent))
        states = rwkv_states(names.rwkv, own, recurrent)
        yield from _parts(((prefix + name, part) for name, part in states), "state")
        return
    decay = recurrence.decay
    stored = decay if decay is None or not names.decay_log else np.log(-np.asarray(decay))
    stored = -np.asarray(stored) if stored is not None and names.decay_positive else stored
    if stored is not None and recurrent.selective is not None:
        stored = np.ascontiguousarray(np.asarray(stored).T)
    yield from _linear(prefix, tuple(name for name, _ in names.input), recurrent.input)
    first = 0
    for name, shape in names.conv_parts(own) if own.width > 1 else ():
        yield from vector(name + ".weight", recurrence.conv_weight[first : first + shape[0]], shape)
        first += shape[0]
    yield from vector(f"{names.conv}.bias", recurrence.conv_bias, (own.channels,))
    matrix = (own.channels, own.key_size) if recurrent.selective is not None else names.vector_shape(own)
    if names.decay:
        yield from vector(names.decay, stored, matrix)
    if names.bias:
        yield from vector(names.bias, recurrence.bias, (own.bias_size,))
    if recurrent.units is not None and names.units is not None:
        parts = unit_parts(own, names.units, recurrent.units, recurrence.decay, recurrence.bias)
        yield from _parts(((prefix + name, value) for name, value in parts), "state")
    yield from vector(names.skip, recurrence.skip, matrix[:1] if recurrent.selective is not None else matrix)
    if recurrent.selective is not None and names.selective is not None:
        for name, part in selective_parts(names.selective, recurrent.selective, own.step_norms == "weighted"):
            yield from _linear(prefix, (name,), part) if isinstance(part, Linear) else norm_tensors(prefix + name, part)
    if recurrent.keyed is not None and names.keyed is not None:
        for name, product in keyed_parts(names.keyed, recurrent.keyed):
            yield from _linear(prefix, (name,), product)
    if recurrence.norm is not None:
        yield from vector(names.norm + ".weight", recurrence.norm.weight, names.norm_shape(own))
    yield from _linear(prefix, (names.output,), recurrent.output)


def row_orders(config: ModelConfig, *, to_interleaved: bool, num_parts: int) -> tuple[NDArray[np.int64] | None, ...]:
    """Row order of queries and keys that makes (i, i + half) of each head's rotated part neighbours, or the reverse."""
    rotated = config.ropes[0].rotary_dim
    if num_parts != 3 or any(rope.rotary_dim != rotated for rope in config.ropes):
        raise UnsupportedModelError(
            "a file with another rope layout needs separate query and key matrices of equally rotated heads"
        )
    inner = (2, rotated // 2) if to_interleaved else (rotated // 2, 2)

    def order(heads: int) -> NDArray[np.int64]:
        rows = np.arange(heads * config.head_dim, dtype=np.int64).reshape(heads, config.head_dim)
        turned = rows[:, :rotated].reshape(heads, *inner).swapaxes(1, 2).reshape(heads, rotated)
        return np.concatenate([turned, rows[:, rotated:]], axis=1).reshape(-1)

    return order(config.num_heads), order(config.num_kv_heads), None


def _distinct(linear: Linear) -> Linear:
    """Each matrix once: keys that are values, too, are two parts of a product."""
    kept = [n for n, part in enumerate(linear.parts) if all(part is not other for other in linear.parts[:n])]
    return replace(linear, parts=tuple(linear.parts[n] for n in kept), biases=tuple(linear.biases[n] for n in kept))


def _linear(
    prefix: str, names: tuple[str, ...], linear: Linear, orders: tuple[NDArray[np.int64] | None, ...] | None = None
) -> Iterator[NamedTensor]:
    orders, linear = orders or (None,) * len(names), _in_parts(linear, len(names))
    for name, part, bias, order in zip(names, linear.parts, linear.biases, orders, strict=True):
        yield NamedTensor(f"{prefix}{name}.weight", _quantized(part), "matrix", order)
        if bias is not None:
            yield NamedTensor(f"{prefix}{name}.bias", _quantized(bias), "bias", order)


def _in_parts(linear: Linear, count: int) -> Linear:
    """Gate and up as one matrix or as two, as the file stores them."""
    if len(linear.parts) == count or {len(linear.parts), count} != {1, 2}:
        return linear
    parts = [_quantized(part) for part in linear.parts]
    if count == 1:
        same = [part.converted(parts[0].format) for part in parts]
        biases = [bias for bias in linear.biases if bias is not None]
        return Linear((concatenate_rows(same),), (np.concatenate(biases) if biases else None,))
    half, bias = parts[0].shape[0] // 2, linear.biases[0]
    halves = (slice(0, half), slice(half, None))
    return Linear(
        tuple(parts[0].select_rows(rows) for rows in halves),
        tuple(None if bias is None else bias[rows] for rows in halves),
    )


def _latent(prefix: str, names: LatentNames, latent: LatentWeights) -> Iterator[NamedTensor]:
    if latent.query_down is None:
        yield from _linear(prefix, (names.query,), latent.query)
    else:
        yield from _linear(prefix, (names.query_down,), latent.query_down)
        yield from norm_tensors(prefix + names.query_norm, latent.query_norm)
        yield from _linear(prefix, (names.query_up,), latent.query)
    yield from _linear(prefix, (names.latent,), latent.latent)
    yield from norm_tensors(prefix + names.latent_norm, latent.latent_norm)
    yield from _expert_linears(prefix, (names.key_up,), latent.key_up.heads)
    yield from _expert_linears(prefix, (names.value_up,), latent.value_up.heads)
    index, own = latent.index, names.index
    if index is not None:
        yield from _linear(prefix, (own.query,), index.query)
        yield from _linear(prefix, (own.key,), index.key)
        yield from norm_tensors(prefix + own.key_norm, index.key_norm)
        yield NamedTensor(f"{prefix}{own.weights}.weight", _quantized(index.weights.parts[0]), "router")


def _experts(prefix: str, names: TensorNames, layer: LayerWeights, moe: MoeWeights) -> Iterator[NamedTensor]:
    yield NamedTensor(f"{prefix}{names.router}.weight", _quantized(moe.router.parts[0]), "router")
    if moe.router.biases[0] is not None:
        yield NamedTensor(f"{prefix}{names.router}.bias", _quantized(moe.router.biases[0]), "bias")
    if moe.table is not None and names.compressed is not None:
        rows = np.ascontiguousarray(moe.table, np.int32)
        table = QuantizedTensor(QuantFormat.I32, rows.view(np.uint8), rows.shape)
        yield NamedTensor(prefix + names.compressed.table, table, "numbers")
    if moe.choice.bias is not None:
        yield NamedTensor(prefix + names.selection_bias, _quantized(moe.choice.bias), "bias")
    yield from _expert_linears(prefix, names.expert_up, moe.experts.up)
    yield from _expert_linears(prefix, (names.expert_down,), moe.experts.down)
    if moe.router_norm is not None and moe.choice.expert_scales is not None:
        scale = np.asarray(moe.router_norm.weight) * np.float32(len(moe.router_norm.weight) ** 0.5)
        yield NamedTensor(prefix + names.router_scale, _quantized(scale), "state")
        yield NamedTensor(prefix + names.expert_scales, _quantized(moe.choice.expert_scales), "state")
        yield from norm_tensors(prefix + names.expert_norm, moe.input_norm)
        yield from norm_tensors(prefix + names.post_expert_norm, moe.output_norm)
        yield from norm_tensors(prefix + names.post_shared_norm, moe.mlp_output_norm)
        yield from _linear(prefix, names.up, layer.up)
        yield from _linear(prefix, (names.down,), layer.down)
    elif layer.up.parts:
        yield from _linear(prefix, names.shared_up, layer.up)
        yield from _linear(prefix, (names.shared_down,), layer.down)
    if moe.shared_gate is not None:
        yield NamedTensor(f"{prefix}{names.shared_gate}.weight", _quantized(moe.shared_gate.parts[0]), "router")


def _expert_linears(prefix: str, names: tuple[str, ...], linears: tuple[Linear, ...]) -> Iterator[NamedTensor]:
    """A tensor for each expert, or one of all, by the names of the file."""
    linears = tuple(_in_parts(linear, len(names)) for linear in linears)
    for number, name in enumerate(names):
        matrices = tuple(_quantized(linear.parts[number]) for linear in linears)
        if "{}" in name:
            for expert, matrix in enumerate(matrices):
                yield NamedTensor(f"{prefix}{name.format(expert)}.weight", matrix, "matrix")
            continue
        yield NamedTensor(f"{prefix}{name}.weight", TensorStack(matrices), "matrix")
        biases = [bias for linear in linears if (bias := linear.biases[number]) is not None]
        if biases:
            yield NamedTensor(f"{prefix}{name}.bias", _quantized(np.stack(biases)), "bias")


def _final_norm(weights: ModelWeights) -> Norm:
    """The last norm without the scale of the logits, which files store separately."""
    norm, scale = weights.final_norm, weights.config.logit_scale
    if scale == 1.0:
        return norm
    return replace(norm, weight=norm.weight / scale, bias=None if norm.bias is None else norm.bias / scale)


def norm_tensors(name: str, norm: Norm | None) -> Iterator[NamedTensor]:
    if norm is None:
        return
    yield NamedTensor(name + ".weight", _quantized(norm.weight), "norm")
    if norm.bias is not None:
        yield NamedTensor(name + ".bias", _quantized(norm.bias), "bias")


def _quantized(value: object) -> QuantizedTensor:
    return value if isinstance(value, QuantizedTensor) else QuantizedTensor.from_array(np.asarray(value))
