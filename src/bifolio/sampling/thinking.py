"""A model that reasons first: the grammar of its answer begins behind the reasoning, whose length may be limited.

|<-- opening -->|<-- reasoning, at most `budget` tokens -->|<-- closing -->|<-- answer: grammar -->|
                                                           ^ forced when the budget is spent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class _Mask(Protocol):
    def allowed(self, pending: Sequence[int]) -> NDArray[Any]: ...

    def restart(self) -> None: ...

    def forced(self) -> list[int]: ...


class _Compiled(Protocol):
    def follow(self, output_token_ids: list[int]) -> _Mask: ...


@dataclass(frozen=True, slots=True)
class AfterThinking:
    """The constraint of an answer with reasoning at its start."""

    vocab_size: int
    opening: tuple[int, ...]  # begins the reasoning; empty: the prompt ends inside it
    closing: tuple[int, ...]  # ends it
    forced: tuple[int, ...]  # is written when the budget is spent; begins with `closing`
    budget: int | None = None  # tokens of reasoning
    grammar: _Compiled | None = None  # of the answer behind it

    def follow(self, output_token_ids: list[int]) -> ThinkingMask:
        """A mask for a sequence whose output is this very list, which the engine appends to."""
        return ThinkingMask(self, output_token_ids)


class ThinkingMask:
    """Implements `TokenMask`. Like that of a grammar, it is a function of the tokens and not of the calls."""

    __slots__ = ("_answer", "_inner", "_output", "_rule", "_start")

    def __init__(self, rule: AfterThinking, output_token_ids: list[int]) -> None:
        self._rule, self._output = rule, output_token_ids
        self._answer: list[int] = []  # tokens behind the reasoning: the list that the grammar follows
        self._start = 0  # where the answer began at the last call
        self._inner = None if rule.grammar is None else rule.grammar.follow(self._answer)

    def restart(self) -> None:
        if self._inner is not None:
            self._inner.restart()

    def allowed(self, pending: Sequence[int]) -> NDArray[Any]:
        rule, tokens = self._rule, [*self._output, *pending]
        start = len(rule.opening)
        if tokens[:start] != list(rule.opening):
            if len(tokens) < start and tokens == list(rule.opening[: len(tokens)]):
                return self._with(self._behind(0, tokens), rule.opening[len(tokens)])
            return self._behind(0, tokens)
        limit = None if rule.budget is None else start + rule.budget
        end = _find(tokens, rule.closing, start, limit)
        if end is not None:
            return self._behind(end, tokens)
        if limit is None or len(tokens) < limit:
            return self._every(255)
        written = len(tokens) - limit
        if written < len(rule.forced) and tokens[limit:] == list(rule.forced[:written]):
            return self._with(self._every(0), rule.forced[written])
        return self._behind(limit + len(rule.forced), tokens)

    def forced(self) -> list[int]:
        """The tokens that must follow the output, as `GrammarMask.forced`."""
        rule, tokens = self._rule, self._output
        start = len(rule.opening)
        if tokens[:start] != list(rule.opening):
            begins = tokens == list(rule.opening[: len(tokens)])
            return [] if begins else self._forced_behind(0)
        limit = None if rule.budget is None else start + rule.budget
        end = _find(tokens, rule.closing, start, limit)
        if end is not None:
            return self._forced_behind(end)
        if limit is None or len(tokens) < limit:
            return []
        written = tokens[limit:]
        if len(written) < len(rule.forced) and written == list(rule.forced[: len(written)]):
            return list(rule.forced[len(written) :])
        return self._forced_behind(limit + len(rule.forced))

    def _forced_behind(self, start: int) -> list[int]:
        if self._inner is None or start > len(self._output):
            return []
        self._follow(start, self._output, len(self._output))
        return self._inner.forced()

    def _behind(self, start: int, tokens: list[int]) -> NDArray[Any]:
        """The mask of the answer, which begins at `start`."""
        if self._inner is None:
            return self._every(255)
        taken = max(len(self._output), start)  # tokens from here on are drafts
        self._follow(start, tokens, taken)
        return self._inner.allowed(tokens[taken:])

    def _follow(self, start: int, tokens: list[int], end: int) -> None:
        """Let the grammar follow these tokens."""
        if start != self._start and self._inner is not None:  # other tokens are the answer now
            self._start = start
            self._inner.restart()
        self._answer[:] = tokens[start:end]

    def _every(self, byte: int) -> NDArray[np.uint8]:
        return np.full(-(-self._rule.vocab_size // 8), byte, dtype=np.uint8)

    def _with(self, mask: NDArray[Any], token: int) -> NDArray[np.uint8]:
        """A mask that also allows this token."""
        bits = self._every(0)
        shared = min(len(bits), len(mask.view(np.uint8)))
        bits[:shared] = mask.view(np.uint8)[:shared]
        bits[token >> 3] |= 1 << (token & 7)
        return bits


def _find(tokens: list[int], closing: tuple[int, ...], start: int, limit: int | None) -> int | None:
    """The position behind the first `closing` that begins before `limit`; None if there is none."""
    last = len(tokens) if limit is None else min(limit, len(tokens))
    at = start
    while at < last:
        try:
            at = tokens.index(closing[0], at, last)
        except ValueError:
            return None
        if tokens[at : at + len(closing)] == list(closing):
            return at + len(closing)
        at += 1
    return None
