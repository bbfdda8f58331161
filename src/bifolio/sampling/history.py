"""The tokens of a sequence so far, kept up to date with its live list of output tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class History:
    """Prompt and output of one sequence as one growing array, and optionally how often each token occurs.

    The engine appends to the list of output tokens; each access first appends the new tokens, so a step
    costs the new tokens and not the whole text. A list that became shorter (a rollback) is taken over anew. A list
    whose tokens were exchanged without becoming shorter must be announced with `restart`.

        |<------- prompt ------->|<---- output ---->|<- pending ->|
                                  followed             drafts, given per call
    """

    __slots__ = ("_buffer", "_counts", "_length", "_num_prompt", "_output", "_prompt_seen", "_vocab_size")

    def __init__(self, prompt: Sequence[int] | NDArray[Any], output: list[int], vocab_size: int) -> None:
        self._buffer: NDArray[np.int32] = np.asarray(prompt, dtype=np.int32)  # i32[capacity], filled up to _length
        self._num_prompt = self._length = len(self._buffer)
        self._output = output
        self._vocab_size = vocab_size
        self._counts: NDArray[np.int32] | None = None  # i32[vocab] occurrences in the output, once asked for
        self._prompt_seen: NDArray[np.bool_] | None = None  # bool[vocab], once asked for

    @property
    def prompt(self) -> NDArray[np.int32]:
        """i32[prompt]"""
        return self._buffer[: self._num_prompt]

    @property
    def num_output(self) -> int:
        return len(self._output)

    def restart(self) -> None:
        """Forget the output followed so far: the next look reads the whole list again."""
        self._length = self._num_prompt
        self._counts = None

    def tokens(self, pending: Sequence[int] = ()) -> NDArray[np.int32]:
        """i32[t]: prompt, output and the pending tokens; valid until the next call."""
        self._follow()
        self._reserve(self._length + len(pending))
        end = self._length + len(pending)
        self._buffer[self._length : end] = pending
        return self._buffer[:end]

    def output_counts(self, pending: Sequence[int] = ()) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """(ids, how often each occurs in output and pending tokens), without those that do not occur."""
        counts = self._with_pending(pending)
        ids = np.flatnonzero(counts)
        return ids, counts[ids]

    def seen(self, pending: Sequence[int] = ()) -> NDArray[np.intp]:
        """The ids that occur in prompt, output or pending tokens, in rising order."""
        if self._prompt_seen is None:
            self._prompt_seen = np.zeros(self._vocab_size, dtype=np.bool_)
            self._prompt_seen[self._buffer[: self._num_prompt]] = True
        return np.flatnonzero(self._prompt_seen | (self._with_pending(pending) > 0))

    def _with_pending(self, pending: Sequence[int]) -> NDArray[np.int32]:
        self._follow()
        if self._counts is None:
            output = self._buffer[self._num_prompt : self._length]
            self._counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        if not pending:
            return self._counts
        counts = self._counts.copy()
        np.add.at(counts, np.asarray(pending, dtype=np.intp), 1)
        return counts

    def _follow(self) -> None:
        end = self._num_prompt + len(self._output)
        if end < self._length:
            self.restart()
        if end == self._length:
            return
        fresh = self._output[self._length - self._num_prompt :]
        self._reserve(end)
        self._buffer[self._length : end] = fresh
        self._length = end
        if self._counts is not None:
            np.add.at(self._counts, fresh, 1)

    def _reserve(self, length: int) -> None:
        """Doubling keeps the cost per token constant."""
        if length > len(self._buffer):
            grown = np.empty(max(length, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
