"""The CPU kernels in C++ (`native/`): weights packed at load, one call for a whole step.

The network is recorded once for each phase as a program (`program`), which replays it for any batch without Python
between the operations. Every operation can also be called separately, on numpy arrays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from bifolio.config import NUMERICS
from bifolio.errors import ConfigError, PhaseError
from bifolio.kernels.host_arrays import HostArrays
from bifolio.kernels.interface import (
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
    StepProgram,
    Storage,
)
from bifolio.kernels.native.arguments import ACTIVATION_CODES, floats, native_norm
from bifolio.kernels.native.formats import NATIVE_FORMATS, format_code
from bifolio.kernels.native.library import library
from bifolio.kernels.native.program import PHASE_CODES, NativeProgram, native_segment
from bifolio.kernels.native.ranks import SharedMemoryRanks
from bifolio.kernels.native.recurrence import native_recurrence, native_states, state_arrays
from bifolio.kernels.native.streams import NativeStreams
from bifolio.quant.convert import DENSE_FORMATS, convert
from bifolio.quant.formats import QuantFormat
from bifolio.quant.mapped import mapping_of
from bifolio.quant.tensor import QuantizedTensor

ACTIVATION_PLANES = {"int8": 1, "int16": 2}  # bytes of one activation in products with quantised weights
KV_CODES = {"f32": 0, "f16": 1, "bf16": 2, "q8_0": 3}
TEMPORARY_BLOCK = 64  # tokens of a block of the temporary cache, for passes without a cache


class NativeKernels(HostArrays, NativeStreams):
    """Every operation of the network in the machine's best instruction set. Arrays are float32."""

    name = "native"
    formats: frozenset[QuantFormat] = NATIVE_FORMATS

    def __init__(
        self,
        threads: int | None = NUMERICS.threads,
        activations: str = "int8",
        share_prefixes: bool = True,
    ) -> None:
        """`activations`: their rounding in products with quantised weights. "int8" is the faster (on AMX, whose tiles
        multiply bfloat16, it rounds less than 8 bits do); "int16" adds a second byte for the rounding error of the
        first, which gives nearly the result of exact activations. `LLM` chooses by the size of the model.
        `threads`: of a pool of this kernel set alone; None shares the pool of the process (`set_num_threads`).
        `share_prefixes`: attention reads blocks shared by several contexts once; results are bit-identical."""
        if activations not in ACTIVATION_PLANES:
            raise ConfigError(f"activations must be one of {', '.join(ACTIVATION_PLANES)}, not {activations!r}")
        self.native = library()
        self.activation_planes = ACTIVATION_PLANES[activations]
        self.share_prefixes = share_prefixes
        self.pool = None if threads is None else self.native.Pool(threads)  # None: the pool of the process
        self._caches: WeakKeyDictionary[Storage, Any] = WeakKeyDictionary()
        self._states: WeakKeyDictionary[Storage, Any] = WeakKeyDictionary()

    # -- weights ----------------------------------------------------------------------------------------
    def prepare_linear(self, linear: Linear) -> Linear:
        """Pack the concatenated parts; the bytes of the file are not read again."""
        tensors = [as_tensor(part) for part in linear.parts]
        bias = _joined_bias(linear)
        try:
            packed = self._packed([self._accepted(tensor) for tensor in tensors], tensors[0].shape[1], bias)
        except OverflowError:  # a scale beyond the half floats: dense formats hold it, or refuse it by name
            dense = [self._accepted(convert(tensor, DENSE_FORMATS)) for tensor in tensors]
            packed = self._packed(dense, tensors[0].shape[1], bias)
        return replace(linear, prepared=packed)

    def _packed(self, parts: list[tuple[int, np.ndarray]], k: int, bias: np.ndarray | None) -> Any:
        mapped = all(mapping_of(data) is not None for _, data in parts)
        return self.native.make_linear(parts, k, bias, self.activation_planes, mapped, self.pool)

    def prepare_experts(self, experts: Experts) -> Experts:
        """Pack each expert; `prepared` holds all of them for one native call."""
        up, down = ([self.prepare_linear(linear).prepared for linear in side] for side in (experts.up, experts.down))
        return replace(experts, prepared=self.native.Experts(up, down, ACTIVATION_CODES[experts.activation]))

    def prepare_head_linear(self, linear: HeadLinear) -> HeadLinear:
        return replace(
            linear, prepared=self.native.Heads([self.prepare_linear(head).prepared for head in linear.heads])
        )

    def prepare_norm(self, norm: Norm) -> Norm:
        return replace(norm, weight=floats(norm.weight), bias=None if norm.bias is None else floats(norm.bias))

    def prepare_recurrence(self, recurrence: Recurrence) -> Recurrence:
        return replace(recurrence, prepared=native_recurrence(self.native, recurrence))

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any:
        """Read rows directly from the mapped file: only pages of tokens that occur become resident."""
        tensor = as_tensor(table)
        code, data = self._accepted(tensor)
        return self.native.Table(code, data, tensor.shape[1])

    def _accepted(self, tensor: QuantizedTensor) -> tuple[int, np.ndarray]:
        """The native code of a format, and the bytes of the file; integers and doubles are converted."""
        accepted = convert(tensor, self.formats)
        return format_code(self.native, accepted.format), np.ascontiguousarray(accepted.data)

    # -- a whole step -------------------------------------------------------------------------------------
    def record(self, network: Network, phase: AttentionPhase) -> StepProgram:
        """The network as one native call."""
        return NativeProgram(self, network)

    # -- operations -------------------------------------------------------------------------------------
    def embed(self, table: Any, ids: Array, scale: float) -> Array:
        out = np.empty((len(ids), table.width), np.float32)
        self.native.embed(table, np.ascontiguousarray(ids, np.int32), scale, out, self.pool)
        return out

    def rotation(self, inverse_frequencies: Array, scale: float, positions: Array) -> Rotation:
        shape = (len(positions), inverse_frequencies.shape[-1])
        cosine, sine = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.native.rotation(
            floats(inverse_frequencies).reshape(-1),
            scale,
            np.ascontiguousarray(positions, np.int32),
            cosine,
            sine,
            self.pool,
        )
        return Rotation(cosine, sine)

    def norm(self, x: Array, norm: Norm) -> Array:
        x = floats(x)
        out = np.empty_like(x)
        self.native.norm(
            x.reshape(-1, x.shape[-1]), native_norm(self.native, norm), out.reshape(-1, x.shape[-1]), self.pool
        )
        return out

    def add(self, x: Array, y: Array) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.add(floats(x), floats(y), out, self.pool)
        return out

    def add_norm(self, x: Array, delta: Array, norm: Norm) -> tuple[Array, Array]:
        total, normed = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
        self.native.add_norm(floats(x), floats(delta), native_norm(self.native, norm), total, normed, self.pool)
        return total, normed

    def linear(self, x: Array, linear: Linear) -> Array:
        packed = self.packed(linear)
        out = np.empty((x.shape[0], packed.out_features), np.float32)
        self.native.linear(floats(x), packed, out, self.pool)
        return out

    def head_linear(self, x: Array, linear: HeadLinear, start: int) -> Array:
        out = np.empty((x.shape[0], len(linear.heads) * linear.heads[0].out_features), np.float32)
        self.native.head_linear(floats(x), self.packed_heads(linear), start, out, self.pool)
        return out

    def join_latent(self, query: Array, absorbed: Array, latent: Array, norm: Norm, rope: int) -> Array:
        size = latent.shape[1]
        out = np.empty((len(query), (absorbed.shape[1] // (size - rope) + 2) * size), np.float32)
        rows = floats(query), floats(absorbed), floats(latent)
        self.native.join_latent(*rows, native_norm(self.native, norm), rope, out, self.pool)
        return out

    def rope_and_write(
        self, qkv: Array, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        cached = storage is not None and batch.cache_index is not None
        rotated = np.array(qkv, np.float32, order="C")
        self.native.rope_and_write(
            rotated,
            self.native_shape(shape),
            None if rotation is None else rotation.cos,
            None if rotation is None else rotation.sin,
            self.cache(storage) if cached and storage is not None else None,
            shape.layer,
            np.ascontiguousarray(batch.cache_index, np.int64) if cached else None,
            self.pool,
        )
        heads = rotated.reshape(len(qkv), -1, shape.head_dim)
        if shape.queries_only:
            return Heads(heads, None, None)
        first_value = shape.num_heads + shape.num_kv_heads
        return Heads(heads[:, : shape.num_heads], heads[:, shape.num_heads : first_value], heads[:, first_value:])

    def attend(
        self, heads: Heads, shape: AttentionShape, segments: tuple[AttentionSegment, ...], storage: Storage | None
    ) -> Array:
        query = floats(heads.query).reshape(len(heads.query), -1)
        out = np.empty(query.shape, np.float32)
        if storage is None or any(segment.block_tables is None for segment in segments):
            if any(segment.phase is AttentionPhase.DECODE for segment in segments):
                raise PhaseError("decode reads the cache: pass a storage and block tables")
            cache, described = self._temporary_cache(heads, shape, segments)
            layer = 0
        else:
            cache, described, layer = self.cache(storage), [native_segment(s) for s in segments], shape.layer
        self.native.attend(
            query, self.native_shape(shape), described, self.share_prefixes, cache, layer, out, self.pool
        )
        return out

    def act_mul(self, x: Array, activation: str) -> Array:
        out = np.empty((x.shape[0], x.shape[1] // 2), np.float32)
        self.native.act_mul(floats(x), ACTIVATION_CODES[activation], out, self.pool)
        return out

    def act(self, x: Array, activation: str) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.act(floats(x), ACTIVATION_CODES[activation], out, self.pool)
        return out

    def gate(self, x: Array, logits: Array) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.gate(floats(x), floats(logits), out, self.pool)
        return out

    def route(self, logits: Array, router: Router) -> Routing:
        routing = np.empty((len(logits), 2 * router.top_k), np.float32)
        self.native.route(floats(logits), self.native_router(router, logits.shape[1]), routing, self.pool)
        return Routing(routing.view(np.int32)[:, : router.top_k], routing[:, router.top_k :])

    def mix_experts(self, x: Array, routing: Routing, experts: Experts) -> Array:
        numbers = np.ascontiguousarray(routing.experts, np.int32).view(np.float32)  # native rows hold both as 32 bits
        out = np.empty((len(x), experts.down[0].out_features), np.float32)
        both = np.concatenate([numbers, floats(routing.weights)], axis=1)
        self.native.mix_experts(floats(x), both, self.packed_experts(experts), out, self.pool)
        return out

    def recur(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        out = np.empty((len(x), recurrence.out_features), np.float32)
        states = None if storage is None else self.states(storage)
        native, arrays = self.native_recurrence(recurrence), state_arrays(batch)
        self.native.recur(floats(x), native, recurrence.layer, states, *arrays, out, self.pool)
        return out

    def logits(self, x: Array, head: Linear, softcap: float) -> Array:
        out = self.linear(x, head)
        if softcap:
            self.native.softcap(out, softcap, self.pool)
        return out

    def argmax(self, logits: Array) -> np.ndarray:
        """i64[r]: index of the largest value of each row, the first among equals."""
        out = np.empty(logits.shape[0], np.int64)
        self.native.argmax(floats(logits), out, self.pool)
        return out

    def memory_of_ranks(self) -> Any:
        """The memory through which a program exchanges with other ranks."""
        if not isinstance(self.ranks, SharedMemoryRanks):
            raise ConfigError("these weights are a part of a model: join the ranks that hold the others")
        return self.ranks.native

    # -- native counterparts ------------------------------------------------------------------------------
    def packed(self, linear: Linear) -> Any:
        return linear.prepared if linear.prepared is not None else self.prepare_linear(linear).prepared

    def packed_heads(self, linear: HeadLinear) -> Any:
        return linear.prepared if linear.prepared is not None else self.prepare_head_linear(linear).prepared

    def packed_experts(self, experts: Experts) -> Any:
        return experts.prepared if experts.prepared is not None else self.prepare_experts(experts).prepared

    def native_recurrence(self, recurrence: Recurrence) -> Any:
        return recurrence.prepared or native_recurrence(self.native, recurrence)

    def native_router(self, router: Router, num_experts: int) -> Any:
        return self.native.Router(
            num_experts,
            router.top_k,
            router.scoring == "sigmoid",
            router.renormalise,
            router.scale,
            None if router.bias is None else floats(router.bias),
            router.num_groups,
            router.top_groups,
            router.group_best,
            None if router.expert_scales is None else floats(router.expert_scales),
        )

    def native_shape(self, shape: AttentionShape) -> Any:
        norms = [
            None if norm is None else native_norm(self.native, norm) for norm in (shape.query_norm, shape.key_norm)
        ]
        native = self.native.AttentionShape(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.scale,
            shape.window or 0,
            shape.rope_interleaved,
            *norms,
            shape.norm_after_rope,
            shape.softcap,
            shape.temperature,
            shape.temperature_period,
        )
        if shape.value_norm is not None:
            native = native.with_value_norm(native_norm(self.native, shape.value_norm))
        if shape.queries_only:
            native = native.of_queries()
        return native if shape.sinks is None else native.with_sinks(floats(shape.sinks))

    def cache(self, storage: Storage) -> Any:
        """The native view of the storage's arrays."""
        native = self._caches.get(storage)
        if native is None:
            sizes = [size for _, size in storage.layout.layer_heads]
            native = self.native.Cache(storage.keys, storage.values, KV_CODES[storage.dtype], sizes)
            self._caches[storage] = native
        return native

    def states(self, storage: Storage) -> Any:
        """The native view of the storage's recurrent states; None: it has none."""
        if storage not in self._states:
            self._states[storage] = native_states(self.native, storage)
        return self._states[storage]

    def _temporary_cache(
        self, heads: Heads, shape: AttentionShape, segments: tuple[AttentionSegment, ...]
    ) -> tuple[Any, list[tuple[Any, ...]]]:
        """The batch's own keys and values as a cache of one layer, for passes without a cache."""
        size, described, next_block = TEMPORARY_BLOCK, [], 0
        tokens = heads.query.shape[0]
        sequences = sum(segment.num_sequences for segment in segments)
        blocks = tokens // size + sequences + 1
        keys = np.zeros((blocks, shape.num_kv_heads, size, shape.head_dim), np.float32)
        values = np.zeros_like(keys)
        for segment in segments:
            tables = np.zeros((segment.num_sequences, -(-segment.max_query_len // size)), np.int32)
            starts = np.asarray(segment.query_starts, np.int32)
            for i in range(segment.num_sequences):
                first, last = segment.token_start + starts[i], segment.token_start + starts[i + 1]
                for number, token in enumerate(range(first, last, size)):
                    stop = min(token + size, last)
                    keys[next_block, :, : stop - token] = heads.key[token:stop].transpose(1, 0, 2)
                    values[next_block, :, : stop - token] = heads.value[token:stop].transpose(1, 0, 2)
                    tables[i, number] = next_block
                    next_block += 1
            phase = PHASE_CODES[segment.phase]
            described.append((phase, segment.token_start, starts, np.diff(starts).astype(np.int32), tables))
        return self.native.Cache([keys], [values], KV_CODES["f32"], [shape.head_dim]), described


def as_tensor(value: QuantizedTensor | Array) -> QuantizedTensor:
    return value if isinstance(value, QuantizedTensor) else QuantizedTensor.from_array(np.asarray(value))


def _joined_bias(linear: Linear) -> np.ndarray | None:
    if all(bias is None for bias in linear.biases):
        return None
    parts = zip(linear.parts, linear.biases, strict=True)
    return np.concatenate([np.zeros(part.shape[0], np.float32) if b is None else floats(b) for part, b in parts])
