"""The masks of a step, computed together: the same bits as one by one, and budgets that hold for each grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from bifolio.sampling import grammar_mask, joint_masks
from bifolio.sampling.grammar import Grammar, compile_grammar
from bifolio.sampling.grammar_mask import GrammarMask
from bifolio.sampling.joint_masks import JointMasks
from bifolio.sampling.thinking import AfterThinking
from helpers import tiny_loaded, tiny_tokenizer

VOCAB = 320
WORDS = VOCAB // 32


class Even:
    """Implements `TokenMask`: even ids below 100, as booleans."""

    def allowed(self, pending: Sequence[int]) -> np.ndarray:
        return np.arange(100) % 2 == 0

    def restart(self) -> None: ...


def compiled(grammar: Grammar) -> Any:
    return compile_grammar(grammar, tiny_loaded(tokenizer=True))


def bits(row: np.ndarray) -> np.ndarray:
    return np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]


def expected_bits(mask: np.ndarray) -> np.ndarray:
    packed = np.packbits(mask, bitorder="little") if mask.dtype == np.bool_ else mask.view(np.uint8)
    whole = np.zeros(VOCAB // 8, np.uint8)
    whole[: min(len(packed), len(whole))] = packed[: len(whole)]
    return np.unpackbits(whole, bitorder="little")


def test_masks_equal_those_that_are_computed_one_by_one() -> None:
    """Grammars in every state, of ended texts and of texts that they forbid, beside other masks; 40 steps."""
    grammars = [compiled(g) for g in (Grammar.regex("[a-f]{2,30}"), Grammar.json_object(), Grammar.choice(["a"]))]
    grammars.append(AfterThinking(VOCAB, (), (5,), (5,), budget=3, grammar=grammars[0]))
    rng = random.Random(3)
    outputs: list[list[int]] = [[] for _ in range(12)]
    masks: list[Any] = [grammars[index % 4].follow(output) for index, output in enumerate(outputs)]
    masks.insert(5, Even())
    outputs.insert(5, [])
    joint = JointMasks(num_threads=2)
    rows = np.empty((len(masks), WORDS), np.int32)
    for _ in range(40):
        rows[:] = 0x33333333
        joint.fill(masks, rows)
        for index, (mask, output, row) in enumerate(zip(masks, outputs, rows, strict=True)):
            again = mask if isinstance(mask, Even) else grammars[(index - (index > 5)) % 4].follow(output)
            np.testing.assert_array_equal(bits(row), expected_bits(again.allowed(())))
            choices = np.flatnonzero(bits(row))
            output.append(int(rng.choice(choices)) if len(choices) and rng.random() < 0.95 else 7)
    assert joint._executor is not None
    assert any(isinstance(mask, GrammarMask) and mask.joins for mask in masks)


def test_a_narrower_row_than_the_tokenizer_has_tokens() -> None:
    """The model's vocabulary may be smaller than the tokenizer's: tokens behind its end are cut off."""
    grammar, tokens = compiled(Grammar.regex("[a-f]{20}")), tiny_tokenizer().encode("abcabc").ids
    masks = [grammar.follow(output := []) for _ in range(3)]
    joint = JointMasks(num_threads=2)
    for token in tokens:
        rows = np.empty((3, WORDS - 3), np.int32)
        joint.fill(masks, rows)
        whole = grammar.follow(list(output)).allowed(())
        for row in rows[2:]:
            np.testing.assert_array_equal(row, whole.view(np.int32)[: WORDS - 3])
        output.append(token)


def test_a_mask_reads_its_new_tokens_alone() -> None:
    """The whole text is not copied or compared for every token."""

    class Watched(list[int]):
        most = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            Watched.most = max(Watched.most, len(found) if isinstance(index, slice) else 1)
            return found

        def __iter__(self) -> Any:
            raise AssertionError("the whole list was read")

    output = Watched()
    mask = compiled(Grammar.regex("[a-z]{0,2000}")).follow(output)
    token = tiny_tokenizer().encode("b").ids[0]
    joint, rows = JointMasks(num_threads=2), np.empty((2, WORDS), np.int32)
    other = compiled(Grammar.regex("[a-z]{0,2000}")).follow([])
    for _ in range(300):
        joint.fill([mask, other], rows)
        assert bits(rows[0])[token]
        output.append(token)
    assert Watched.most <= 1


# -- budgets, on a clock that masks advance ----------------------------------------------------------------------------


class Clock:
    """Stands in for `time`: every clock shows the work of masks."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    @property
    def module(self) -> Any:
        return SimpleNamespace(thread_time=self.read, perf_counter=self.read, process_time=self.read)


class Work:
    """Stands in for a matcher whose masks cost time."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds = clock, 0.0001

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return len(tokens)

    def is_error(self) -> bool:
        return False

    def compute_bitmask(self) -> bytes:
        self.clock.now += self.seconds
        return b"\xff" * (4 * WORDS)


class Executor:
    """Stands in for llguidance's: one thread."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def unsafe_compute_mask_ptr(self, jobs: list[tuple[Work, int]], *_: int) -> None:
        self.sizes.append(len(jobs))
        for work, _ in jobs:
            work.compute_bitmask()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(grammar_mask, "time", clock.module)
    monkeypatch.setattr(joint_masks, "time", clock.module)
    return clock


def new_masks(clock: Clock, count: int) -> tuple[list[Work], list[Any], JointMasks, Executor]:
    works = [Work(clock) for _ in range(count)]
    joint = JointMasks(num_threads=4)
    joint._executor = executor = Executor()
    return works, [GrammarMask(work, [], WORDS) for work in works], joint, executor


def test_the_grammar_that_makes_a_joint_call_slow_is_found_and_ended(clock: Clock) -> None:
    works, masks, joint, executor = new_masks(clock, 8)
    rows = np.full((8, WORDS), -1, np.int32)
    for _ in range(5):
        joint.fill(masks, rows)
    assert executor.sizes == [8] * 4  # the first mask of a sequence is measured
    works[3].seconds = 0.1
    num_steps = 0
    while rows[3].any():
        num_steps += 1
        rows[:] = -1
        joint.fill(masks, rows)
        assert (rows[[0, 1, 2, 4, 5, 6, 7]] == -1).all(), "others keep their masks"
        assert num_steps < 30, "the grammar is ended when its masks have cost its budget"
    assert num_steps > 5
    assert clock.now < 3.0
    for _ in range(3):
        joint.fill([mask for index, mask in enumerate(masks) if index != 3], rows[:7])
    assert executor.sizes[-1] == 7, "the others are computed together again"


def test_a_grammar_that_is_slow_in_company_alone_is_measured_more_and_more(clock: Clock) -> None:
    """Slow whenever it is not measured: the masks between two such calls double."""
    works, masks, joint, executor = new_masks(clock, 4)
    rows = np.empty((4, WORDS), np.int32)
    for _ in range(600):
        works[0].seconds = 0.3 if masks[0].joins else 0.0001
        joint.fill(masks, rows)
    assert executor.sizes.count(4) < 16
    assert clock.now / 600 < grammar_mask.MEAN_MASK_SECONDS


def test_a_single_mask_over_the_limit_ends_its_request(clock: Clock) -> None:
    works, masks, joint, _ = new_masks(clock, 2)
    works[1].seconds = grammar_mask.MAX_MASK_SECONDS + 0.1
    rows = np.zeros((2, WORDS), np.int32)
    joint.fill(masks, rows)
    assert rows[0].all()
    assert not rows[1].any()


def test_expensive_grammars_are_measured_one_by_one(clock: Clock) -> None:
    works, masks, joint, executor = new_masks(clock, 4)
    for work in works[:2]:
        work.seconds = 0.005
    rows = np.empty((4, WORDS), np.int32)
    for _ in range(10):
        joint.fill(masks, rows)
    assert executor.sizes == [2] * 9
