"""The mask of an answer with reasoning: a grammar behind it, and a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bifolio.sampling.thinking import AfterThinking

OPEN, CLOSE, BREAK = 5, 6, 7
VOCAB = 20


class Only:
    """A grammar that allows one token at each position of the answer."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def follow(self, output: list[int]) -> Only:
        mask = Only(self._tokens)
        mask._output = output  # type: ignore[attr-defined]
        return mask

    def allowed(self, pending: Sequence[int]) -> np.ndarray:
        bits = np.zeros(3, dtype=np.uint8)
        token = self._tokens[len(self._output) + len(pending)]  # type: ignore[attr-defined]
        bits[token >> 3] = 1 << (token & 7)
        return bits

    def restart(self) -> None: ...


def allowed(rule: AfterThinking, output: list[int], pending: Sequence[int] = ()) -> set[int]:
    bits = np.unpackbits(rule.follow(output).allowed(pending), bitorder="little")[:VOCAB]
    return set(np.flatnonzero(bits).tolist())


EVERY = set(range(VOCAB))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], EVERY),
        ([1, 2], EVERY),
        ([1, 2, 3], {CLOSE}),  # the budget is spent
        ([1, 2, 3, CLOSE], {BREAK}),
        ([1, 2, 3, CLOSE, BREAK], {11}),
        ([1, 2, 3, CLOSE, BREAK, 11], {12}),
        ([1, CLOSE], {11}),  # the model ended it itself
        ([1, CLOSE, 11], {12}),
    ],
)
def test_open_reasoning(tokens: list[int], expected: set[int]) -> None:
    rule = AfterThinking(VOCAB, (), (CLOSE,), (CLOSE, BREAK), 3, Only([11, 12, 13]))
    for cut in range(len(tokens) + 1):  # any part of the tokens may be drafts
        assert allowed(rule, tokens[:cut], tokens[cut:]) == expected


def test_reasoning_that_the_model_may_begin() -> None:
    rule = AfterThinking(VOCAB, (OPEN,), (CLOSE,), (CLOSE, BREAK), 2, Only([11, 12]))
    assert allowed(rule, []) == {OPEN, 11}
    assert allowed(rule, [11]) == {12}
    assert allowed(rule, [OPEN]) == EVERY
    assert allowed(rule, [OPEN, 1, 2]) == {CLOSE}
    assert allowed(rule, [OPEN, CLOSE]) == {11}


def test_a_budget_without_a_grammar_and_a_grammar_without_a_budget() -> None:
    budget = AfterThinking(VOCAB, (), (CLOSE, BREAK), (CLOSE, BREAK), 1)
    assert allowed(budget, [1]) == {CLOSE}
    assert allowed(budget, [1, CLOSE]) == {BREAK}
    assert allowed(budget, [1, CLOSE, BREAK]) == EVERY
    free = AfterThinking(VOCAB, (), (CLOSE,), (CLOSE,), None, Only([11]))
    assert allowed(free, [1] * 9) == EVERY
    assert allowed(free, [*[1] * 9, CLOSE]) == {11}


def test_a_mask_follows_its_list() -> None:
    rule = AfterThinking(VOCAB, (), (CLOSE,), (CLOSE,), None, Only([11, 12]))
    output = [1, CLOSE, 11]
    mask = rule.follow(output)
    assert mask.allowed([])[12 >> 3] == 1 << (12 & 7)
    del output[1:]
    assert set(mask.allowed([]).tolist()) == {255}
    output += [CLOSE]
    assert mask.allowed([])[11 >> 3] == 1 << (11 & 7)
