"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last ones."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from bifolio.engine.speculative.drafter import Drafter, Offer
from bifolio.schedule.plan import ScheduledSequence
from bifolio.sequence import Sequence

SIZES = (4, 3, 2)  # tokens of the n-grams that are looked up: long matches first, which are accepted more often


class NgramDrafter(Drafter):
    """Prompt lookup: drafts the tokens that followed the last occurrence of the final n-gram."""

    def __init__(self) -> None:
        self._indexes: dict[int, _NgramIndex] = {}
        self._guesses: dict[int, tuple[int, ...]] = {}

    def offers(self, sequences: list[Sequence], length: int) -> dict[int, Offer]:
        """Offer the matches; the kind of a draft is the size of its n-gram."""
        self._guesses = {}
        offers = {}
        for sequence in sequences:
            index = self._indexes.get(sequence.id)
            if index is None:
                index = self._indexes[sequence.id] = _NgramIndex(SIZES)
            guess, size = index.guess(sequence.token_ids, length)
            if guess:
                self._guesses[sequence.id] = guess
                offers[sequence.id] = Offer(len(guess), size)
        return offers

    def fill(self, items: Sequences[ScheduledSequence], *, on_device: bool = False) -> list[tuple[int, ...]]:
        return [self._guesses.get(item.sequence.id, ())[: item.num_new - 1] for item in items]

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.id, None)


class _NgramIndex:
    """Last end position of each n-gram of one sequence; grows with the sequence."""

    __slots__ = ("_ends", "_num_indexed", "_sizes")

    def __init__(self, sizes: Sequences[int]) -> None:
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def guess(self, tokens: list[int], length: int) -> tuple[tuple[int, ...], int]:
        """(Up to `length` tokens that followed the latest earlier occurrence of the longest matching end, its size)."""
        for end in range(self._num_indexed + 1, len(tokens)):  # the final n-gram must not match itself
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
        for size in self._sizes:
            found = self._ends.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if found is not None:
                return tuple(tokens[found : found + length]), size
        return (), 0
