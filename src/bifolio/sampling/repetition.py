"""Rules that look for repeated sequences of tokens: n-grams, forbidden words, and DRY.

All are pure functions of the tokens so far (i32[t], prompt included).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_DRY_MATCH = 128
"""Repetitions are measured up to this many tokens beyond the allowed length: the penalty is overwhelming by then."""


def ngram_bans(tokens: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    """The ids that would complete an n-gram of `size` tokens which already occurs."""
    prefix = size - 1
    if len(tokens) < size:
        return tokens[:0]
    starts = np.arange(len(tokens) - prefix)  # where an n-gram could start that has a token after its prefix
    for offset in range(prefix):
        starts = starts[tokens[starts + offset] == tokens[len(tokens) - prefix + offset]]
        if not len(starts):
            break
    return tokens[starts + prefix]


def word_bans(tokens: NDArray[np.int32], words: Sequence[tuple[int, ...]]) -> list[int]:
    """The last tokens of those forbidden sequences of which all other tokens have just been said."""
    return [
        word[-1]
        for word in words
        if len(word) - 1 <= len(tokens) and tokens[len(tokens) - len(word) + 1 :].tolist() == list(word[:-1])
    ]


def dry_matches(
    tokens: NDArray[np.int32], breakers: NDArray[np.int32], allowed_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For DRY: (ids, length of the longest repetition that each would continue), at least `allowed_length` long.

    An earlier place matches to the length over which the tokens up to it equal the last tokens; the id in question
    is the one that followed there. Repetitions do not reach across `breakers`, nor do breakers continue one.
    """
    none = np.empty(0, dtype=np.int64)
    if len(tokens) < 2 or tokens[-1] in breakers:
        return none, none
    last = len(tokens) - 1
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    places = places[~np.isin(tokens[places + 1], breakers)]
    lengths = np.ones(len(places), dtype=np.int64)
    alive = np.arange(len(places))
    for length in range(1, allowed_length + MAX_DRY_MATCH):
        alive = alive[places[alive] >= length]
        if length > last or tokens[last - length] in breakers:
            break
        alive = alive[tokens[places[alive] - length] == tokens[last - length]]
        if not len(alive):
            break
        lengths[alive] = length + 1
    long_enough = lengths >= allowed_length
    ids, index = np.unique(tokens[places[long_enough] + 1].astype(np.int64), return_inverse=True)
    longest = np.zeros(len(ids), dtype=np.int64)
    np.maximum.at(longest, index, lengths[long_enough])
    return ids, longest


def dry_penalties(
    lengths: NDArray[np.int64], allowed_length: int, multiplier: float, base: float
) -> NDArray[np.float64]:
    """The DRY penalty, subtracted from the logits: multiplier * base ** (length - allowed), kept finite."""
    with np.errstate(over="ignore"):
        return np.minimum(multiplier * np.power(base, (lengths - allowed_length).astype(np.float64)), 1e30)
