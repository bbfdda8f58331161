"""Engines with a draft head on a device: plain steps run ahead while drafts rest, and texts are the plain run's."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_slots import StandInKernels, StandInSlots

from bifolio.config import SpeculativeConfig
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.speculative.drafter import Offer
from bifolio.engine.speculative.policy import DraftPolicy
from bifolio.kernels.interface import Array
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model.eagle import load_eagle
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.plan import StepPlan
from draft_heads import eagle_folder
from helpers import make_engine, output_ids, random_prompt, tiny_loaded

NUM_TOKENS = 30


def new_engine(speculative: bool, *, on_device: bool = True, **options: object) -> InferenceEngine:
    kernels = StandInKernels() if on_device else ReferenceKernels()
    if not speculative:
        return make_engine(kernels=kernels)
    folder = eagle_folder()
    config = SpeculativeConfig("eagle", draft_model=str(folder), length=3, **options)  # type: ignore[arg-type]
    head = load_eagle(folder, tiny_loaded())
    return make_engine(kernels=kernels, speculative=config, draft_model=head)  # type: ignore[arg-type]


def fail(error: Exception) -> NoReturn:
    """Instead of a recovery, which would hide a step that failed."""
    raise error


def run(engine: InferenceEngine) -> tuple[list[list[list[int]]], list[int]]:
    """The outputs, and the number of steps in flight at each collection."""
    in_flight, collect = [], engine.collect

    def watched() -> None:
        in_flight.append(len(engine.in_flight))
        collect()

    engine.collect = watched  # type: ignore[method-assign]
    requests = []
    for i in range(3):
        params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
        requests.append(engine.add_request(str(i), random_prompt(5 + i, i, 61), params))
    while engine.has_work:
        engine.step()
    assert engine.blocks.num_used_blocks == 0
    return [output_ids(request) for request in requests], in_flight


@pytest.mark.parametrize("rests", [(0,), (5, 0, 0), (200,)])
def test_steps_run_ahead_while_drafts_rest(rests: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rests of some steps between steps that may have drafts, or one rest to the end."""
    expected, ahead = run(new_engine(False))
    left: list[int] = []

    def rest(self: DraftPolicy, num_sequences: int) -> int:
        if not left:
            left.extend(number for length in rests for number in range(length, -1, -1))
        return left.pop(0)

    engine = new_engine(True)
    monkeypatch.setattr(DraftPolicy, "rest", rest)
    monkeypatch.setattr(DraftPolicy, "choose", lambda self, *_: {})
    found, in_flight = run(engine)
    assert found == expected
    assert isinstance(engine.slots.device, StandInSlots)
    calls = engine.slots.device.calls
    assert (calls["verify"] > 0) == (rests != (200,)), "steps that return states are verifications without drafts"
    assert calls["follow"] == 0
    if rests == (200,):
        assert in_flight.count(2) >= len(ahead) - 6
        assert calls["decode"] >= NUM_TOKENS - 2
    elif rests != (0,):
        assert in_flight.count(2) > 5
        assert in_flight.count(1) > 5


def test_where_a_trial_is_far_every_step_runs_ahead_and_no_prompt_returns_states() -> None:
    expected, ahead = run(new_engine(False))
    engine = new_engine(True)
    assert engine.speculator is not None
    run(engine)  # measures plain steps
    absorbed, drafter, drafted = [], engine.speculator.drafter, engine.speculator.stats.num_draft_tokens
    absorb = drafter.absorb

    def watched(plan: StepPlan, states: Array | None, *, is_resting: bool) -> None:
        absorbed.append(states is not None)
        absorb(plan, states, is_resting=is_resting)

    drafter.absorb = watched  # type: ignore[method-assign]
    engine.speculator.policy.balance = -1.0
    for number in (1, 2, 3):
        for _ in range(3):
            engine.speculator.policy.collected_plain(number, 1.0)
    found, in_flight = run(engine)
    assert found == expected
    assert in_flight.count(2) >= ahead.count(2) - 2
    assert not any(absorbed)
    assert engine.speculator.stats.num_draft_tokens == drafted


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32))
def test_changing_estimates_never_change_a_text(seed: int) -> None:
    """Costs may change while drafts are in flight: no step runs ahead of the tokens that they give."""
    chance = random.Random(seed)
    expected, _ = run(new_engine(False))
    engine = new_engine(True)
    engine.faults.recover = fail  # type: ignore[method-assign]

    def choose(self: DraftPolicy, number: int, offers: dict[int, Offer], *_: object) -> dict[int, int]:
        return {key: chance.randint(1, offer.length) for key, offer in offers.items() if chance.random() < 0.8}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftPolicy, "choose", choose)
        patch.setattr(DraftPolicy, "rest", lambda self, *_: chance.choice([0, 0, 1, 8, 300]))
        found, _ = run(engine)
    assert found == expected


@pytest.mark.parametrize("on_device", [False, True])
def test_time_between_steps_is_no_time_of_plain_ones(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the time of the steps before in a rest."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1e-3
        return now

    for module in ("engine.engine", "engine.speculative.speculator"):
        monkeypatch.setattr(f"bifolio.{module}.time", SimpleNamespace(perf_counter=clock))
    rests = iter([0, 0, 0])  # a few steps that return states and have drafts, so that the head has entries
    monkeypatch.setattr(DraftPolicy, "rest", lambda self, *_: next(rests, 100))
    measured, observe = [], DraftPolicy.collected_plain

    def watched(self: DraftPolicy, num_sequences: int, seconds: float) -> None:
        measured.append(seconds)
        observe(self, num_sequences, seconds)

    monkeypatch.setattr(DraftPolicy, "collected_plain", watched)
    engine = new_engine(True, on_device=on_device)
    engine.add_request("0", random_prompt(5, 0, 61), SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))
    while engine.has_work:
        engine.step()
        if not engine.in_flight:  # else the device works meanwhile
            now += 100.0
    assert len(measured) >= 60
    assert max(measured) < 1.0


def test_drafts_are_drawn_and_verified_on_the_device() -> None:
    """The host launches each step without having seen its drafts."""
    engine = new_engine(True, adaptive=False)
    assert run(engine)[0] == run(new_engine(False))[0]
    assert isinstance(engine.slots.device, StandInSlots)
    calls = engine.slots.device.calls
    assert calls["verify"] > 5
    assert calls["follow"] == calls["verify"]
    assert calls["draft"] <= 4  # when a sequence begins
    assert calls["draw_drafts"] == 0
    assert engine.speculator is not None
    assert engine.speculator.stats.num_draft_tokens > 20


def traced(seed: int, engine: InferenceEngine) -> list[list[list[int]]]:
    """Requests of many kinds that arrive at random steps of an engine with few blocks."""
    chance, requests = random.Random(seed), []
    common = random_prompt(9, 0, 61)
    waiting = []
    for number in range(6):
        params = SamplingParams(
            temperature=chance.choice([0.0, 0.8]),
            seed=number,
            n=chance.choice([1, 1, 2]),
            max_tokens=chance.randint(1, 24),
            ignore_eos=True,
            logprobs=chance.choice([None, None, 2]),
            presence_penalty=chance.choice([0.0, 0.0, 0.0, 0.5]),
        )
        prompt = [*common[: chance.choice([0, 9])], *random_prompt(chance.randint(1, 12), number, 61)]
        waiting.append((prompt, params, chance.random() < 0.3))
    while waiting or engine.has_work:
        if waiting and (not engine.has_work or chance.random() < 0.2):
            prompt, params, is_aborted = waiting.pop()
            requests.append((engine.add_request(str(len(waiting)), prompt, params), is_aborted))
        if chance.random() < 0.1 and requests[0][1]:
            engine.abort(requests[0][0].request_id)
        engine.step()
    assert engine.blocks.num_used_blocks == 0
    return [output_ids(request) for request, is_aborted in requests if not is_aborted]


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_requests_have_the_plain_texts(seed: int) -> None:
    """Preemptions, prefix hits, forks, aborted requests and changing lengths while drafts are on the device."""
    chance = random.Random(seed)
    expected = traced(seed, make_engine(kernels=ReferenceKernels(), num_blocks=24, max_model_len=64))
    folder = eagle_folder()
    config = SpeculativeConfig("eagle", draft_model=str(folder), length=3)
    head = load_eagle(folder, tiny_loaded())
    engine = make_engine(
        kernels=StandInKernels(), num_blocks=24, max_model_len=64, speculative=config, draft_model=head
    )
    engine.faults.recover = fail  # type: ignore[method-assign]

    def choose(self: DraftPolicy, number: int, offers: dict[int, Offer], *_: object) -> dict[int, int]:
        return {key: chance.randint(1, offer.length) for key, offer in offers.items() if chance.random() < 0.8}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftPolicy, "choose", choose)
        patch.setattr(DraftPolicy, "wanted", lambda self, *_: chance.randint(1, 3))
        patch.setattr(DraftPolicy, "rest", lambda self, *_: chance.choice([0, 0, 0, 0, 1, 8]))
        assert traced(seed, engine) == expected


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_drafts_of_n_grams_are_verified_on_the_device(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent with the slots; the tokens of repetitive texts are accepted there."""
    monkeypatch.setattr(DraftPolicy, "rest", lambda self, *_: 0)
    expected = traced(seed, make_engine(kernels=ReferenceKernels(), num_blocks=24, max_model_len=64))
    config = SpeculativeConfig("ngram", length=3, adaptive=False)
    engine = make_engine(kernels=StandInKernels(), num_blocks=24, max_model_len=64, speculative=config)
    engine.faults.recover = fail  # type: ignore[method-assign]
    assert traced(seed, engine) == expected
    assert engine.speculator is not None
    assert isinstance(engine.slots.device, StandInSlots)
    assert engine.slots.device.calls["verify"] > 0 or engine.speculator.stats.num_drafts == 0
