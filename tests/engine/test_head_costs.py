"""A draft head on a CPU never costs more than a small share: an engine with a clock of its own, and known costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bifolio.config import SpeculativeConfig
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.executor import DecodeExecutor
from bifolio.engine.speculative.head_runner import HeadRun
from bifolio.engine.speculative.hidden_draft import HiddenDraft
from bifolio.engine.speculative.policy import CREDIT, SHARE, DraftPolicy
from bifolio.kernels.batch import Batch
from bifolio.kernels.interface import Array
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model.eagle import load_eagle
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from draft_heads import eagle_folder
from helpers import make_engine, output_ids, random_prompt, tiny_loaded

NUM_TOKENS, ROUNDS = 100, 6
# Costs of a token of context, a row more, a pass of the head, a token that it reads, a step that gives out states.
CONTEXT, ROW, DRAFT, ENTRY, STATES = 0.006, 0.25, 0.1, 0.02, 0.05


class Clock:
    """Time passes in passes of the model and of its head alone."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in ("engine.engine", "engine.speculative.speculator", "engine.speculative.hidden_draft"):
            patch.setattr(f"bifolio.{module}.time", SimpleNamespace(perf_counter=lambda: self.now))
        run = DecodeExecutor.run

        def timed(executor: DecodeExecutor, batch: Batch) -> Array:
            lengths = batch.segments[0].context_lens
            self.now += plain_cost(int(sum(lengths)), len(lengths)) + ROW * (batch.num_tokens - len(lengths))
            return run(executor, batch)

        patch.setattr(DecodeExecutor, "run", timed)

    def watch_head(self, engine: InferenceEngine, texts: dict[str, list[int]], chance: float) -> None:
        """Let the head take its time, and draft the next token of the text with this chance."""
        assert engine.speculator is not None
        drafter, draws = engine.speculator.drafter, random.Random(0)
        assert isinstance(drafter, HiddenDraft)
        absorb, fill, draft = drafter.absorb, drafter.fill, drafter.runner.run

        def timed(plan: StepPlan, states: Array | None, *, is_resting: bool) -> None:
            self.now += 0.0 if states is None else STATES
            absorb(plan, states, is_resting=is_resting)

        def timed_draft(runs: list[HeadRun], *arguments: Any, **options: Any) -> tuple[Array, Array]:
            self.now += DRAFT + ENTRY * sum(len(run.tokens) for run in runs)
            return draft(runs, *arguments, **options)

        def guess(items: Sequence[ScheduledSequence], *, on_device: bool = False) -> list[tuple[int, ...]]:
            fill(items)
            drafts = []
            for item in items:
                start = len(item.sequence.output_token_ids)
                text = texts[item.sequence.request.request_id][start : start + item.num_new - 1]
                drafts.append(tuple(token if draws.random() < chance else (token + 1) % 61 for token in text))
            return drafts

        drafter.absorb, drafter.fill, drafter.runner.run = timed, guess, timed_draft  # type: ignore[method-assign]


def plain_cost(context: int, num_sequences: int) -> float:
    return 0.8 + 0.2 * num_sequences + CONTEXT * context


def new_engine(speculative: bool) -> InferenceEngine:
    options: dict[str, object] = {"kernels": ReferenceKernels(), "num_blocks": 256}
    if speculative:
        folder = eagle_folder()
        options["speculative"] = SpeculativeConfig("eagle", draft_model=str(folder), length=2)
        options["draft_model"] = load_eagle(folder, tiny_loaded())
    return make_engine(**options)  # type: ignore[arg-type]


def run(engine: InferenceEngine, num_sequences: int) -> dict[str, list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [engine.add_request(str(i), random_prompt(5 + i, i, 61), params) for i in range(num_sequences)]
    while engine.has_work:
        engine.step()
    return {request.request_id: output_ids(request)[0] for request in requests}


def speed(num_sequences: int, chance: float, patch: pytest.MonkeyPatch) -> float:
    """Of an engine with a head, as a share of the plain engine's; contexts begin anew with each round of requests."""
    clock = Clock(patch)
    plain, guessing = new_engine(False), new_engine(True)
    texts = run(plain, num_sequences)
    plain_seconds, clock.now = clock.now, 0.0
    clock.watch_head(guessing, texts, chance)
    for _ in range(ROUNDS):
        guessing.blocks.drop_cached()
        assert run(guessing, num_sequences) == texts
    return ROUNDS * plain_seconds / clock.now


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("chance", [0.0, 0.4, 0.6])
def test_an_engine_with_a_head_is_never_much_slower(
    num_sequences: int, chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a plain step is that of its context, not that of the request before."""
    assert speed(num_sequences, chance, monkeypatch) > 0.98


@pytest.mark.parametrize(("num_sequences", "chance", "least"), [(1, 0.9, 1.5), (1, 1.0, 1.7), (4, 1.0, 1.4)])
def test_drafts_that_pay_off_are_made(
    num_sequences: int, chance: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert speed(num_sequences, chance, monkeypatch) > least


@pytest.mark.parametrize(("chance", "most"), [(0.0, 1), (1.0, 4)])
def test_one_sequence_tries_first(chance: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head reads one prompt; those of the others, when the drafts of the first are accepted."""
    clock, plain, engine = Clock(monkeypatch), new_engine(False), new_engine(True)
    clock.watch_head(engine, run(plain, 4), chance)
    assert engine.speculator is not None
    drafter = engine.speculator.drafter
    assert isinstance(drafter, HiddenDraft)
    draft, numbers = drafter.runner.run, []

    def counted(runs: list[HeadRun], *arguments: Any, **options: Any) -> tuple[Array, Array]:
        numbers.append(len(runs))
        return draft(runs, *arguments, **options)

    drafter.runner.run = counted  # type: ignore[method-assign]
    run(engine, 4)
    assert numbers[0] == 1
    assert max(numbers) == most


def test_states_that_plain_steps_return_are_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a trial is always due but no length is chosen, each step returns states."""
    clock, engine = Clock(monkeypatch), new_engine(True)
    clock.watch_head(engine, {}, 0.0)
    monkeypatch.setattr(DraftPolicy, "choose", lambda self, *_: {})
    monkeypatch.setattr(DraftPolicy, "rest", lambda self, *_: 0)
    run(engine, 1)
    assert engine.speculator is not None
    policy, earned = engine.speculator.policy, NUM_TOKENS * SHARE
    share = STATES / plain_cost(60, 1)
    assert policy.balance < CREDIT / 4 + earned - 0.5 * NUM_TOKENS * share
