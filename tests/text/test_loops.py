"""Outputs that repeat the same tokens without an end are found; those with refrains are not."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from bifolio.text.loops import LEAST_TOKENS, LONGEST_PERIOD, LoopWatch


def found_at(tokens: Iterable[int]) -> int | None:
    """The number of tokens after which the output is called a loop."""
    watch = LoopWatch()
    return next((number for number, token in enumerate(tokens, 1) if watch.add(token)), None)


@pytest.mark.parametrize("period", [1, 2, 7, 60, LONGEST_PERIOD])
def test_a_loop_is_found_after_three_repeats(period: int) -> None:
    rng = random.Random(period)
    text = [rng.randrange(1000, 2000) for _ in range(50)]
    loop = list(range(period)) * (LEAST_TOKENS + 4)
    assert found_at(text + loop) == len(text) + period + max(LEAST_TOKENS, 3 * period)


def test_texts_that_go_on_are_no_loops() -> None:
    rng = random.Random(0)
    assert found_at(rng.randrange(50) for _ in range(5000)) is None
    assert found_at([*[7] * LEAST_TOKENS, 8] * 9) is None  # a row of dashes, again and again
    assert found_at(token for number in range(200) for token in (1, 2, 3, 100 + number, 4)) is None  # a numbered list
