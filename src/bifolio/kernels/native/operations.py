"""The operations of the native set, written once.

An operation is a method of a native program (`native/operations.cpp`): it takes the numbers of registers and constants,
and returns the numbers of its results. `ProgramRecorder` adds it to the program of a network; `NativeKernels` runs it
at once, as a program of one operation on numpy arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from bifolio.kernels.interface import (
    AdapterUse,
    Array,
    AttentionShape,
    Batch,
    Experts,
    HeadLinear,
    Heads,
    Linear,
    Norm,
    Recurrence,
    Rotation,
    Router,
    Routing,
    Segments,
    Storage,
    XieluCoefficients,
)
from bifolio.kernels.native.arguments import (
    ACTIVATION_CODES,
    floats,
    native_norm,
    native_recurrence,
    native_router,
    native_shape,
)

if TYPE_CHECKING:
    from bifolio.kernels.native.kernel_set import NativeKernels


class BatchInput(Enum):
    """Placeholders of the batch's arrays; the values of those that `embed` reads are their codes."""

    TOKEN_IDS = 0
    POSITIONS = 1
    TYPES = 2  # positions // LONG_ROPE
    LOGIT_ROWS = 3

    def __floordiv__(self, divisor: int) -> BatchInput:
        return BatchInput.TYPES

    def __mod__(self, divisor: int) -> BatchInput:
        return self


@dataclass(frozen=True, slots=True)
class Register:
    """The result of a recorded operation: float rows, whose number is set when the program runs."""

    number: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return -1, self.width


class NativeOperations(ABC):
    """A part of the kernel sets whose values are registers, and arrays."""

    @property
    @abstractmethod
    def kernels(self) -> NativeKernels:
        """The set that packs the weights."""

    @abstractmethod
    def run(self, name: str, values: Sequence[Any], *constants: Any, **batch: Any) -> Any:
        """The result of the program's method `name` on registers of the values and constants, or a tuple of results.

        A value may be None, or a list of values. `batch`: inputs of the pass, for operations that run at once.
        """

    # -- inputs -------------------------------------------------------------------------------------------------------
    def embed(self, table: Any, ids: Array, scale: float, *, is_partial: bool = False) -> Array:
        source = ids.value if isinstance(ids, BatchInput) else BatchInput.TOKEN_IDS.value
        return self.run("embed", (), table, scale, source, is_partial, ids=ids)

    def rotation(self, inverse_frequencies: Array, scale: float, positions: Array) -> Rotation:
        frequencies, two_sets = floats(inverse_frequencies).reshape(-1), inverse_frequencies.ndim == 2
        return Rotation(*self.run("rotation", (), frequencies, scale, two_sets, positions=positions))

    # -- rows ---------------------------------------------------------------------------------------------------------
    def norm(self, x: Array, norm: Norm) -> Array:
        return self.run("norm", (x,), native_norm(norm))

    def add(self, x: Array, y: Array, scale: float = 1.0) -> Array:
        return self.run("add", (x, y), scale)

    def add_norm(self, x: Array, delta: Array, norm: Norm) -> tuple[Array, Array]:
        total, normed = self.run("add_norm", (x, delta), native_norm(norm))
        return total, normed

    def act(self, x: Array, activation: str) -> Array:
        return self.run("act", (x,), ACTIVATION_CODES[activation])

    def clamp(self, x: Array, least: Array, most: Array) -> Array:
        return self.run("clamp", (x,), floats(least), floats(most))

    def xielu(self, x: Array, coefficients: XieluCoefficients) -> Array:
        return self.run("xielu", (x,), *coefficients)

    def act_mul(self, x: Array, activation: str, cutoff: float | None = None) -> Array:
        return self.run("act_mul", (x,), ACTIVATION_CODES[activation], cutoff)

    def gate(self, x: Array, logits: Array) -> Array:
        return self.run("gate", (x, logits))

    def join_columns(self, parts: Sequence[tuple[Array, int, int]], factors: Array | None = None) -> Array:
        values, starts, stops = (list(each) for each in zip(*parts, strict=True))
        return self.run("join_columns", (values,), starts, stops, None if factors is None else floats(factors))

    # -- products -----------------------------------------------------------------------------------------------------
    def linear(self, x: Array, linear: Linear) -> Array:
        return self.run("linear", (x,), self.kernels.packed(linear))

    def adapt(self, y: Array, x: Array, site: int, adapters: AdapterUse) -> Array:
        """Rows are changed in place: an array is copied first."""
        rows = y if isinstance(y, Register) else np.array(y, np.float32, order="C")
        return self.run("adapt", (rows, x), site, adapters=adapters)

    def head_linear(self, x: Array, linear: HeadLinear, start: int) -> Array:
        return self.run("head_linear", (x,), self.kernels.packed_heads(linear), start)

    def adapt_embedding(self, x: Array, ids: Array, scale: float, adapters: AdapterUse) -> Array:
        """Rows are changed in place: an array is copied first."""
        rows = x if isinstance(x, Register) else np.array(x, np.float32, order="C")
        return self.run("adapt_embedding", (rows,), scale, ids=ids, adapters=adapters)

    def logits(self, x: Array, head: Linear, softcap: float, batch: Batch | None = None) -> Array:
        if batch is None or batch.adapters is None:
            return self.run("logits", (x,), self.kernels.packed(head), softcap)
        own = batch.adapters if isinstance(x, Register) else batch.logit_adapters
        return self.run("logits", (x,), self.kernels.packed(head), softcap, head.site, adapters=own)

    def route(self, logits: Array, router: Router) -> Routing:
        """A row holds the numbers of the experts, as bits of floats, and their weights."""
        rows = self.run("route", (logits,), native_router(router, logits.shape[1]))
        if isinstance(rows, Register):
            return Routing(rows, rows)
        return Routing(rows.view(np.int32)[:, : router.top_k], rows[:, router.top_k :])

    def weigh(self, x: Array, routing: Routing) -> Array:
        weights, first = routing.weights, 0
        if isinstance(weights, Register):  # behind the numbers of the experts
            first = weights.width // 2
        return self.mix_streams(x, self.join_columns([(weights, first, first + 1)]), 1)

    def mix_experts(self, x: Array, routing: Routing, experts: Experts, adapters: AdapterUse | None = None) -> Array:
        rows = routing.experts
        if not isinstance(rows, Register):
            rows = np.concatenate([np.asarray(rows, np.int32).view(np.float32), floats(routing.weights)], axis=1)
        packed = self.kernels.packed_experts(experts)
        if adapters is None:
            return self.run("mix_experts", (x, rows), packed)
        return self.run("mix_experts", (x, rows), packed, experts.site, adapters=adapters)

    # -- attention and recurrences ------------------------------------------------------------------------------------
    def join_latent(self, query: Array, absorbed: Array, latent: Array, norm: Norm, rope: int) -> Array:
        return self.run("join_latent", (query, absorbed, latent), native_norm(norm), rope)

    def rope_and_write(
        self, qkv: Array, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        """Rows are changed in place: an array is copied first."""
        rows = qkv if isinstance(qkv, Register) else np.array(qkv, np.float32, order="C")
        values, constants = (rows, *(rotation or (None, None))), (shape.layer, native_shape(shape))
        rows = self.run("rope_and_write", values, *constants, slots=batch.cache_index, storage=storage)
        if isinstance(rows, Register):
            return Heads(rows, rows, rows)
        heads = rows.reshape(len(rows), -1, shape.head_dim)
        if shape.queries_only:
            return Heads(heads, None, None)
        first_value = shape.num_heads + shape.num_kv_heads
        return Heads(heads[:, : shape.num_heads], heads[:, shape.num_heads : first_value], heads[:, first_value:])

    def attend(self, heads: Heads, shape: AttentionShape, segments: Segments, storage: Storage | None) -> Array:
        return self._attend("attend", heads, (), shape, segments, storage)

    def choose(
        self, heads: Heads, weights: Array, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> Array:
        rows = self._attend("choose", heads, (weights,), shape, segments, storage)
        return rows if isinstance(rows, Register) else rows.view(np.int32)

    def attend_chosen(
        self, heads: Heads, chosen: Array, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> Array:
        """Chosen positions are bits of floats."""
        rows = chosen if isinstance(chosen, Register) else np.asarray(chosen, np.int32).view(np.float32)
        return self._attend("attend_chosen", heads, (rows,), shape, segments, storage)

    def _attend(
        self, name: str, heads: Heads, others: tuple[Array, ...], shape: AttentionShape, segments: Segments,
        storage: Storage | None,
    ) -> Array:  # fmt: skip
        shape, segments, storage = self.cached(heads, shape, segments, storage)
        query = heads.query
        rows = query if isinstance(query, Register) else floats(query).reshape(len(query), -1)
        constants = shape.layer, native_shape(shape)
        return self.run(name, (rows, *others), *constants, segments=segments, storage=storage)

    def cached(
        self, heads: Heads, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> tuple[AttentionShape, Segments, Storage | None]:
        """The arguments of attention over a cache, which programs have when they run."""
        return shape, segments, storage

    def recur(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        constants = recurrence.layer, recurrence.prepared or native_recurrence(recurrence)
        return self.run("recur", (x,), *constants, states=batch, storage=storage)

    def scan(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        constants = recurrence.layer, recurrence.prepared or native_recurrence(recurrence)
        return self.run("scan", (x,), *constants, states=batch, storage=storage)

    # -- residual streams ---------------------------------------------------------------------------------------------
    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        return self.run("mix_streams", (x, coefficients), streams)

    def add_to_streams(self, x: Array, y: Array, coefficients: Array | tuple[float, ...]) -> Array:
        if isinstance(coefficients, tuple):
            return self.run("add_to_streams", (x, y), list(coefficients))
        return self.run("add_to_streams", (x, y, coefficients))

    def match_streams(self, x: Array, y: Array) -> Array:
        return self.run("match_streams", (x, y))
