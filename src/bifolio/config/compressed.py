"""The parts of networks whose layers attend to compressed entries, and mix parallel streams by the token."""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.errors import ConfigError

MOST_ENTRY_TOKENS = 1 << 12
MOST_HYPER_STREAMS = 16
MOST_ITERATIONS = 1 << 10
MOST_GROUPS = 1 << 10
MOST_RANK = 1 << 18


@dataclass(frozen=True, slots=True)
class HyperConfig:
    """Parallel residual streams that are mixed around attention and MLP by weights of the token (hyper-connections).

    x: the streams [count, d]; w: products with all streams, normed together

        y = part(norm(pre x))             pre = sigmoid(w) + eps, one for each stream
        x <- post y + mixing^T x          post = 2 sigmoid(w); the rows and the columns of mixing [count, count] add up
                                          to 1, after `iterations` of dividing by their sums
    """

    count: int
    iterations: int = 20
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not 1 < self.count <= MOST_HYPER_STREAMS:
            raise ConfigError(f"streams that are mixed are between 2 and {MOST_HYPER_STREAMS}, not {self.count}")
        if not 0 < self.iterations <= MOST_ITERATIONS:
            raise ConfigError(f"the weights of streams need 1 to {MOST_ITERATIONS} iterations, not {self.iterations}")

    @property
    def width(self) -> int:
        """Weights of a token, around one part of a layer."""
        return (2 + self.count) * self.count


@dataclass(frozen=True, slots=True)
class CompressedConfig:
    """Attention to the tokens of a window, and to entries that stand for `LayerConfig.entry_tokens` tokens each.

    There is one head of keys, which are the values. The last dimensions of heads are rotated, and those of the output
    of attention are rotated back. The output is projected in groups of heads, and then all groups together.

    An entry is the mean of the rows of its tokens, weighed by a softmax over the tokens in each dimension. Where
    entries are chosen (`LayerConfig.chooses_entries`), each is made of two runs of tokens, the second of which it does
    not share with the next, and a query attends to the `index_top_k` entries that an indexer ranks highest.
    """

    query_rank: int
    output_groups: int
    output_rank: int  # of one group
    index_heads: int = 0
    index_size: int = 0
    index_top_k: int = 0

    def __post_init__(self) -> None:
        for name, most in (("query_rank", MOST_RANK), ("output_groups", MOST_GROUPS), ("output_rank", MOST_RANK)):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"the model's {name} must be between 1 and {most}, not {getattr(self, name)}")

    def check_indexer(self, rotated: int) -> None:
        """Raise ConfigError unless the indexer can choose entries."""
        sizes = self.index_heads, self.index_size, self.index_top_k
        if min(sizes) < 1 or max(sizes[:2]) > 1 << 13:
            raise ConfigError("an indexer has {} heads of {} for {} entries: they are no real sizes".format(*sizes))
        if self.index_size < rotated:
            raise ConfigError(f"the heads of an indexer have {self.index_size} dimensions, and {rotated} are rotated")
