"""`Operations`: the part of a kernel set that the network is written in.

A batch is one flat list of tokens: arrays have one row for each token, [t, ...]. An operation is defined by
`kernels/reference.py`; docs/structure.md lists the files that a new one touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from bifolio.kernels.attention_interface import AttentionShape, Heads, PagedAttentionKernel, Storage
from bifolio.kernels.batch import AdapterUse, Batch
from bifolio.kernels.entry_interface import EntryOperations
from bifolio.kernels.operands import Array, Experts, HeadLinear, Linear, Norm, Recurrence, Router, Routing

SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702  # of the activation `swiglu_clamped`, which is no function of the gate alone
SILU_LIMIT = 10.0  # of the activation `silu_clamped`, which is none either
LEAST_MEAN_SQUARE = 1e-5  # of a stream that `match_streams` scales


class XieluCoefficients(NamedTuple):
    """The activation xIELU of one layer."""

    positive: float
    negative: float
    linear: float
    most: float


class Rotation(NamedTuple):
    """Cosine and sine for the tokens of a batch, computed once per pass."""

    cos: Array  # f32[t, rotary_dim / 2]
    sin: Array


class Operations(PagedAttentionKernel, EntryOperations, Protocol):
    """The operations that `model/transformer.py` calls."""

    def embed(self, table: Any, ids: Array, scale: float, *, is_partial: bool = False) -> Array:
        """Rows of a table, times a factor: [t, d]. A table that `is_partial` lacks the last ids, which read row 0."""
        ...

    def rotation(self, inverse_frequencies: Array, scale: float, positions: Array) -> Rotation:
        """Cosine and sine of each token's angles, times `scale`, from f32[half], or f32[2, half] for two sets.

        A position from `LONG_ROPE` on is that of a token which the second set rotates, `LONG_ROPE` positions earlier.
        """
        ...

    def norm(self, x: Array, norm: Norm) -> Array:
        """The norm of each group of as many columns as the norm has weights; mostly the whole row."""
        ...

    def add(self, x: Array, y: Array, scale: float = 1.0) -> Array:
        """(x + y) * scale."""
        ...

    def add_norm(self, x: Array, delta: Array, norm: Norm) -> tuple[Array, Array]:
        """(x + delta, norm of that): the residual stream and the next layer's input."""
        ...

    def linear(self, x: Array, linear: Linear) -> Array: ...

    def adapt(self, y: Array, x: Array, site: int, adapters: AdapterUse) -> Array:
        """The output y of the product at `site`, with the change by each token's adapter: y + up (down x) + bias.

        If the set is deterministic, the result of a token depends on the token and its adapter alone.
        """
        ...

    def adapt_embedding(self, x: Array, ids: Array, scale: float, adapters: AdapterUse) -> Array:
        """The embeddings x of tokens, times `scale`, with the change of the table by each token's adapter.

        A change adds `scale` times a row of `up` times `down`, or takes the row of `up` in place of the base's.
        """
        ...

    def rope_and_write(
        self, qkv: Array, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        """Split into heads, norm and rotate queries and keys, norm values, write keys and values to the cache.

        With `shape.queries_only` the rows hold queries alone: keys and values of the result are None.
        """
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

    def join_columns(self, parts: Sequence[tuple[Array, int, int]], factors: Array | None = None) -> Array:
        """The columns [start, stop) of each (x, start, stop), side by side, times f32[columns] `factors`."""
        ...

    def act_mul(self, x: Array, activation: str, cutoff: float | None = None) -> Array:
        """act(gate) * up for [t, 2 * ffn], gate and up concatenated: [t, ffn].

        With a cutoff the gates of a token are first replaced by max(gate - c, 0), where c is their mean plus `cutoff`
        standard deviations.
        `swiglu_clamped`: gate and up are clamped to `SWIGLU_LIMIT`; gate * sigmoid(`SWIGLU_SLOPE` * gate) * (up + 1).
        `silu_clamped`: gate and up are clamped to `SILU_LIMIT`, the gate from above alone; silu(gate) * up.
        """
        ...

    def act(self, x: Array, activation: str) -> Array:
        """`silu`, `gelu_tanh`, `gelu`, `tanh`, `sigmoid`, `relu`, or `relu2`, the square of max(x, 0)."""
        ...

    def clamp(self, x: Array, least: Array, most: Array) -> Array:
        """Each column between its bounds, f32[columns] each; NaN stays NaN."""
        ...

    def xielu(self, x: Array, coefficients: XieluCoefficients) -> Array:
        """linear * x, plus positive * x^2 where x > 0, else plus negative * (exp(min(x, most)) - 1 - x)."""
        ...

    def all_gather(self, x: Array, widths: tuple[int, ...]) -> Array:
        """The columns of all ranks side by side: [t, sum(widths)]; `x` as it is where there is one rank."""
        ...

    def all_reduce(self, x: Array) -> Array:
        """The sum over all ranks; `x` as it is where there is one rank."""
        ...

    def gate(self, x: Array, logits: Array) -> Array:
        """sigmoid(logits) * x for logits f32[t, n], one for each of n equal parts of a row (n divides its width)."""
        ...

    def route(self, logits: Array, router: Router) -> Routing:
        """The experts of each token, from logits f32[t, experts]."""
        ...

    def weigh(self, x: Array, routing: Routing) -> Array:
        """[t, d] times the weight of the first choice of each token."""
        ...

    def mix_experts(self, x: Array, routing: Routing, experts: Experts, adapters: AdapterUse | None = None) -> Array:
        """The sum of the outputs of each token's experts, by weight, in the order of the choice: [t, d].

        One operation, so that a set groups the tokens by expert in its own order, reads each expert's weights once and
        keeps the rows between the two products to itself. `adapters` change both products, as in `adapt`.
        """
        ...

    def recur(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        """The recurrence over the tokens of each sequence, in order: [t, out_features] from [t, in_features].

        Without a storage every segment's sequences start from the empty state and write none. If the set is
        deterministic, a sequence's results do not depend on the number of tokens in a pass, nor on other sequences.
        """
        ...

    def scan(self, x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
        """The scan of a recurrence by channel, behind its convolution (`recur`): [t, C].

        selective, from rows [z | x | dt | b | c]: z, x, dt, one for each of C channels; b, c: K; a state S of [K, C]

            dt <- softplus(dt);  S <- exp(dt * decay) * S + b (dt * x)^T;  y = (c^T S + skip * x) * silu(z)

        lru, from rows [x | r | i], C each; `bias` is that of r and of i; a state S of [C]

            a = exp(decay * sigmoid(r + bias));  S <- a * S + f * sigmoid(i + bias) * x;  y = S

        f is sqrt(1 - a^2), and 1 at the first token of a sequence that starts from the empty state. S is in f32.
        """
        ...

    # -- residual streams, side by side in a row: |<- stream 0 ->|<- stream 1 ->| ... |, each of d values -------------
    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        """[t, m * d]: stream i is the sum of coefficients[:, i * streams + j] * stream j of x over all j."""
        ...

    def add_to_streams(self, x: Array, y: Array, coefficients: Array | tuple[float, ...]) -> Array:
        """[t, n * d]: stream i of x plus coefficients[:, i] * y; a tuple has one coefficient for all tokens."""
        ...

    def match_streams(self, x: Array, y: Array) -> Array:
        """[t, n * d]: the streams of y, each scaled to the root mean square of x [t, d]."""
        ...

    # -- inputs and outputs of a pass ---------------------------------------------------------------------------------
    def take(self, x: Array, rows: Array) -> Array: ...

    def sum_rows(self, x: Array, starts: Array) -> Array:
        """f32[s, d]: the sum of the rows [starts[i], starts[i + 1]) of x; `starts` are on the host, all sums of one
        row or more. The order of the additions is that of the rows."""
        ...

    def given(self, batch: Batch, width: int, *, exact: bool = False) -> Array:
        """The rows `batch.given`: [t, width], in the set's type of activations, or `exact` as they are."""
        ...

    def tap(self, x: Array, column: int, batch: Batch) -> None:
        """Copy [t, d] to the columns from `column` on of `batch.taps`, if the batch has any."""
        ...

    def logits(self, x: Array, head: Linear, softcap: float, batch: Batch | None = None) -> Array:
        """f32[r, vocab]; the adapters of the logit rows of `batch` change the product before the cap, as in `adapt`."""
        ...
