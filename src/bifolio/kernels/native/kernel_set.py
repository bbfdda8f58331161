"""The CPU kernels in C++ (`native/`): weights packed at load, one call for a whole step.

The network is recorded once for each phase as a program (`program`), which replays it for any batch without Python
between the operations. An operation that is called separately, on numpy arrays, is a program of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from bifolio.config import NUMERICS
from bifolio.errors import ConfigError, PhaseError
from bifolio.kernels import entries
from bifolio.kernels.entries import Entries
from bifolio.kernels.host_arrays import HostArrays
from bifolio.kernels.host_routing import route_rows
from bifolio.kernels.interface import (
    Adapter,
    AdapterUse,
    Array,
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Batch,
    Compressor,
    Experts,
    HeadLinear,
    Heads,
    Linear,
    LowRank,
    Network,
    Norm,
    Recurrence,
    Router,
    Routing,
    Segments,
    StepProgram,
    Storage,
)
from bifolio.kernels.native.arguments import (
    ACTIVATION_CODES,
    floats,
    native_adapters,
    native_cache,
    native_recurrence,
    native_states,
    state_arrays,
)
from bifolio.kernels.native.expert_calls import NativeExpertCalls
from bifolio.kernels.native.formats import NATIVE_FORMATS, format_code
from bifolio.kernels.native.library import isa, library, library_digest
from bifolio.kernels.native.operations import NativeOperations
from bifolio.kernels.native.program import NativeProgram, native_segment
from bifolio.kernels.native.ranks import SharedMemoryRanks
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.quant.convert import DENSE_FORMATS, convert
from bifolio.quant.formats import QuantFormat
from bifolio.quant.mapped import mapping_of
from bifolio.quant.tensor import QuantizedTensor

ACTIVATION_PLANES = {"int8": 1, "int16": 2}  # bytes of one activation in products with quantised weights
TEMPORARY_BLOCK = 64  # tokens of a block of the temporary cache, for passes without a cache


class NativeKernels(Entries, NativeOperations, HostArrays):
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

    def build_facts(self) -> dict[str, str]:
        return {"isa": isa(), "library": library_digest()}

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

    def expert_calls(self) -> NativeExpertCalls:
        return NativeExpertCalls(self.native, self.pool)

    def prepare_head_linear(self, linear: HeadLinear) -> HeadLinear:
        return replace(
            linear, prepared=self.native.Heads([self.prepare_linear(head).prepared for head in linear.heads])
        )

    def prepare_norm(self, norm: Norm) -> Norm:
        return replace(norm, weight=floats(norm.weight), bias=None if norm.bias is None else floats(norm.bias))

    def prepare_recurrence(self, recurrence: Recurrence) -> Recurrence:
        return replace(recurrence, prepared=native_recurrence(recurrence))

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any:
        """Read rows directly from the mapped file: only pages of tokens that occur become resident."""
        tensor = as_tensor(table)
        code, data = self._accepted(tensor)
        return self.native.Table(code, data, tensor.shape[1])

    def prepare_adapter(self, adapter: Adapter) -> Adapter:
        """Pack the matrices on the calling thread: the threads of the engine are not stopped."""
        alone = self.native.Pool(1)

        def matrix(value: Array, bias: Array | None = None) -> Any:
            code, data = self._accepted(as_tensor(value))
            own = None if bias is None else floats(bias)
            return self.native.make_linear([(code, data)], value.shape[1], own, 1, False, alone)

        def packed(part: LowRank) -> tuple[int, Any, Any]:
            down = None if part.down is None else matrix(part.down)
            return part.column, down, matrix(part.up, part.bias)

        def table(part: LowRank) -> tuple[Any, Any]:
            down = None if part.down is None else self.prepare_embedding(np.asarray(part.down, np.float32))
            return self.prepare_embedding(part.up), down

        products = [(site, *packed(part)) for site, parts in adapter.products.items() for part in parts]
        experts = [
            (site, number, side, *packed(part))
            for site, each in adapter.experts.items()
            for number, sides in enumerate(each)
            for side, parts in enumerate(sides)
            for part in parts
        ]
        return replace(
            adapter, prepared=self.native.Adapter(products, experts, [table(part) for part in adapter.embedding])
        )

    def _accepted(self, tensor: QuantizedTensor) -> tuple[int, np.ndarray]:
        """The native code of a format, and the bytes of the file; integers and doubles are converted."""
        accepted = convert(tensor, self.formats)
        return format_code(self.native, accepted.format), np.ascontiguousarray(accepted.data)

    # -- a whole step -------------------------------------------------------------------------------------
    def record(self, network: Network, phase: AttentionPhase) -> StepProgram | None:
        """The network as one native call; None: numpy computes some of its operations."""
        is_apart = any(shape.has_entries or shape.has_identities for shape in network.shapes)
        return None if is_apart else NativeProgram(self, network)

    # -- operations -------------------------------------------------------------------------------------
    @property
    def kernels(self) -> NativeKernels:
        return self

    def run(self, name: str, values: Sequence[Any], *constants: Any, **batch: Any) -> Any:
        """Record a program of one operation and run it: arrays in, arrays out."""
        program, given = self.native.Program(), []

        def register(value: Any) -> Any:
            if isinstance(value, list):
                return [register(each) for each in value]
            if value is None:
                return -1
            given.append(floats(value))
            return program.given(given[-1].shape[1])

        numbers = getattr(program, name)(*map(register, values), *constants)
        every = numbers if isinstance(numbers, tuple) else (numbers,)
        inputs = self._inputs(**batch)
        rows = len(given[0] if given else next(iter(inputs.values())))
        fresh = {n: np.empty((rows, program.width(n)), np.float32) for n in every if n >= len(given)}
        program.finish(list(fresh))
        program.run(given=given, results=list(fresh.values()), share=self.share_prefixes, pool=self.pool, **inputs)
        results = tuple(fresh[n] if n in fresh else given[n] for n in every)  # a given one: changed in place
        return results if isinstance(numbers, tuple) else results[0]

    def _inputs(
        self,
        *,
        ids: Array | None = None,
        positions: Array | None = None,
        slots: Array | None = None,
        segments: Segments = (),
        states: Batch | None = None,
        adapters: AdapterUse | None = None,
        storage: Storage | None = None,
    ) -> dict[str, Any]:
        """The inputs of a pass as a program takes them."""
        found: dict[str, Any] = {} if states is None else dict(state_arrays(states))
        found.update(native_adapters(adapters))
        for name, array in (("ids", ids), ("positions", positions)):
            if array is not None:
                found[name] = np.ascontiguousarray(array, np.int32)
        if storage is not None and states is not None:
            found["states"] = self.states(storage)
        elif storage is not None and (slots is not None or segments):
            found["cache"], found["segments"] = self.cache(storage), [native_segment(each) for each in segments]
            found["slots"] = None if slots is None else np.ascontiguousarray(slots, np.int64)
        return found

    def cached(
        self, heads: Heads, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> tuple[AttentionShape, Segments, Storage | None]:
        """The batch's own keys and values become a cache where it has none."""
        if storage is not None and all(segment.block_tables is not None for segment in segments):
            return shape, segments, storage
        if any(segment.phase is AttentionPhase.DECODE for segment in segments):
            raise PhaseError("decode reads the cache: pass a storage and block tables")
        storage, segments = temporary_cache(heads, shape, segments)
        return replace(shape, layer=0), segments, storage

    def attend_entries(
        self,
        query: Array,
        key: Array,
        entry_rows: Array | None,
        chosen: Array | None,
        compressor: Compressor | None,
        shape: AttentionShape,
        batch: Batch,
        storage: Storage | None,
    ) -> Array:
        """The keys of a query are gathered, and become the context of a sequence of its own."""

        def attend_rows(query: Array, keys: Array, lengths: NDArray[np.int32], shape: AttentionShape) -> Array:
            storage, segment = gathered_cache(keys, lengths, batch.segments[0])
            own = replace(shape, layer=0, window=None)
            return self.attend(Heads(query, None, None), own, (segment,), storage)

        given = query, key, entry_rows, chosen, compressor, shape, batch, storage
        return entries.attend_entries(self, *given, attend_rows)

    def route(self, logits: Array, router: Router) -> Routing:
        """Scores that the router in C++ lacks are those of numpy."""
        if router.scoring == "sqrt_softplus" and isinstance(logits, np.ndarray):
            return route_rows(logits, router)
        return super().route(logits, router)

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

    def cache(self, storage: Storage) -> Any:
        """The native view of the storage's arrays."""
        native = self._caches.get(storage)
        if native is None:
            native = self._caches[storage] = native_cache(storage)
        return native

    def states(self, storage: Storage) -> Any:
        """The native view of the storage's recurrent states; None: it has none."""
        if storage not in self._states:
            self._states[storage] = native_states(storage)
        return self._states[storage]


def temporary_cache(heads: Heads, shape: AttentionShape, segments: Segments) -> tuple[Storage, Segments]:
    """The batch's own keys and values as a cache of one layer, for passes without a cache."""
    size, next_block, found = TEMPORARY_BLOCK, 0, []
    index = np.empty(len(heads.query), np.int64)
    for segment in segments:
        starts = np.asarray(segment.query_starts, np.int32)
        lengths = np.diff(starts)
        counts = -(-lengths // size)
        tables = np.zeros((len(lengths), max(counts)), np.int32)
        for i, (start, length, count) in enumerate(zip(starts, lengths, counts, strict=False)):
            tables[i, :count] = np.arange(next_block, next_block + count)
            first = segment.token_start + start
            index[first : first + length] = next_block * size + np.arange(length)
            next_block += int(count)
        found.append(replace(segment, query_starts=starts, context_lens=lengths, block_tables=tables))
    storage = KVStorage(CacheLayout(1, next_block, size, shape.num_kv_heads, shape.head_dim, "f32"))
    storage.write(0, index, heads.key, heads.value)
    return storage, tuple(found)


def gathered_cache(
    keys: Array, lengths: NDArray[np.int32], segment: AttentionSegment
) -> tuple[Storage, AttentionSegment]:
    """The first of keys [n, longest, head size], which are the values, as contexts of n sequences of one query each."""
    count, length, dim = keys.shape
    blocks = -(-length // TEMPORARY_BLOCK)
    storage = KVStorage(CacheLayout(1, count * blocks, TEMPORARY_BLOCK, 1, dim, "f32", shared_values=True))
    storage.keys[0].reshape(count, -1, dim)[:, :length] = keys
    own = replace(
        segment,
        phase=AttentionPhase.DECODE,
        token_start=0,
        token_end=count,
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=lengths,
        block_tables=np.arange(count * blocks, dtype=np.int32).reshape(count, blocks),
        fresh=False,
        max_query_len=1,
        max_context_len=length,
        causal=True,
    )
    return storage, own


def as_tensor(value: QuantizedTensor | Array) -> QuantizedTensor:
    return value if isinstance(value, QuantizedTensor) else QuantizedTensor.from_array(np.asarray(value))


def _joined_bias(linear: Linear) -> np.ndarray | None:
    if all(bias is None for bias in linear.biases):
        return None
    parts = zip(linear.parts, linear.biases, strict=True)
    return np.concatenate([np.zeros(part.shape[0], np.float32) if b is None else floats(b) for part, b in parts])
