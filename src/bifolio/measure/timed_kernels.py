"""A timing proxy for any kernel set: time, arithmetic and memory traffic of every operation, by part of the network.

While the clock runs, the proxy replaces the recorded programs of a kernel set, so that a step consists of single
operations; while it does not run, the proxy is transparent and the step runs at full speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bifolio.kernels.interface import (
    Array,
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Batch,
    DeviceMemory,
    Experts,
    HeadLinear,
    Heads,
    KernelSet,
    Linear,
    Network,
    Norm,
    Recurrence,
    Rotation,
    RoutedExperts,
    Router,
    Routing,
    SharedMlp,
    SlotSizes,
    StepProgram,
    Storage,
)
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.measure.part_clock import PartClock
from bifolio.measure.timed_streams import TimedStreams
from bifolio.model.weights import ModelWeights
from bifolio.quant.convert import converted_bytes, target_format
from bifolio.quant.tensor import QuantizedTensor


class TimedKernels(TimedStreams):
    """A kernel set around another; `attach` tells it which matrix belongs to which part."""

    def __init__(self, inner: KernelSet, clock: PartClock) -> None:
        self.inner = inner
        self.name, self.array_backend, self.device = inner.name, inner.array_backend, inner.device
        self.formats, self.kv_dtype, self.deterministic = inner.formats, inner.kv_dtype, inner.deterministic
        self.launches_ahead, self.activation_planes = inner.launches_ahead, inner.activation_planes
        self.ranks = inner.ranks
        self.clock = clock
        self._part_of: dict[int, str] = {}  # id of a Linear -> part; absent: the head
        self._bytes_of: dict[int, int] = {}
        self._integer_shares: dict[int, float] = {}  # id of a Linear -> share of its products that are of integers
        self._pairs: dict[tuple[int, int | None], tuple[int, int]] = {}  # of the segments of the current pass

    def attach(self, weights: ModelWeights) -> None:
        """Map the prepared weights to their parts."""
        for linear, part in products_of(weights):
            self._part_of[id(linear)] = part
            self._learn(linear)
        self._learn(weights.head)

    def _learn(self, linear: Linear) -> None:
        self._bytes_of[id(linear)] = linear_bytes(linear, self.inner)
        if self.activation_planes:
            self._integer_shares[id(linear)] = quantised_share(linear, self.inner)

    # -- arrays, memory and weights: as the set inside has them -------------------------------------------------------
    def from_host(self, array: np.ndarray) -> Array:
        return self.inner.from_host(array)

    def to_host(self, array: Array) -> np.ndarray:
        return self.inner.to_host(array)

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        return self.inner.fetch(array)

    def new_storage(self, layout: CacheLayout) -> KVStorage:
        return self.inner.new_storage(layout)

    def memory(self) -> DeviceMemory | None:
        return self.inner.memory()

    def release_memory(self) -> None:
        self.inner.release_memory()

    def top_logprobs(
        self, logits: Array, rows: np.ndarray, count: int
    ) -> Callable[[], tuple[np.ndarray, np.ndarray]] | None:
        return self.inner.top_logprobs(logits, rows, count)

    def prepare_linear(self, linear: Linear) -> Linear:
        return self.inner.prepare_linear(linear)

    def prepare_norm(self, norm: Norm) -> Norm:
        return self.inner.prepare_norm(norm)

    def prepare_experts(self, experts: Experts) -> Experts:
        return self.inner.prepare_experts(experts)

    def fold_shared(self, routed: RoutedExperts, shared: SharedMlp) -> RoutedExperts | None:
        return self.inner.fold_shared(routed, shared)

    def prepare_head_linear(self, linear: HeadLinear) -> HeadLinear:
        return self.inner.prepare_head_linear(linear)

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any:
        return self.inner.prepare_embedding(table)

    def prepare_recurrence(self, recurrence: Recurrence) -> Recurrence:
        return self.inner.prepare_recurrence(recurrence)

    # -- whole steps --------------------------------------------------------------------------------------------------
    def record(self, network: Network, phase: AttentionPhase) -> StepProgram | None:
        """The set's program, replaced by single operations while the clock runs."""
        program = self.inner.record(network, phase)
        return None if program is None else _SplitProgram(self, network, program)

    def device_slots(self, network: Network, storage: Storage, sizes: SlotSizes) -> None:
        """None: a step that runs as one CUDA graph cannot be split."""
        return

    # -- operations -------------------------------------------------------------------------------------------------
    def embed(self, table: Any, ids: Array, scale: float, *, is_partial: bool = False) -> Array:
        self._pairs.clear()  # start of a pass
        rows = self.clock.timed("embedding", partial(self.inner.embed, is_partial=is_partial), table, ids, scale)
        self.clock.count("embedding", 0, rows.shape[0] * rows.shape[1] * 4)
        return rows

    def rotation(self, inverse_frequencies: Array, scale: float, positions: Array) -> Rotation:
        result: Rotation = self.clock.timed("attention", self.inner.rotation, inverse_frequencies, scale, positions)
        return result

    def norm(self, x: Array, norm: Norm) -> Array:
        return self.clock.timed("norms", self.inner.norm, x, norm)

    def add(self, x: Array, y: Array, scale: float = 1.0) -> Array:
        return self.clock.timed("norms", self.inner.add, x, y, scale)

    def add_norm(self, x: Array, delta: Array, norm: Norm) -> tuple[Array, Array]:
        result: tuple[Array, Array] = self.clock.timed("norms", self.inner.add_norm, x, delta, norm)
        return result

    def linear(self, x: Array, linear: Linear) -> Array:
        part = self._part_of.get(id(linear), "logits")
        self._count_linear(part, x, linear)
        return self.clock.timed(part, self.inner.linear, x, linear)

    def head_linear(self, x: Array, linear: HeadLinear, start: int) -> Array:
        flops = sum(2.0 * int(x.shape[0]) * head.in_features * head.out_features for head in linear.heads)
        self.clock.count("projections", flops, sum(linear_bytes(head, self.inner) for head in linear.heads))
        return self.clock.timed("projections", self.inner.head_linear, x, linear, start)

    def join_latent(self, query: Array, absorbed: Array, latent: Array, norm: Norm, rope: int) -> Array:
        return self.clock.timed("attention", self.inner.join_latent, query, absorbed, latent, norm, rope)

    def join_columns(self, parts: Sequence[tuple[Array, int, int]], factors: Array | None = None) -> Array:
        return self.clock.timed("norms", self.inner.join_columns, parts, factors)

    def rope_and_write(
        self, qkv: Array, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        work = self.inner.rope_and_write
        heads: Heads = self.clock.timed("attention", work, qkv, shape, rotation, batch, storage)
        return heads

    def attend(
        self, heads: Heads, shape: AttentionShape, segments: tuple[AttentionSegment, ...], storage: Storage | None
    ) -> Array:
        for segment in segments:
            key = (id(segment), shape.window)
            if key not in self._pairs:
                self._pairs[key] = seen_pairs(segment, shape.window)
            pairs, context = self._pairs[key]
            size = storage.keys[0].dtype.itemsize if storage is not None else 4
            flops = 4.0 * shape.num_heads * shape.head_dim * pairs  # one product for scores, one for values
            self.clock.count("attention", flops, 2.0 * shape.num_kv_heads * shape.head_dim * size * context)
        return self.clock.timed("attention", self.inner.attend, heads, shape, segments, storage)

    def act_mul(self, x: Array, activation: str, cutoff: float | None = None) -> Array:
        return self.clock.timed("MLP", self.inner.act_mul, x, activation, cutoff)

    def act(self, x: Array, activation: str) -> Array:
        return self.clock.timed("MLP", self.inner.act, x, activation)

    def all_gather(self, x: Array, widths: tuple[int, ...]) -> Array:
        return self.clock.timed("projections", self.inner.all_gather, x, widths)

    def all_reduce(self, x: Array) -> Array:
        return self.clock.timed("projections", self.inner.all_reduce, x)

    def gate(self, x: Array, logits: Array) -> Array:
        return self.clock.timed("MLP", self.inner.gate, x, logits)

    def route(self, logits: Array, router: Router) -> Routing:
        routing: Routing = self.clock.timed("MLP", self.inner.route, logits, router)
        return routing

    def mix_experts(self, x: Array, routing: Routing, experts: Experts) -> Array:
        """Count the products of the chosen experts, and the bytes of the experts that some token chose."""
        up, down = experts.up[0], experts.down[0]
        rows = int(routing.experts.shape[0]) * int(routing.experts.shape[1])
        size = up.in_features * up.out_features + down.in_features * down.out_features
        read = len(set(self.inner.to_host(routing.experts).reshape(-1).tolist())) / len(experts.up)
        self.clock.count(
            "MLP", 2.0 * rows * size, read * sum(converted_bytes(m, self.formats) for m in experts.matrices())
        )
        return self.clock.timed("MLP", self.inner.mix_experts, x, routing, experts)

    def recur(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        """Count the update of each state and its two products for each token; a state is read and written once."""
        size = recurrence.heads * recurrence.key_size * recurrence.value_size
        state = size + (recurrence.width - 1) * recurrence.channels
        sequences = sum(segment.num_sequences for segment in batch.segments)
        flops = int(x.shape[0]) * (7.0 * size + 2.0 * recurrence.width * recurrence.channels)
        self.clock.count("attention", flops, 8.0 * sequences * state)
        return self.clock.timed("attention", self.inner.recur, x, recurrence, batch, storage)

    def take(self, x: Array, rows: Array) -> Array:
        return self.clock.timed("logits", self.inner.take, x, rows)

    def given(self, batch: Batch, width: int) -> Array:
        return self.clock.timed("embedding", self.inner.given, batch, width)

    def tap(self, x: Array, column: int, batch: Batch) -> None:
        self.clock.timed("embedding", self.inner.tap, x, column, batch)

    def logits(self, x: Array, head: Linear, softcap: float) -> Array:
        self._count_linear("logits", x, head)
        return self.clock.timed("logits", self.inner.logits, x, head, softcap)

    def _count_linear(self, part: str, x: Array, linear: Linear) -> None:
        flops = 2.0 * int(x.shape[0]) * linear.in_features * linear.out_features
        in_integers = flops * self._integer_shares.get(id(linear), 0.0)
        self.clock.count(part, flops, self._bytes_of.get(id(linear), 0), in_integers)


def products_of(weights: ModelWeights) -> Iterator[tuple[Linear, str]]:
    """The products of the network, the head excepted, and the part of a step that each belongs to."""
    if weights.layer_inputs is not None:
        yield weights.layer_inputs.projection, "projections"
    if weights.streams is not None:
        yield weights.streams.spread, "projections"
    for layer in weights.layers:
        found: list[Linear | None] = [layer.qkv, layer.output, layer.gate]
        if layer.latent is not None:
            found += [layer.latent.query_down, layer.latent.query, layer.latent.latent]
        if layer.recurrent is not None:
            found += [layer.recurrent.input, layer.recurrent.output]
        if layer.inputs is not None:
            found += [layer.inputs.gate, layer.inputs.projection]
        if layer.streams is not None:
            found += layer.streams.linears()
        yield from ((linear, "projections") for linear in found if linear is not None and linear.parts)
        found = [layer.up, layer.down]
        if layer.moe is not None:
            found += [layer.moe.router, layer.moe.shared_gate]
        yield from ((linear, "MLP") for linear in found if linear is not None and linear.parts)


@dataclass(frozen=True, slots=True)
class _SplitProgram:
    """A recorded pass that is run operation by operation while the clock runs."""

    kernels: TimedKernels
    network: Network
    program: StepProgram

    def run(self, batch: Batch, storage: Storage) -> Array:
        if self.kernels.clock.phase is None:
            return self.program.run(batch, storage)
        return self.network.forward(self.kernels, batch, storage)


def linear_bytes(linear: Linear, kernels: KernelSet) -> int:
    """Bytes of the matrices in the formats that the kernels multiply by."""
    return sum(converted_bytes(part, kernels.formats) for part in linear.parts)


def quantised_share(linear: Linear, kernels: KernelSet) -> float:
    """Share of a linear's outputs whose weights the kernels hold in a quantised format."""
    quantised = [
        part.shape[0]
        for part in linear.parts
        if isinstance(part, QuantizedTensor) and target_format(part.format, kernels.formats).is_quantized
    ]
    return sum(quantised) / linear.out_features


def seen_pairs(segment: AttentionSegment, window: int | None) -> tuple[int, int]:
    """(query, key) pairs of attention, and the cached tokens it reads, over all sequences of a segment."""
    lengths = np.diff(np.asarray(segment.query_starts)).astype(np.int64)
    contexts = np.asarray(segment.context_lens).astype(np.int64)
    first = contexts - lengths + 1  # tokens visible to the first query
    if window is None:
        return int(((first + contexts) * lengths // 2).sum()), int(contexts.sum())
    pairs = sum(int(np.minimum(np.arange(a, b + 1), window).sum()) for a, b in zip(first, contexts, strict=True))
    return pairs, int(np.minimum(contexts, window + lengths - 1).sum())
