"""`KernelSet`: all operations the engine needs from a device, and their data.

    tokens  |<- sequence 7 ->|<- sequence 9 ->|<------ chunk of sequence 12 ------>|
    segment |<------------- DECODE ---------->|<------------- PREFILL ------------>|

A batch is one flat list of tokens, cut into attention segments. Matrix products run over all tokens at once; attention
runs once per segment, with the kernel of its phase. The network (`model/transformer.py`) uses only these
operations, so every kernel set runs the same network. A set without one of them is an error; there is no fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from bifolio.config import KVDtype
from bifolio.kernels.logit_edits import LogitEdits
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

Array = Any  # numpy array or torch tensor, as the kernel set allocates it
Storage = KVStorage
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702  # of the activation `swiglu_clamped`, which is no function of the gate alone


class AttentionPhase(Enum):
    """The phase of a segment: it selects the attention kernel."""

    PREFILL = "prefill"  # many queries per sequence: bound by compute
    DECODE = "decode"  # one query (and drafts) per sequence: bound by bandwidth


@dataclass(frozen=True, slots=True)
class Shards:
    """How the ranks of tensor parallelism share a matrix; each holds some of its rows or of its columns."""

    inputs: tuple[
        int, ...
    ]  # columns of the input on each rank, gathered before the product; empty: a rank uses its own
    outputs: tuple[int, ...]  # rows of each rank, whose results are gathered; empty: the results of all ranks are added


@dataclass(frozen=True, slots=True)
class Linear:
    """One or several matrices applied to the same input; their outputs are concatenated."""

    parts: tuple[QuantizedTensor | Array, ...]  # each [out_i, in]
    biases: tuple[Array | None, ...]  # each f32[out_i]
    prepared: Any = None  # the kernel set's own form, created at load: packed, fused, on the device
    shards: Shards | None = None  # None: this rank's product needs nothing of other ranks

    @property
    def out_features(self) -> int:
        return sum(int(part.shape[0]) for part in self.parts)

    @property
    def in_features(self) -> int:
        return int(self.parts[0].shape[1])


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or layer norm when `centered`."""

    weight: Array  # f32[d], the offset already added
    bias: Array | None
    eps: float
    centered: bool = False


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """One matrix for each head, of equal sizes."""

    heads: tuple[Linear, ...]  # each [out, in]
    prepared: Any = None  # the kernel set's own form, created at load


@dataclass(frozen=True, slots=True)
class Router:
    """How a token chooses its experts from one logit for each.

        scores   softmax over all experts, or the sigmoid of each logit
        choice   the `top_k` largest of score + bias, among the `top_groups` best groups of neighbouring experts;
                 of equal ones the first
        weights  the scores of the chosen experts, divided by their sum if `renormalise`, times `scale`

    Top-k followed by a softmax over the chosen logits is softmax with `renormalise`.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    bias: Array | None = None  # f32[experts]  changes the choice, not the weights
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1  # the best scores of a group whose sum ranks it


class Routing(NamedTuple):
    """The experts of each token, and their weights in the sum."""

    experts: Array  # i32[t, top_k]  best first
    weights: Array  # f32[t, top_k]


@dataclass(frozen=True, slots=True)
class Experts:
    """The gated MLPs of one layer, of equal sizes: down(act(gate x) * (up x))."""

    up: tuple[Linear, ...]  # of each expert: gate and up, or one matrix of both
    down: tuple[Linear, ...]
    activation: str
    prepared: Any = None  # the kernel set's own form, created at load

    def matrices(self) -> list[QuantizedTensor | Array]:
        return [part for linear in (*self.up, *self.down) for part in linear.parts]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The constants of one attention layer."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # tokens a query sees, itself included; None: all
    rope_interleaved: bool = False
    query_norm: Norm | None = None  # of head_dim: for each head; wider: one for all heads of a token
    key_norm: Norm | None = None
    norm_after_rope: bool = False
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: off
    temperature: float = 0.0  # queries at position p grow by 1 + temperature * log(1 + p // temperature_period)
    temperature_period: int = 1
    sinks: Array | None = None  # f32[num_heads]  score of a position without a value that every query sees


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """Consecutive tokens of one phase: whole sequences, one after the other."""

    phase: AttentionPhase
    token_start: int
    token_end: int
    query_starts: Array  # i32[s + 1]  start of each sequence's queries, relative to token_start
    context_lens: Array  # i32[s]      tokens visible to the last query of the sequence, itself included
    block_tables: Array | None  # i32[s, max_blocks]  padded with block 0; None: no cache (training)
    fresh: bool  # no sequence has tokens before its queries: the cache is written but not read
    max_query_len: int
    max_context_len: int

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. Arrays are the kernel set's own."""

    token_ids: Array  # i32[t]
    positions: Array  # i32[t]  index of each token in its sequence
    cache_index: Array | None  # i64[t]  block * block_size + offset of K and V; None: no cache
    segments: tuple[AttentionSegment, ...]  # partition [0, t)
    logit_rows: Array | None  # i32[r]  tokens whose logits are computed; None: all
    max_position: int = 0  # largest of `positions`

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


class Rotation(NamedTuple):
    """Cosine and sine for the tokens of a batch, computed once per pass."""

    cos: Array  # f32[t, rotary_dim / 2]
    sin: Array


class Heads(NamedTuple):
    """Queries, keys and values of a batch, rotated and split into heads."""

    query: Array  # [t, num_heads, head_dim]
    key: Array  # [t, num_kv_heads, head_dim]
    value: Array


class PagedAttentionKernel(Protocol):
    """Attention of one segment's queries over their paged context."""

    def attend(
        self, heads: Heads, shape: AttentionShape, segments: tuple[AttentionSegment, ...], storage: Storage | None
    ) -> Array:
        """[t, num_heads * head_dim]: causal, grouped heads, optional window."""
        ...


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """A kernel with one layer's constants and the cache it reads."""

    kernel: PagedAttentionKernel
    shape: AttentionShape
    storage: Storage

    def compute_paged_attention(self, query: Array, segment: AttentionSegment) -> Array:
        """Queries [t, num_heads, head_dim] over the cached context of their sequences: [t, num_heads * head_dim]."""
        cached = replace(segment, fresh=False)  # keys and values are already in the cache
        return self.kernel.attend(Heads(query, None, None), self.shape, (cached,), self.storage)


class StepProgram(Protocol):
    """A pass recorded once and replayed in one call for any batch of its phase."""

    def run(self, batch: Batch, storage: Storage) -> Array:
        """Logits f32[r, vocab] of the batch's `logit_rows`."""
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
class Network:
    """A forward pass for a kernel set: a function over its operations, bound to the weights."""

    forward: Callable[[KernelSet, Batch, Storage | None], Array]  # logits f32[r, vocab]
    shapes: tuple[AttentionShape, ...]  # of its attention layers
    decode_segment: Callable[[int], AttentionSegment]  # of one query per sequence, by number of sequences
    rotations: tuple[tuple[Array, float], ...] = ()  # (inverse frequencies, scale) of each rope configuration


class SlotSizes(NamedTuple):
    """The dimensions of per-slot state."""

    num_slots: int
    max_blocks: int  # of one sequence
    max_model_len: int
    vocab_size: int


@dataclass(slots=True)
class TokenScores:
    """Numbers from which the host computes the logprobs of drawn tokens; defined for slots that have logprobs.

    Logits are the model's own, less the largest of their row.
    """

    totals: np.ndarray  # i64[n]  sum of the weights of all tokens (`kernels.weights`)
    logits: np.ndarray  # f32[n]  of the drawn token
    ranks: np.ndarray  # i32[n]  1: no token was more likely
    top_ids: np.ndarray  # i32[n, k]  the most likely tokens, best first; -1: fewer have a finite logit
    top_logits: np.ndarray  # f32[n, k]


class PendingTokens(Protocol):
    """Tokens sampled by a launched step."""

    def wait(self) -> np.ndarray:
        """i32[n], in the order of the launch; -1 where no token can be sampled. Waits for the step."""
        ...

    def scores(self) -> TokenScores | None:
        """Scores of the tokens, after `wait`; None if no slot of the step has logprobs."""
        ...


class DeviceSlots(Protocol):
    """Per-slot state on a device, so that a step needs little data from the host.

    It holds block tables, the number of cached tokens, the newest token and the sampling parameters of each slot; the
    host sends differences. All updates are queued after the passes launched before.
    """

    def draws(self, params: Any, edits: LogitEdits) -> bool:
        """Whether a slot with these `SamplingParams` is drawn on the device."""
        ...

    def set_params(self, slot: int, params: Any, seed: int, edits: LogitEdits | None) -> None:
        """A new sequence holds the slot; without `edits` it is drawn on the host."""
        ...

    def set_history(self, slot: int, prompt: np.ndarray, output: Sequence[int]) -> None:
        """Prompt and output of a slot whose edits count tokens; the device counts the tokens that it draws itself."""
        ...

    def set_mask(self, slot: int, mask: np.ndarray) -> None:
        """Tokens that may be drawn next for a slot whose edits have a mask: bool[vocab], or bits, lowest first."""
        ...

    def set_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Set the slot's block table from index `first` on."""
        ...

    def set_progress(self, slots: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> None:
        """Set the cached tokens and the newest token of slots, after the host sampled or prefilled them."""
        ...

    def fill_tokens(self, token_ids: Array, slots: np.ndarray) -> Array:
        """`token_ids` i32[t] with -1 in its first len(slots) entries replaced by the newest token of `slots`."""
        ...

    def draw(self, logits: Array, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> PendingTokens:
        """Sample the token at `positions[i]` of `slots[i]` from `logits[rows[i]]`; it becomes the slot's newest."""
        ...

    def decode(self, slots: np.ndarray, tables: np.ndarray, lengths: np.ndarray) -> PendingTokens:
        """Run one whole decode step of these slots, sampled on the device.

        `tables` (i32[num_slots, max_blocks]) and `lengths` (i64[n], cached tokens of `slots`) are the host's copies.
        """
        ...

    def decode_logits(self, slots: np.ndarray) -> Array:
        """f32[n, vocab]: a decode step without sampling; valid until the next launch."""
        ...

    def warm_up(self) -> None:
        """Capture the graphs of all batch sizes now instead of when a step first needs them."""
        ...


class KernelSet(PagedAttentionKernel, Protocol):
    """One implementation of every operation that the engine and the network use."""

    name: str
    array_backend: str  # "numpy" or "torch": the kind of its arrays
    device: str
    formats: frozenset[QuantFormat]  # used by `prepare_linear` and `prepare_embedding` without conversion
    kv_dtype: KVDtype  # default type of the cache
    deterministic: bool  # results of a sequence do not depend on the rest of the batch
    launches_ahead: bool  # passes are queued on a device: the host plans the next step meanwhile
    activation_planes: int  # integer products for each quantised weight and activation; 0: multiplied as floats
    ranks: Ranks | None  # of tensor parallelism; None: this process runs the whole model

    # -- arrays and memory ------------------------------------------------------------------------------------------
    def from_host(self, array: np.ndarray) -> Array: ...

    def to_host(self, array: Array) -> np.ndarray: ...

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        """Queue a copy to the host; the function waits for it."""
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

    # -- whole steps --------------------------------------------------------------------------------------------------
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

    def prepare_head_linear(self, linear: HeadLinear) -> HeadLinear: ...

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any: ...

    # -- the network --------------------------------------------------------------------------------------------------
    def embed(self, table: Any, ids: Array, scale: float) -> Array:
        """Rows of a table: [t, d]."""
        ...

    def rotation(self, inverse_frequencies: Array, scale: float, positions: Array) -> Rotation: ...

    def norm(self, x: Array, norm: Norm) -> Array: ...

    def add(self, x: Array, y: Array) -> Array: ...

    def add_norm(self, x: Array, delta: Array, norm: Norm) -> tuple[Array, Array]:
        """(x + delta, norm of that): the residual stream and the next layer's input."""
        ...

    def linear(self, x: Array, linear: Linear) -> Array: ...

    def rope_and_write(
        self, qkv: Array, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        """Split into heads, norm and rotate queries and keys, write keys and values to the cache."""
        ...

    def head_linear(self, x: Array, linear: HeadLinear, start: int) -> Array:
        """The product of each head with its own matrix: [t, heads * out].

        x: [t, heads * columns]; a matrix reads the columns of its head from `start` on, as many as it has inputs.
        """
        ...

    def join_latent(self, query: Array, absorbed: Array, latent: Array, norm: Norm, rope: int) -> Array:
        """The input of `rope_and_write` for attention over cached latents, with one head of keys and values.

        query     [t, heads * (nope + rope)]
        absorbed  [t, heads * latent]          nope of each head, multiplied with its key projection
        latent    [t, latent + rope]           not normed yet
        result    [t, (heads + 2) * (rope + latent)]   queries, the key, and the value, which is the key
        """
        ...

    def act_mul(self, x: Array, activation: str) -> Array:
        """act(gate) * up for [t, 2 * ffn], gate and up concatenated: [t, ffn].

        `swiglu_clamped`: gate and up are clamped to `SWIGLU_LIMIT`; gate * sigmoid(`SWIGLU_SLOPE` * gate) * (up + 1).
        """
        ...

    def act(self, x: Array, activation: str) -> Array: ...

    def all_gather(self, x: Array, widths: tuple[int, ...]) -> Array:
        """The columns of all ranks side by side: [t, sum(widths)]; `x` as it is where there is one rank."""
        ...

    def all_reduce(self, x: Array) -> Array:
        """The sum over all ranks; `x` as it is where there is one rank."""
        ...

    def gate(self, x: Array, logits: Array) -> Array:
        """sigmoid(logits) * x for one logit f32[t, 1] of each row."""
        ...

    def route(self, logits: Array, router: Router) -> Routing:
        """The experts of each token, from logits f32[t, experts]."""
        ...

    def mix_experts(self, x: Array, routing: Routing, experts: Experts) -> Array:
        """The sum of the outputs of each token's experts, by weight, in the order of the choice: [t, d].

        One operation, so that a set groups the tokens by expert in its own order, reads each expert's weights once and
        keeps the rows between the two products to itself.
        """
        ...

    def take(self, x: Array, rows: Array) -> Array: ...

    def logits(self, x: Array, head: Linear, softcap: float) -> Array:
        """f32[r, vocab]."""
        ...
