"""Operations on compressed entries: keys that stand for many tokens each, in the row of the cache of the last of them.

    tokens    | 0  1  2  3 | 4  5  6  7 | 8  9 ...
    entries              e0           e1              a query at 7 sees e0 and e1, one at 6 sees e0

    layer     |<- rows to average ->|<- gates ->|    of every token
    layer + 1 |<- entry ->|                          of the last token of each run; zeros for all others

An entry is computed in the pass that has the last of its tokens, from rows that are all in the cache. So blocks of a
prefix are shared, copied and taken back as those of other keys, and nothing depends on the passes of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bifolio.kernels.attention_interface import AttentionShape, Storage
from bifolio.kernels.batch import Batch
from bifolio.kernels.operands import Array, Norm, Router, Routing

if TYPE_CHECKING:
    from bifolio.kernels.operations import Rotation


@dataclass(frozen=True, slots=True)
class Compressor:
    """How the entries of a layer are made.

        rows    |<- x ->|<- g ->|, of `size` columns each, or 2 * size where entries overlap
        entry   rotated(norm(sum of softmax(g + bias) * x)), where the softmax is over the tokens, in each column

    The tokens are a run of `tokens`. Entries that overlap take the last `size` columns of their own run and the first
    ones of the run before it, which the first entry lacks. The position of an entry is that of its first own token.
    """

    layer: int  # of the cache: rows of the tokens; entries are one layer behind
    tokens: int  # of a run
    size: int
    overlaps: bool
    bias: Array  # f32[tokens, columns of x]
    norm: Norm
    inverse_frequencies: Array  # f32[half]
    rope_scale: float = 1.0

    @property
    def columns(self) -> int:
        """Columns of x, and of g."""
        return self.size * (2 if self.overlaps else 1)


@dataclass(frozen=True, slots=True)
class StreamMix:
    """The constants of the weights by which streams are mixed; `base` of `count` values: the first weights alone."""

    count: int
    base: Array  # f32[(2 + count) * count] or f32[count]
    scale: Array  # f32[3] or f32[1]
    iterations: int
    eps: float


class EntryOperations(Protocol):
    """Operations of networks with compressed entries and mixed streams."""

    def stream_weights(self, logits: Array, mix: StreamMix) -> Array:
        """f32[t, (2 + n) * n]: |pre|post|mixing|; or f32[t, n] of pre alone.

        pre     sigmoid(logits * scale[0] + base) + eps
        post    2 * sigmoid(logits * scale[1] + base)
        mixing  [n, n]: column i is the softmax of row i of logits * scale[2] + base, plus eps, and then divided by
                the sums of rows and columns (plus eps) in turn, `iterations` times: coefficients of `mix_streams`
        """
        ...

    def turn_ends(self, x: Array, rotation: Rotation, size: int, *, back: bool = False) -> Array:
        """[t, n * size], the last dimensions of each part rotated by neighbouring pairs, or rotated back."""
        ...

    def compress(self, rows: Array, compressor: Compressor, batch: Batch, storage: Storage | None) -> Array:
        """The entries that end at each token [t, size], zeros elsewhere; rows and entries are written to the cache."""
        ...

    def choose_entries(
        self,
        query: Array,
        weights: Array,
        entries: Array,
        compressor: Compressor,
        shape: AttentionShape,
        batch: Batch,
        storage: Storage | None,
    ) -> Array:
        """The numbers of the entries that an indexer chooses for each query: i32[t, shape.top_k], ascending.

        As `choose`, over the entries that a query sees; the row of a query that sees at most top_k entries is -1.
        query: [t, heads * size]; entries: those of this pass, as `compress` returns them.
        """
        ...

    def attend_entries(
        self,
        query: Array,
        key: Array,
        entries: Array | None,
        chosen: Array | None,
        compressor: Compressor | None,
        shape: AttentionShape,
        batch: Batch,
        storage: Storage | None,
    ) -> Array:
        """Attention of queries [t, heads * dim] to the keys of their window, and to the entries that they see or chose.

        There is one head of keys [t, dim], which are the values; they are written to the cache. `compressor` is None
        in layers without entries.
        """
        ...

    def take_identities(self, x: Array, routing: Routing, count: int) -> tuple[Routing, Array]:
        """(the routing without experts from `count` on, f32[t, d]: `x` times the sum of their weights).

        Each of them becomes the first expert, with the weight 0.
        """
        ...

    def route_by_token(self, logits: Array, router: Router, table: Array, ids: Array) -> Routing:
        """The experts of each token by its row of a table, i32[vocab, top_k], with weights as those of `route`."""
        ...
