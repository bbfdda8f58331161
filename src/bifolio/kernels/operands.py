"""The weights that the operations of a kernel set take: matrices, norms, routers, experts and recurrences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bifolio.quant.tensor import QuantizedTensor

Array = Any  # numpy array or torch tensor, as the kernel set allocates it
NO_SITE = -1  # of products that no adapter changes


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
    site: int = NO_SITE  # number of the product in adapters (`Adapter`)

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

        scores   softmax over all experts, or the sigmoid of each logit, or the root of its softplus
        choice   the `top_k` largest of score + bias, among the `top_groups` best groups of neighbouring experts;
                 of equal ones the first
        weights  the scores of the chosen experts, divided by their sum if `renormalise`, times `scale`, times the
                 factor of each expert

    Sparse mixing (Phi-3.5-MoE) chooses by the logits. The weight of each choice is its share in a softmax over the
    experts that are not chosen yet and whose logits lie at most `band`, relative to their size, below its own.

    Top-k followed by a softmax over the chosen logits is softmax with `renormalise`.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    bias: Array | None = None  # f32[experts]  changes the choice, not the weights
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1  # the best scores of a group whose sum ranks it
    expert_scales: Array | None = None  # f32[experts]
    band: float = 0.0  # sparse mixing in place of the above; 0: off


class Routing(NamedTuple):
    """The experts of each token, and their weights in the sum."""

    experts: Array  # i32[t, top_k]  best first
    weights: Array  # f32[t, top_k]
    shared: int = 0  # the last ones of every token, which are the same for all (`KernelSet.fold_shared`)


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLPs of one layer, of equal sizes: down(act(gate x) * (up x)), or down(act(up x)) without gates."""

    up: tuple[Linear, ...]  # of each expert: gate and up, or one matrix of both
    down: tuple[Linear, ...]
    activation: str
    gated: bool = True
    prepared: Any = None  # the kernel set's own form, created at load
    site: int = NO_SITE  # number of these experts in adapters
    host: Any = None  # the CPU's kernel set, which holds and computes them beside a device; None: as all other weights

    def matrices(self) -> list[QuantizedTensor | Array]:
        return [part for linear in (*self.up, *self.down) for part in linear.parts]


class ProductShape(NamedTuple):
    """The sizes of a product that adapters can change."""

    widths: tuple[int, ...]  # outputs of its matrices, side by side
    inputs: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """Two thin matrices, whose product is added to some columns of the output of a product: y += up (down x) + bias.

    Of the head, and of the embedding, `up` can be a matrix in place of the base's: y = up x + bias.
    """

    column: int  # the first of them
    down: Array  # f32 or f16 [r, in]; None: `up` is [columns, in], in any format of files
    up: Array  # f32 or f16 [columns, r]  the scale of the adapter is in it
    bias: Array | None = None  # f32[columns]


class ExpertLowRank(NamedTuple):
    """The changes of the two products of one expert."""

    up: tuple[LowRank, ...] = ()
    down: tuple[LowRank, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A low-rank adapter (LoRA) of a network, by the sites of its products."""

    products: Mapping[int, tuple[LowRank, ...]] = field(default_factory=dict)
    experts: Mapping[int, tuple[ExpertLowRank, ...]] = field(default_factory=dict)  # of all experts of a layer
    embedding: tuple[LowRank, ...] = ()  # of the table [vocab, d], whose rows are the columns of a product
    prepared: Any = None  # the kernel set's own form, created at load


class RoutedExperts(NamedTuple):
    """The experts of one layer, and how a token chooses among them."""

    router: Linear  # [experts, d]
    choice: Router
    experts: Experts


class SharedMlp(NamedTuple):
    """The MLP beside the experts of one layer, with their activation."""

    up: Linear  # gate and up
    down: Linear
    gate: Linear | None  # [1, d]  its sigmoid multiplies the output


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The part of a recurrent layer between its input and its output projection.

    The input projection's rows are in one order for every family; a family rearranges them when it loads a file.
    H: heads; G: groups of heads that share keys (delta) or B and C (mamba); K: key size; V: value size.

        conv   [b | c | x], each of `channels`           y = c * conv(b * x)
        delta  [q | k | v | z | beta | a]                q, k: G * K each; v, z: H * V each; beta, a: H each
        keyed  [q | k | v | z | beta | a]                as delta, but a: H * K
        mamba  [z | x | b | c | dt]                      z, x: H * V each; b, c: G * K each; dt: H
        lightning  [z | x | b | c]                       mamba with dt = 1 and the sigmoid of z in place of silu
        selective  x, of `channels`                      y = silu(conv(x)); `KernelSet.scan` follows
        lru        x, of `channels`                      y = conv(x); `KernelSet.scan` follows
        shift      x, of `channels`                      n mixes with the token before, side by side
        rwkv       [r | w | k | v | a | g | m | f]       r, w, k, a: H * K each; v, g, m, f: H * V each

    `conv` is a causal convolution of each channel over the last `width` tokens: of b * x (conv), of q, k, v (delta and
    keyed), of x, b, c (mamba), in this order of channels; all but the first pass through silu. With one tap of ones it
    is none. Then, for each head of a token, with a state S of [K, V] in f32 and q, k, b, c of the head's group:

        delta  q, k <- q / |q|, k / |k| (eps 1e-6 under the root); q <- q / sqrt(K); r = exp(decay * softplus(a + bias))
               S <- r * S;  S <- S + k (rate_scale * sigmoid(beta) * (v - k^T S));  y = q^T S
               out = norm(y) * silu(z), norm over V
        keyed  as delta, but a, bias and r have a value for each row of S, and sigmoid(z) takes the place of silu(z);
               with a `decay_bound` r = exp(-decay_bound * sigmoid(-decay * (a + bias)))
        mamba  dt <- clip(softplus(dt + bias), dt_limits);  S <- exp(dt * decay) * S + b (dt * x)^T
               y = c^T S + skip * x
               out = norm(y * silu(z)), or norm(y) * silu(z) if `norm_first`; the norm is over H * V / `norm_groups`;
               without a norm y * silu(z)

    shift has `factors` f32[n, channels], and keeps the last x in the columns of the window from `column` on:

        y_i = x + factors[i] * (x of the token before - x), which is 0 before the first token

    rwkv has `factors` f32[3, H * K] of u, k and the bonus; m and f only if `mixes_values`:

        d = exp(-sigmoid(w) / sqrt(e));  a <- sigmoid(a);  u = k * factors[0];  u <- u / max(|u|, 1e-12)
        k <- k * (1 + (a - 1) * factors[1]);  v <- v + sigmoid(m) * (f - v)
        S <- d * S - (a * u) (u^T S)^T + k v^T;  y = r^T S
        out = (norm(y) + (r^T (factors[2] * k)) * v) * g, a layer norm over V
    """

    kind: Literal["conv", "delta", "keyed", "mamba", "selective", "lightning", "lru", "shift", "rwkv"]
    layer: int  # index among the recurrent layers: selects the states
    width: int  # taps of the convolution
    channels: int
    heads: int = 0
    groups: int = 0
    key_size: int = 0
    value_size: int = 0
    conv_weight: Array = None  # f32[channels, width]  the last tap multiplies the newest token
    conv_bias: Array | None = None  # f32[channels]
    decay: Array | None = None  # f32[heads]  -exp(A_log); selective: f32[key_size, channels]; lru: f32[channels]
    # f32[heads]  of a (delta) or dt (mamba); keyed: f32[heads * key_size]; lru: f32[2 * channels]  of r and i
    bias: Array | None = None
    skip: Array | None = None  # f32[heads]; selective: f32[channels]
    norm: Norm | None = None
    norm_first: bool = True
    norm_groups: int = 1
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    rate_scale: float = 1.0  # delta and keyed
    decay_bound: float = 0.0  # keyed: most of -log r; 0: none
    tiled: bool = False  # delta: head h belongs to group h % groups, instead of h // (heads // groups)
    factors: Array | None = None  # shift: f32[n, channels]; rwkv: f32[3, heads * key_size]
    column: int = 0  # shift: the first one in a window
    window: int = 0  # shift: columns of a window
    mixes_values: bool = False  # rwkv: values are mixed with those of the first layer
    prepared: Any = None  # the kernel set's own form, created at load

    @property
    def in_features(self) -> int:
        """Rows of the input projection; of the convolution's input where a scan follows."""
        if self.by_channel or self.kind == "shift":
            return self.channels
        if self.kind == "conv":
            return 3 * self.channels
        if self.kind == "rwkv":
            return self.heads * (4 * self.key_size + (4 if self.mixes_values else 2) * self.value_size)
        inner, keys = self.heads * self.value_size, self.groups * self.key_size
        gates = {"delta": 2, "keyed": 1 + self.key_size, "mamba": 1, "lightning": 0}[self.kind]  # of each head
        return 2 * (inner + keys) + gates * self.heads

    @property
    def has_delta_rule(self) -> bool:
        return self.kind in ("delta", "keyed")

    @property
    def out_features(self) -> int:
        if self.kind == "shift":
            factors: Array = self.factors
            return math.prod(factors.shape)
        return self.channels if self.only_convolves else self.heads * self.value_size

    @property
    def scan_features(self) -> int:
        """Columns of the input of `KernelSet.scan`."""
        return 3 * self.channels + (2 * self.key_size if self.kind == "selective" else 0)

    @property
    def by_channel(self) -> bool:
        """Whether each channel has a state of its own, which `KernelSet.scan` computes."""
        return self.kind in ("selective", "lru")

    @property
    def is_rwkv(self) -> bool:
        """Whether it is one of the two parts of a layer of RWKV, which `kernels.rwkv` defines."""
        return self.kind in ("shift", "rwkv")

    @property
    def only_convolves(self) -> bool:
        return self.kind == "conv" or self.by_channel
