"""The CPU kernels in C++ (`native/`): weights packed at load, one call for a whole step.

The network is recorded once for each phase as a program (`program`), which replays it for any batch without Python
between the operations. Every verb can also be called by itself, on numpy arrays.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from bifolio.config import NUMERICS
from bifolio.errors import ConfigError
from bifolio.kernels.host_arrays import HostArrays
from bifolio.kernels.interface import (
    Array,
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Batch,
    Heads,
    Linear,
    Network,
    Norm,
    Rotation,
    StepProgram,
    Storage,
)
from bifolio.kernels.native.library import library
from bifolio.kernels.native.program import ACTIVATION_CODES, PHASE_CODES, NativeProgram, native_segment
from bifolio.quant.convert import convert, target_format
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

FORMAT_CODES = {name: code for code, name in enumerate(("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"))}
ACTIVATION_PLANES = {"int8": 1, "int16": 2}  # bytes of one activation in products with quantised weights
KV_CODES = {"f32": 0, "f16": 1, "bf16": 2, "q8_0": 3}
TEMPORARY_BLOCK = 64  # tokens of a block when keys and values are not cached anywhere


class NativeKernels(HostArrays):
    """Every verb of the network on the machine's best instruction set. Arrays are float32."""

    name = "native"
    formats = frozenset(QuantFormat[name] for name in FORMAT_CODES)

    def __init__(
        self,
        threads: int | None = NUMERICS.threads,
        activations: str = NUMERICS.activations,
        share_prefixes: bool = True,
    ) -> None:
        """`activations`: how they meet quantised weights. "int8" is the usual way (on AMX, whose tiles multiply them as
        bfloat16, it is less rounding than the name says); "int16" adds a second byte for what the first leaves over,
        which makes quantised weights give what they would with exact activations.
        `threads`: of a pool of this kernel set alone; None shares the pool of the process (`set_num_threads`).
        `share_prefixes`: attention reads blocks that contexts have in common once; the same bits either way."""
        if activations not in ACTIVATION_PLANES:
            raise ConfigError(f"activations must be one of {', '.join(ACTIVATION_PLANES)}, not {activations!r}")
        self.native = library()
        self._planes = ACTIVATION_PLANES[activations]
        self.share_prefixes = share_prefixes
        self.pool = None if threads is None else self.native.Pool(threads)  # None: the pool of the process
        self._caches: WeakKeyDictionary[Storage, Any] = WeakKeyDictionary()
        self._last_table: tuple[QuantizedTensor, ref[np.ndarray]] | None = None  # as given, and as converted

    # -- weights ----------------------------------------------------------------------------------------
    def prepare_linear(self, linear: Linear) -> Linear:
        """Pack the parts side by side; the bytes of the file are not looked at again."""
        tensors = [as_tensor(part) for part in linear.parts]
        parts = [self._accepted(tensor) for tensor in tensors]
        packed = self.native.make_linear(parts, tensors[0].shape[1], _joined_bias(linear), self._planes, self.pool)
        for tensor in tensors:
            release_pages(tensor.data)
        return replace(linear, prepared=packed)

    def prepare_norm(self, norm: Norm) -> Norm:
        return replace(norm, weight=_floats(norm.weight), bias=None if norm.bias is None else _floats(norm.bias))

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any:
        """Rows are read where they lie in the file: only those of tokens that occur become resident.

        A table in another format is converted and kept; the head of a model with tied embeddings is packed from it.
        """
        tensor = as_tensor(table)
        code, data = self._accepted(tensor)
        if data is not tensor.data:
            self._last_table = tensor, ref(data)
            release_pages(tensor.data)
        return self.native.Table(code, data, tensor.shape[1])

    def _accepted(self, tensor: QuantizedTensor) -> tuple[int, np.ndarray]:
        """The native code of a format of the set, and the bytes of the tensor in that format."""
        code = FORMAT_CODES[target_format(tensor.format, self.formats).name]
        if self._last_table is not None and self._last_table[0] is tensor:
            data = self._last_table[1]()
            if data is not None:
                return code, data
        return code, np.ascontiguousarray(convert(tensor, self.formats).data)

    # -- a whole step -------------------------------------------------------------------------------------
    def record(self, network: Network, phase: AttentionPhase) -> StepProgram:
        """The network as one native call."""
        return NativeProgram(self, network)

    # -- verbs ------------------------------------------------------------------------------------------
    def embed(self, table: Any, ids: Array, scale: float) -> Array:
        out = np.empty((len(ids), table.width), np.float32)
        self.native.embed(table, np.ascontiguousarray(ids, np.int32), scale, out, self.pool)
        return out

    def rotation(self, inverse_frequencies: Array, scale: float, positions: Array) -> Rotation:
        shape = (len(positions), len(inverse_frequencies))
        cosine, sine = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.native.rotation(
            _floats(inverse_frequencies), scale, np.ascontiguousarray(positions, np.int32), cosine, sine, self.pool
        )
        return Rotation(cosine, sine)

    def norm(self, x: Array, norm: Norm) -> Array:
        x = _floats(x)
        out = np.empty_like(x)
        self.native.norm(x.reshape(-1, x.shape[-1]), self.native_norm(norm), out.reshape(-1, x.shape[-1]), self.pool)
        return out

    def add(self, x: Array, y: Array) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.add(_floats(x), _floats(y), out, self.pool)
        return out

    def add_norm(self, x: Array, delta: Array, norm: Norm) -> tuple[Array, Array]:
        total, normed = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
        self.native.add_norm(_floats(x), _floats(delta), self.native_norm(norm), total, normed, self.pool)
        return total, normed

    def linear(self, x: Array, linear: Linear) -> Array:
        packed = self.packed(linear)
        out = np.empty((x.shape[0], packed.out_features), np.float32)
        self.native.linear(_floats(x), packed, out, self.pool)
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
        first_value = shape.num_heads + shape.num_kv_heads
        return Heads(heads[:, : shape.num_heads], heads[:, shape.num_heads : first_value], heads[:, first_value:])

    def attend(
        self, heads: Heads, shape: AttentionShape, segments: tuple[AttentionSegment, ...], storage: Storage | None
    ) -> Array:
        query = _floats(heads.query).reshape(len(heads.query), -1)
        out = np.empty(query.shape, np.float32)
        if storage is None or any(segment.block_tables is None for segment in segments):
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
        self.native.act_mul(_floats(x), ACTIVATION_CODES[activation], out, self.pool)
        return out

    def act(self, x: Array, activation: str) -> Array:
        out = np.empty(x.shape, np.float32)
        self.native.act(_floats(x), ACTIVATION_CODES[activation], out, self.pool)
        return out

    def logits(self, x: Array, head: Linear, softcap: float) -> Array:
        out = self.linear(x, head)
        if softcap:
            self.native.softcap(out, softcap, self.pool)
        return out

    def argmax(self, logits: Array) -> np.ndarray:
        """The first of the largest of each row: i64[r]."""
        out = np.empty(logits.shape[0], np.int64)
        self.native.argmax(_floats(logits), out, self.pool)
        return out

    # -- native counterparts ------------------------------------------------------------------------------
    def packed(self, linear: Linear) -> Any:
        return linear.prepared if linear.prepared is not None else self.prepare_linear(linear).prepared

    def native_norm(self, norm: Norm) -> Any:
        bias = None if norm.bias is None else _floats(norm.bias)
        return self.native.Norm(_floats(norm.weight), bias, norm.eps, norm.centered)

    def native_shape(self, shape: AttentionShape) -> Any:
        norms = [None if norm is None else self.native_norm(norm) for norm in (shape.query_norm, shape.key_norm)]
        return self.native.AttentionShape(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.scale,
            shape.window or 0,
            shape.rope_interleaved,
            *norms,
        )

    def cache(self, storage: Storage) -> Any:
        """The storage's arrays as the native module sees them."""
        native = self._caches.get(storage)
        if native is None:
            native = self.native.Cache(storage.keys, storage.values, KV_CODES[storage.dtype], storage.head_dim)
            self._caches[storage] = native
        return native

    def _temporary_cache(
        self, heads: Heads, shape: AttentionShape, segments: tuple[AttentionSegment, ...]
    ) -> tuple[Any, list[tuple[Any, ...]]]:
        """The batch's own keys and values as a cache of one layer: what training and tests attend over."""
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
        return self.native.Cache([keys], [values], KV_CODES["f32"], shape.head_dim), described


def as_tensor(value: QuantizedTensor | Array) -> QuantizedTensor:
    return value if isinstance(value, QuantizedTensor) else QuantizedTensor.from_array(np.asarray(value))


def release_pages(array: np.ndarray) -> None:
    """Drop the pages of a read-only file map that were only read to be packed; they come back when touched."""
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, mmap.mmap) or array.flags.writeable or not hasattr(mmap, "MADV_DONTNEED"):
        return
    whole = np.frombuffer(owner, np.uint8)
    begin = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (begin + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        owner.madvise(mmap.MADV_DONTNEED, first, last - first)


def _floats(array: Array) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32)


def _joined_bias(linear: Linear) -> np.ndarray | None:
    if all(bias is None for bias in linear.biases):
        return None
    parts = zip(linear.parts, linear.biases, strict=True)
    return np.concatenate([np.zeros(part.shape[0], np.float32) if b is None else _floats(b) for part, b in parts])
