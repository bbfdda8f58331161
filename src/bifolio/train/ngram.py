"""An n-gram language model with interpolated Kneser-Ney smoothing: the baseline for trained networks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bifolio.errors import ConfigError

Keys = npt.NDArray[np.int64]  # n tokens as one integer in base `vocab_size`, first token most significant
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """Counts of one length of n-grams."""

    grams: Keys  # i64[g] sorted
    counts: Counts  # i64[g] occurrences; below the highest order: distinct tokens before the gram
    contexts: Keys  # i64[c] sorted: the grams without their last token
    context_totals: Counts  # i64[c] sum of the counts after this context
    context_kinds: Counts  # i64[c] distinct tokens after this context
    discount: float


class NgramModel:
    """Probabilities of a token given the `order - 1` tokens before it."""

    def __init__(self, tokens: npt.ArrayLike, vocab_size: int, order: int = 3) -> None:
        if order < 1 or order * np.log2(vocab_size) >= 63:
            raise ConfigError(f"{order}-grams over {vocab_size} tokens do not fit into 63 bits: lower the order")
        self.vocab_size, self.order = vocab_size, order
        keys = self._keys(np.asarray(tokens, np.int64), order)
        grams, counts = np.unique(keys, return_counts=True)
        self._orders: list[_Order] = []  # highest first
        for length in range(order, 0, -1):
            self._orders.append(self._order(grams, counts))
            grams, counts = np.unique(grams % vocab_size ** (length - 1), return_counts=True)

    def _order(self, grams: Keys, counts: Counts) -> _Order:
        contexts, first, kinds = np.unique(grams // self.vocab_size, return_index=True, return_counts=True)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once and twice else 0.5
        return _Order(grams, counts, contexts, np.add.reduceat(counts, first), kinds, discount)

    def loss(self, tokens: npt.ArrayLike) -> float:
        """Mean negative log-likelihood in nats per token, over the tokens with a full context."""
        return float(-np.log(self.probabilities(np.asarray(tokens, np.int64))).mean())

    def probabilities(self, tokens: Keys) -> npt.NDArray[np.float64]:
        """f64[n - order + 1]: the probability of each token with a full context."""
        keys = self._keys(tokens, self.order)
        result = np.full(len(keys), 1.0 / self.vocab_size)
        for length, order in zip(range(1, self.order + 1), reversed(self._orders), strict=True):
            grams = keys % self.vocab_size**length
            counts = _look_up(order.grams, order.counts, grams)
            contexts = grams // self.vocab_size
            totals = _look_up(order.contexts, order.context_totals, contexts)
            kinds = _look_up(order.contexts, order.context_kinds, contexts)
            seen = np.maximum(totals, 1)
            mixed = np.maximum(counts - order.discount, 0.0) / seen + order.discount * kinds / seen * result
            result = np.where(totals > 0, mixed, result)
        return result

    def _keys(self, tokens: Keys, length: int) -> Keys:
        count = len(tokens) - length + 1
        if count < 1:
            raise ConfigError(f"{len(tokens)} tokens hold no {length}-gram: pass more text")
        keys = np.zeros(count, np.int64)
        for i in range(length):
            keys = keys * self.vocab_size + tokens[i : i + count]
        return keys


def _look_up(keys: Keys, values: Counts, wanted: Keys) -> Counts:
    """The value of each wanted key, 0 for missing keys."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
