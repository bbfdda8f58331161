"""`KernelSet`: all operations the engine needs from a device, and their data.

    tokens  |<- sequence 7 ->|<- sequence 9 ->|<------ chunk of sequence 12 ------>|
    segment |<------------- DECODE ---------->|<------------- PREFILL ------------>|

A batch is one flat list of tokens, cut into attention segments. Matrix products run over all tokens at once; attention
runs once per segment, with the kernel of its phase. The network (`model/transformer.py`) uses only these
operations, so every kernel set runs the same network. A set without one of them is an error; there is no fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from bifolio.config import KVDtype
from bifolio.kernels.attention_interface import (
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Heads,
    LayerAttention,
    PagedAttentionKernel,
    Segments,
    Storage,
)
from bifolio.kernels.batch import AdapterUse, Batch, StateUse
from bifolio.kernels.device_slots import (
    DeviceSlots,
    DraftSlots,
    PendingDrafts,
    PendingTokens,
    SlotSizes,
    TokenScores,
)
from bifolio.kernels.entry_interface import Compressor, StreamMix
from bifolio.kernels.operands import (
    NO_SITE,
    Adapter,
    Array,
    ExpertLowRank,
    Experts,
    HeadLinear,
    Linear,
    LowRank,
    Norm,
    ProductShape,
    Recurrence,
    RoutedExperts,
    Router,
    Routing,
    Shards,
    SharedMlp,
)
from bifolio.kernels.operations import (
    LEAST_MEAN_SQUARE,
    SILU_LIMIT,
    SWIGLU_LIMIT,
    SWIGLU_SLOPE,
    Operations,
    Rotation,
    XieluCoefficients,
)
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

__all__ = [
    "LEAST_MEAN_SQUARE",
    "NO_SITE",
    "SILU_LIMIT",
    "SWIGLU_LIMIT",
    "SWIGLU_SLOPE",
    "Adapter",
    "AdapterUse",
    "Array",
    "AttentionPhase",
    "AttentionSegment",
    "AttentionShape",
    "Batch",
    "Compressor",
    "DeviceMemory",
    "DeviceSlots",
    "DraftNetwork",
    "DraftSlots",
    "ExpertLowRank",
    "Experts",
    "HeadLinear",
    "Heads",
    "KernelSet",
    "LayerAttention",
    "Linear",
    "LowRank",
    "Network",
    "Norm",
    "Operations",
    "PagedAttentionKernel",
    "PendingDrafts",
    "PendingTokens",
    "ProductShape",
    "Ranks",
    "Recurrence",
    "Rotation",
    "RoutedExperts",
    "Router",
    "Routing",
    "Segments",
    "SharedMlp",
    "Shards",
    "SleepMemory",
    "SlotSizes",
    "SplitNetwork",
    "StateUse",
    "StepProgram",
    "StreamMix",
    "Storage",
    "TimedOperation",
    "TokenScores",
    "XieluCoefficients",
]


class TimedOperation(NamedTuple):
    """One operation of a program that was profiled."""

    name: str
    weights: Any  # prepared, of a product; None: of other operations
    seconds: float


class StepProgram(Protocol):
    """A pass recorded once and replayed in one call for any batch of its phase."""

    def run(self, batch: Batch, storage: Storage) -> Array:
        """Logits f32[r, vocab] of the batch's `logit_rows`, or the result of another network."""
        ...

    def profile(self, batch: Batch, storage: Storage) -> tuple[Array, list[TimedOperation]]:
        """The same result, and the time of each operation."""
        ...

    def warm_up(self, num_tokens: int, longest: int) -> None:
        """Prepare passes with up to `num_tokens` tokens, in sequences of at most `longest`."""
        ...


class Ranks(Protocol):
    """The processes that run one model together, each with a part of every matrix."""

    rank: int  # of this process; rank 0 plans and samples
    size: int

    def all_gather(self, x: Array, widths: tuple[int, ...]) -> Array:
        """[t, sum(widths)]: the columns of all ranks side by side; `x` is [t, widths[rank]]."""
        ...

    def all_reduce(self, x: Array) -> Array:
        """[t, d]: the sum over all ranks; the order of the additions does not change from run to run."""
        ...


class SleepMemory(Protocol):
    """Memory of a device that is given back while an engine sleeps, and comes again at the same addresses."""

    @property
    def keeps_weights(self) -> bool:
        """Whether sleeping weights can wake from the host."""
        ...

    def adopt(self, tree: Any) -> None:
        """Move the arrays of prepared weights here, in place."""
        ...

    def refill(self, tree: Any, source: Any) -> None:
        """Copy other prepared weights into the arrays of `tree`."""
        ...

    def sleep(self, *, keep_weights: bool) -> None:
        """Give all memory back; contents of the cache are dropped."""
        ...

    def wake(self, parts: Collection[str]) -> None:
        """Map the memory of "weights", "kv_cache" or both again."""
        ...

    def num_bytes(self, part: str) -> int:
        """Bytes of a part when it is awake."""
        ...


class DeviceMemory(Protocol):
    """The memory of a device, counted in bytes."""

    def free_bytes(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def start_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        """Peak memory since `start_peak`, less the memory in use at that moment."""
        ...


@dataclass(frozen=True, slots=True)
class SplitNetwork:
    """A forward pass in two parts, for steps that need the logits of a few of many tokens."""

    hidden: Callable[[KernelSet, Batch, Storage | None], Array]  # [t, d] after the last layer
    logits: Callable[[KernelSet, Array], Array]  # f32[r, vocab] of rows of it
    prompt_segment: Callable[[int], AttentionSegment]  # of one sequence, by number of queries
    tap_width: int = 0  # of the rows that `hidden` gives out beside its result (`Batch.taps`)
    given_width: int = 0  # of the rows that `hidden` reads beside its tokens (`Batch.given`)


@dataclass(frozen=True, slots=True)
class Network:
    """A forward pass for a kernel set: a function over its operations, bound to the weights."""

    forward: Callable[[KernelSet, Batch, Storage | None], Array]  # logits f32[r, vocab]
    shapes: tuple[AttentionShape, ...]  # of its attention layers
    decode_segment: Callable[[int], AttentionSegment]  # of one query per sequence, by number of sequences
    rotations: tuple[tuple[Array, float], ...] = ()  # (inverse frequencies, scale) of each rope
    split: SplitNetwork | None = None  # None: the pass runs as a whole
    products: Mapping[int, ProductShape] = field(default_factory=dict)  # that adapters can change, by site


@dataclass(frozen=True, slots=True)
class DraftNetwork:
    """A draft head for a kernel set: one layer of attention over hidden states that `Batch.given` has."""

    from_target: Callable[[KernelSet, Batch, Storage | None], Array]  # [t, d] from hidden states of the target
    from_own: Callable[[KernelSet, Batch, Storage | None], Array]  # [t, d] from its own
    logits: Callable[[KernelSet, Array], Array]  # f32[r, draft vocab] of rows of either
    shape: AttentionShape
    decode_segment: Callable[[int], AttentionSegment]
    prompt_segment: Callable[[int], AttentionSegment]
    rotations: tuple[tuple[Array, float], ...]
    hidden_size: int
    given_width: int  # of the target's hidden states
    state_scale: float  # factor of those that `Batch.taps` has
    token_ids: np.ndarray | None  # i64[draft vocab]  the target's ids of the head's tokens; None: the same ids


class ExpertCalls(Protocol):
    """Experts of a kernel set of the host as functions that the stream of a device calls."""

    def new_room(self) -> Any:
        """Memory that calls share which run one after another. `is_idle`: they write zeros."""
        ...

    def new_call(self, experts: Experts, room: Any, sent: np.ndarray, mixed: np.ndarray) -> Any:
        """`function(argument)` writes f32[rows, d] `mixed` from f32[rows, d + 2 * choices] `sent`.

        A row of `sent` holds x, the numbers of the experts as i32, and their weights.
        """
        ...

    def product_rate(self) -> float:
        """Operations a second."""
        ...


class KernelSet(Operations, Protocol):
    """One implementation of every operation that the engine and the network use."""

    name: str
    array_backend: str  # "numpy" or "torch": the kind of its arrays
    device: str
    formats: frozenset[QuantFormat]  # used by `prepare_linear` and `prepare_embedding` without conversion
    kv_dtype: KVDtype  # default type of the cache
    deterministic: bool  # results of a sequence do not depend on the rest of the batch
    stores_fp8: bool  # weights in FP8 are multiplied as they are, and dense ones can be rounded to it
    launches_ahead: bool  # passes are queued on a device: the host plans the next step meanwhile
    activation_planes: int  # integer products for each quantised weight and activation; 0: multiplied as floats
    ranks: Ranks | None  # of tensor parallelism; None: this process runs the whole model
    arena: SleepMemory | None  # of weights and caches; None: their memory stays on the device, or is the host's

    def build_facts(self) -> dict[str, str]:
        """Versions, instruction set and device: all beside the attributes above that decides on the bits of results."""
        ...

    # -- arrays and memory ------------------------------------------------------------------------------------------
    def from_host(self, array: np.ndarray) -> Array: ...

    def to_host(self, array: Array) -> np.ndarray: ...

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        """Queue a copy to the host; the function waits for it."""
        ...

    def with_rows(self, x: Array, parts: Sequence[tuple[np.ndarray, Array]]) -> Array:
        """f32: a copy of x [t, d] with the rows of each (places, rows) in place of its own at these places.

        All rows have equally many columns, d or more; those of x that lack columns have zeros there.
        """
        ...

    @property
    def for_towers(self) -> KernelSet:
        """The set that runs towers of images, on the same device: heads of any size, outside of captured steps."""
        ...

    def new_storage(self, layout: CacheLayout) -> KVStorage:
        """The paged cache that this set's kernels read and write."""
        ...

    def memory(self) -> DeviceMemory | None:
        """The device's memory; None where the cache is in host memory."""
        ...

    def release_memory(self) -> None:
        """Return cached memory to the device, after an out-of-memory error."""
        ...

    def use_arena(self) -> None:
        """Keep later weights and caches in an `arena`, where the device has a driver that can map memory."""
        ...

    # -- whole steps --------------------------------------------------------------------------------------------------
    def on_padding(self) -> AbstractContextManager[None]:
        """Within it steps run on padding, to be measured or captured: experts on the host are not computed."""
        ...

    def expert_calls(self) -> ExpertCalls | None:
        """Calls of this set's experts from the stream of another device; None: they need Python."""
        ...

    def record(self, network: Network, phase: AttentionPhase) -> StepProgram | None:
        """The network as a program for one phase; None: the operations are called one by one."""
        ...

    def device_slots(self, network: Network, storage: Storage, sizes: SlotSizes) -> DeviceSlots | None:
        """Per-slot state, sampling and decode graphs on the device; None: the host keeps the slots and samples."""
        ...

    def top_logprobs(
        self, logits: Array, rows: np.ndarray, count: int
    ) -> Callable[[], tuple[np.ndarray, np.ndarray]] | None:
        """Queue a top-k of these rows; None where reading all logits costs no more.

        The function waits for (ids i64[r, k], logprobs f32[r, k]), best first.
        """
        ...

    # -- weights ------------------------------------------------------------------------------------------------------
    def prepare_linear(self, linear: Linear) -> Linear:
        """Convert, repack, fuse or move the weights once, at load."""
        ...

    def prepare_norm(self, norm: Norm) -> Norm: ...

    def prepare_experts(self, experts: Experts) -> Experts:
        """Convert, repack or move the weights of all experts of a layer once, at load."""
        ...

    def fold_shared(self, routed: RoutedExperts, shared: SharedMlp) -> RoutedExperts | None:
        """The shared MLP of a layer as one more expert of every token, before its weights are prepared.

        None: the set computes it beside the experts.
        """
        ...

    def prepare_head_linear(self, linear: HeadLinear) -> HeadLinear: ...

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any: ...

    def prepare_recurrence(self, recurrence: Recurrence) -> Recurrence: ...

    def prepare_adapter(self, adapter: Adapter) -> Adapter:
        """Convert, repack or move the matrices of an adapter once, when it is loaded."""
        ...
