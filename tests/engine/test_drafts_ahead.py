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
from bifolio.engine.speculative.draft_lengths import DraftLengths, PassCosts
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
    """Rests of some steps between trials, or one rest to the end."""
    expected, ahead = run(new_engine(False))
    left = list(rests)

    def declined(self: DraftLengths, *_: object) -> tuple[bool, int]:
        rest = left[0]
        left.append(left.pop(0))
        return False, rest

    engine = new_engine(True)
    assert engine.speculator is not None
    if rests != (0,):
        monkeypatch.setattr(DraftLengths, "declined", declined)
        monkeypatch.setattr(DraftLengths, "choose", lambda self, *_: ({}, False))
        monkeypatch.setattr(DraftLengths, "can_pay", lambda self, *_: True)
    found, in_flight = run(engine)
    assert found == expected
    if rests == (200,):
        assert in_flight.count(2) >= len(ahead) - 6
        assert isinstance(engine.slots.device, StandInSlots)
        assert engine.slots.device.calls["decode"] >= NUM_TOKENS - 2
    elif rests != (0,):
        assert in_flight.count(2) > 5
        assert in_flight.count(1) > 5


def test_where_no_draft_can_pay_every_step_runs_ahead_and_no_prompt_gives_out_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, ahead = run(new_engine(False))
    monkeypatch.setattr(DraftLengths, "can_pay", lambda self, num_sequences: not self.steps.knows(num_sequences))
    engine = new_engine(True)
    assert engine.speculator is not None
    run(engine)  # measures plain steps
    absorbed, drafter = [], engine.speculator.drafter
    absorb = drafter.absorb  # type: ignore[attr-defined]

    def watched(plan: StepPlan, states: object) -> None:
        absorbed.append(states is not None)
        absorb(plan, states)

    drafter.absorb = watched  # type: ignore[attr-defined]
    known = engine.speculator.lengths.steps.knows
    found, in_flight = run(engine)
    assert found == expected
    assert in_flight.count(2) >= ahead.count(2) - 2
    assert absorbed.count(True) <= sum(not known(number) for number in (1, 2, 3))
    assert engine.speculator.stats.num_draft_tokens == 0


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32))
def test_changing_estimates_never_change_a_text(seed: int) -> None:
    """Costs may change while drafts are in flight: no step runs ahead of the tokens that they give."""
    chance = random.Random(seed)
    expected, _ = run(new_engine(False))
    engine = new_engine(True)
    engine.faults.recover = fail  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftLengths, "choose", lambda self, *_: ({0: chance.randint(1, 3)}, True))
        patch.setattr(DraftLengths, "can_pay", lambda self, *_: chance.random() < 0.6)
        patch.setattr(DraftLengths, "REST", chance.choice([2, 3, 8]))
        patch.setattr(PassCosts, "knows", lambda self, *_: chance.random() < 0.8)
        found, _ = run(engine)
    assert found == expected


def test_plain_steps_are_measured_after_many_short_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a warm-up leaves an engine: no number of slots was active long enough to be known."""
    monkeypatch.setattr(DraftLengths, "can_pay", lambda self, *_: False)
    engine = new_engine(True)
    assert engine.speculator is not None
    for number in range(12):
        for i in range(1 + number % 3):
            params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
            engine.add_request(f"{number}-{i}", random_prompt(5, i, 61), params)
        while engine.has_work:
            engine.step()
    _, in_flight = run(engine)
    assert engine.speculator.lengths.steps.knows(3)
    assert in_flight.count(2) > NUM_TOKENS - 6


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
    monkeypatch.setattr(DraftLengths, "declined", lambda self, *_: (False, 16))
    chosen = iter([({0: 1}, True)])  # one draft, so that the head has entries
    monkeypatch.setattr(DraftLengths, "choose", lambda self, *_: next(chosen, ({}, False)))
    monkeypatch.setattr(DraftLengths, "can_pay", lambda self, *_: True)
    measured, observe = [], PassCosts.observe

    def watched(self: PassCosts, num_rows: int, seconds: float, context: int = 0) -> None:
        measured.append(seconds)
        observe(self, num_rows, seconds, context)

    monkeypatch.setattr(PassCosts, "observe", watched)
    engine = new_engine(True, on_device=on_device)
    engine.add_request("0", random_prompt(5, 0, 61), SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))
    while engine.has_work:
        engine.step()
        if not engine.in_flight:  # else the device works meanwhile
            now += 100.0
    assert len(measured) >= 4
    assert max(measured) < 1.0


def test_drafts_are_drawn_on_the_device() -> None:
    engine = new_engine(True, adaptive=False)
    assert run(engine)[0] == run(new_engine(False))[0]
    assert isinstance(engine.slots.device, StandInSlots)
    assert engine.slots.device.calls["draw_drafts"] > 5
    assert engine.speculator is not None
    assert engine.speculator.stats.num_draft_tokens > 20
