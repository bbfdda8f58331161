"""The definition of every operation, written once against the array API.

Runs on numpy without torch installed, and on torch tensors, where it is differentiable. Clarity comes before speed:
every other kernel set is tested against this one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.arrays import array_namespace
from bifolio.errors import PhaseError
from bifolio.kernels.entries import Entries
from bifolio.kernels.host_arrays import HostArrays
from bifolio.kernels.host_choice import HostChoice
from bifolio.kernels.host_math import as_float32, erf
from bifolio.kernels.host_routing import route_rows
from bifolio.kernels.interface import (
    LEAST_MEAN_SQUARE,
    SILU_LIMIT,
    SWIGLU_LIMIT,
    SWIGLU_SLOPE,
    Adapter,
    AdapterUse,
    Array,
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Batch,
    Experts,
    HeadLinear,
    Heads,
    Linear,
    Network,
    Norm,
    Recurrence,
    Rotation,
    Router,
    Routing,
    Segments,
    StepProgram,
    Storage,
    XieluCoefficients,
)
from bifolio.kernels.recurrence import recur, scan
from bifolio.kernels.reference_adapters import DOWN, UP, changed, changed_embedding, of_expert
from bifolio.kernels.reference_attention import attend_heads, scale_by_position
from bifolio.long_rope import LONG_ROPE, set_of
from bifolio.quant.formats import READABLE_FORMATS
from bifolio.quant.tensor import QuantizedTensor


class ReferenceKernels(Entries, HostArrays, HostChoice):
    """Every operation in at most 30 lines."""

    name = "reference"
    formats = READABLE_FORMATS  # rows are dequantised when they are used
    deterministic = False  # numpy's matrix products choose their order of summation by the number of rows

    def record(self, network: Network, phase: AttentionPhase) -> StepProgram | None:
        return None

    # -- weights ------------------------------------------------------------------------------------------
    def prepare_linear(self, linear: Linear) -> Linear:
        return replace(linear, parts=tuple(_held(part) for part in linear.parts))

    def prepare_norm(self, norm: Norm) -> Norm:
        return norm

    def prepare_experts(self, experts: Experts) -> Experts:
        up, down = (tuple(self.prepare_linear(each) for each in side) for side in (experts.up, experts.down))
        return replace(experts, up=up, down=down)

    def prepare_head_linear(self, linear: HeadLinear) -> HeadLinear:
        return replace(linear, heads=tuple(self.prepare_linear(head) for head in linear.heads))

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any:
        return _held(table)

    def prepare_recurrence(self, recurrence: Recurrence) -> Recurrence:
        return recurrence

    def prepare_adapter(self, adapter: Adapter) -> Adapter:
        return adapter

    # -- the network --------------------------------------------------------------------------------------
    def embed(self, table: Any, ids: Array, scale: float, *, is_partial: bool = False) -> Array:
        ids = ids * (ids < table.shape[0]) if is_partial else ids
        rows = table.dequantize_rows(ids) if isinstance(table, QuantizedTensor) else table[ids]
        return rows if scale == 1.0 else rows * scale

    def rotation(self, inverse_frequencies: Array, scale: float, positions: Array) -> Rotation:
        xp = array_namespace(inverse_frequencies)
        own = set_of(inverse_frequencies, positions)
        angles = xp.astype(positions % LONG_ROPE, own.dtype)[:, None] * own
        return Rotation(xp.cos(angles) * scale, xp.sin(angles) * scale)

    def norm(self, x: Array, norm: Norm) -> Array:
        xp = array_namespace(x)
        y = xp.reshape(as_float32(xp, x), (-1, norm.weight.shape[0]))
        if norm.centered:
            y = y - xp.mean(y, axis=-1, keepdims=True)
        y = y / xp.sqrt(xp.mean(y * y, axis=-1, keepdims=True) + norm.eps) * norm.weight
        return xp.astype(xp.reshape(y if norm.bias is None else y + norm.bias, x.shape), x.dtype)

    def add(self, x: Array, y: Array, scale: float = 1.0) -> Array:
        return x + y if scale == 1.0 else (x + y) * scale

    def add_norm(self, x: Array, delta: Array, norm: Norm) -> tuple[Array, Array]:
        x = self.add(x, delta)
        return x, self.norm(x, norm)

    def linear(self, x: Array, linear: Linear) -> Array:
        outputs = []
        for weight, bias in zip(linear.parts, linear.biases, strict=True):
            y = weight.matmul(x) if isinstance(weight, QuantizedTensor) else x @ weight.T
            outputs.append(y if bias is None else y + bias)
        return outputs[0] if len(outputs) == 1 else array_namespace(x).concat(outputs, axis=-1)

    def adapt_embedding(self, x: Array, ids: Array, scale: float, adapters: AdapterUse) -> Array:
        return changed_embedding(x, ids, scale, adapters)

    def adapt(self, y: Array, x: Array, site: int, adapters: AdapterUse) -> Array:
        for number, adapter in enumerate(adapters.loaded):
            rows = np.flatnonzero(adapters.rows == number)
            y = changed(y, x, rows, adapter.products.get(site, ()))
        return y

    def head_linear(self, x: Array, linear: HeadLinear, start: int) -> Array:
        columns = x.shape[-1] // len(linear.heads)
        inputs = slice(start, start + linear.heads[0].in_features)
        heads = [self.linear(x[:, h * columns :][:, inputs], each) for h, each in enumerate(linear.heads)]
        return array_namespace(x).concat(heads, axis=-1)

    def join_latent(self, query: Array, absorbed: Array, latent: Array, norm: Norm, rope: int) -> Array:
        xp, size = array_namespace(query), latent.shape[-1] - rope
        heads = absorbed.shape[-1] // size
        turned = xp.reshape(query, (-1, heads, query.shape[-1] // heads))[..., -rope:]
        queries = xp.concat([turned, xp.reshape(absorbed, (-1, heads, size))], axis=-1)
        key = xp.concat([latent[:, size:], self.norm(latent[:, :size], norm)], axis=-1)
        return xp.concat([xp.reshape(queries, (-1, heads * (rope + size))), key, key], axis=-1)

    def rope_and_write(
        self, qkv: Array, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        xp = array_namespace(qkv)
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        split = heads * dim, (heads + kv_heads) * dim
        query = xp.reshape(qkv[:, : split[0]], (-1, heads, dim))
        if shape.queries_only:
            return Heads(self._turned(query, shape.query_norm, shape, rotation), None, None)
        key = xp.reshape(qkv[:, split[0] : split[1]], (-1, kv_heads, dim))
        value = self._norm_heads(xp.reshape(qkv[:, split[1] :], (-1, kv_heads, dim)), shape.value_norm)
        query = self._turned(query, shape.query_norm, shape, rotation)
        key = self._turned(key, shape.key_norm, shape, rotation)
        if storage is not None and batch.cache_index is not None:
            storage.write(shape.layer, batch.cache_index, key, value)
        return Heads(query, key, value)

    def _turned(self, heads: Array, norm: Norm | None, shape: AttentionShape, rotation: Rotation | None) -> Array:
        """Heads normed and rotated, in the order of the layer."""
        heads = heads if shape.norm_after_rope else self._norm_heads(heads, norm)
        heads = heads if rotation is None else rotate(heads, rotation, shape.rope_interleaved)
        return self._norm_heads(heads, norm) if shape.norm_after_rope else heads

    def _norm_heads(self, heads: Array, norm: Norm | None) -> Array:
        """Norm each head, or all heads of a token together if the norm is wider than a head."""
        if norm is None:
            return heads
        rows = array_namespace(heads).reshape(heads, (-1, norm.weight.shape[0]))
        return array_namespace(heads).reshape(self.norm(rows, norm), heads.shape)

    def attend(self, heads: Heads, shape: AttentionShape, segments: Segments, storage: Storage | None) -> Array:
        outputs = []
        for segment in segments:
            attend = self._attend_decode if segment.phase is AttentionPhase.DECODE else self._attend_prefill
            starts = [segment.token_start + int(start) for start in segment.query_starts]
            for i in range(segment.num_sequences):
                own = Heads(*(None if part is None else part[starts[i] : starts[i + 1]] for part in heads))
                own = own._replace(query=scale_by_position(own.query, shape, int(segment.context_lens[i])))
                outputs.append(attend(own, shape, segment, i, storage))
        return outputs[0] if len(outputs) == 1 else array_namespace(heads.query).concat(outputs, axis=0)

    def _attend_prefill(
        self, own: Heads, shape: AttentionShape, segment: AttentionSegment, i: int, storage: Storage | None
    ) -> Array:
        """Attention of a chunk of one sequence: over its own keys and values, or over the cache if it has a prefix."""
        keys, values = own.key, own.value
        if storage is not None and segment.block_tables is not None and not segment.fresh:
            keys, values = storage.gather(shape.layer, segment.block_tables[i], int(segment.context_lens[i]))
        return attend_heads(own.query, keys, values, shape, shape.is_causal(segment))

    def _attend_decode(
        self, own: Heads, shape: AttentionShape, segment: AttentionSegment, i: int, storage: Storage | None
    ) -> Array:
        """Attention of the newest token of one sequence, and its drafts, over the cache."""
        if storage is None or segment.block_tables is None:
            raise PhaseError("decode reads the cache: pass a storage and block tables")
        keys, values = storage.gather(shape.layer, segment.block_tables[i], int(segment.context_lens[i]))
        return attend_heads(own.query, keys, values, shape)

    def act_mul(self, x: Array, activation: str, cutoff: float | None = None) -> Array:
        half = x.shape[-1] // 2
        gate, up = x[:, :half], x[:, half:]
        if cutoff is not None:
            xp = array_namespace(x)
            mean = xp.mean(gate, axis=-1, keepdims=True)
            spread = xp.sqrt(xp.mean((gate - mean) ** 2, axis=-1, keepdims=True))
            gate = xp.clip(gate - (mean + spread * cutoff), 0.0, None)
        if activation == "swiglu_clamped":
            xp = array_namespace(x)
            gate, up = xp.clip(gate, None, SWIGLU_LIMIT), xp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * sigmoid(xp, SWIGLU_SLOPE * gate) * (up + 1.0)
        if activation == "silu_clamped":
            xp = array_namespace(x)
            gate, up = xp.clip(gate, None, SILU_LIMIT), xp.clip(up, -SILU_LIMIT, SILU_LIMIT)
            return gate * sigmoid(xp, gate) * up
        return self.act(gate, activation) * up

    def act(self, x: Array, activation: str) -> Array:
        xp = array_namespace(x)
        if activation == "silu":
            return x * sigmoid(xp, x)
        if activation == "relu":
            return xp.clip(x, 0.0, None)
        if activation == "relu2":
            return xp.clip(x, 0.0, None) ** 2
        if activation == "tanh":
            return xp.tanh(x)
        if activation == "sigmoid":
            return sigmoid(xp, x)
        if activation == "gelu_tanh":
            return 0.5 * x * (1.0 + xp.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
        return 0.5 * x * (1.0 + erf(xp, x / math.sqrt(2.0)))

    def clamp(self, x: Array, least: Array, most: Array) -> Array:
        return array_namespace(x).clip(x, least, most)

    def xielu(self, x: Array, coefficients: XieluCoefficients) -> Array:
        xp, (positive, negative, linear, most) = array_namespace(x), coefficients
        below = negative * (xp.expm1(xp.clip(x, None, most)) - x)
        return linear * x + xp.where(x > 0, positive * x * x, below)

    def weigh(self, x: Array, routing: Routing) -> Array:
        return x * routing.weights[:, :1]

    def gate(self, x: Array, logits: Array) -> Array:
        parts = x.reshape(*logits.shape, x.shape[-1] // logits.shape[-1])
        return (sigmoid(array_namespace(x), logits)[..., None] * parts).reshape(x.shape)

    def route(self, logits: Array, router: Router) -> Routing:
        return route_rows(logits, router)

    def mix_experts(self, x: Array, routing: Routing, experts: Experts, adapters: AdapterUse | None = None) -> Array:
        parts = np.zeros((*routing.experts.shape, experts.down[0].out_features), np.float32)  # [t, top_k, d]
        for number, (up, down) in enumerate(zip(experts.up, experts.down, strict=True)):
            tokens, choices = np.nonzero(routing.experts == number)
            if len(tokens):
                own = None if adapters is None else of_expert(adapters, tokens, experts.site, number)
                hidden = self.linear(x[tokens], up)
                hidden = hidden if own is None else self.adapt(hidden, x[tokens], UP, own)
                hidden = (self.act_mul if experts.gated else self.act)(hidden, experts.activation)
                y = self.linear(hidden, down)
                parts[tokens, choices] = y if own is None else self.adapt(y, hidden, DOWN, own)
        return (parts * routing.weights[..., None]).sum(axis=1)

    def recur(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        return recur(x, recurrence, batch, storage)

    def scan(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        return scan(x, recurrence, batch, storage)

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        xp, count, size = array_namespace(x), coefficients.shape[-1] // streams, x.shape[-1] // streams
        factors = xp.reshape(coefficients, (len(x), count, streams))
        return xp.reshape(factors @ xp.reshape(x, (len(x), streams, size)), (len(x), count * size))

    def add_to_streams(self, x: Array, y: Array, coefficients: Array | tuple[float, ...]) -> Array:
        xp, size = array_namespace(x), y.shape[-1]
        streams = xp.reshape(x, (len(x), x.shape[-1] // size, size))
        return xp.reshape(streams + xp.asarray(coefficients, dtype=x.dtype)[..., None] * y[:, None, :], x.shape)

    def match_streams(self, x: Array, y: Array) -> Array:
        xp, size = array_namespace(x), x.shape[-1]
        streams = xp.reshape(y, (len(x), y.shape[-1] // size, size))
        target = xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True))[:, None, :]
        found = xp.mean(streams * streams, axis=-1, keepdims=True)
        return xp.reshape(streams * (target / xp.sqrt(xp.clip(found, LEAST_MEAN_SQUARE, None))), y.shape)

    def logits(self, x: Array, head: Linear, softcap: float, batch: Batch | None = None) -> Array:
        y = self.linear(x, head)
        if batch is not None and batch.logit_adapters is not None:
            y = self.adapt(y, x, head.site, batch.logit_adapters)
        xp = array_namespace(y)
        y = as_float32(xp, y)
        return xp.tanh(y / softcap) * softcap if softcap else y


def rotate(x: Array, rotation: Rotation, interleaved: bool) -> Array:
    """Rotate each pair of dimensions by its angle; dimensions past the rotated ones are unchanged."""
    xp = array_namespace(x)
    cos, sin = rotation.cos[:, None, :], rotation.sin[:, None, :]
    half = rotation.cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    first, second = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        turned = xp.reshape(xp.stack([first, second], axis=-1), turned.shape)
    else:
        turned = xp.concat([first, second], axis=-1)
    return xp.astype(xp.concat([turned, rest], axis=-1) if rest.shape[-1] else turned, x.dtype)


def sigmoid(xp: Any, x: Array) -> Array:
    """1 / (1 + exp(−x)) without overflow."""
    return 0.5 * (1.0 + xp.tanh(0.5 * x))


def _held(weight: Any) -> Any:
    return weight.held() if isinstance(weight, QuantizedTensor) else weight
