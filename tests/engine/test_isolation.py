"""A step that raises: the request at fault ends, the others finish with the tokens they would have had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bifolio.api.outputs import request_output
from bifolio.beam_params import BeamSearchParams
from bifolio.config import SpeculativeConfig
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.fault.isolation import MAX_FAILURES_IN_A_ROW
from bifolio.engine.postprocess import Ticket
from bifolio.kernels.interface import Batch
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import FinishReason, Request, StepResult
from helpers import make_engine, output_ids, random_prompt, run_alone

POISON = 60  # a token id that random prompts below do not contain


class Faulty:
    """Passes that fail when a condition on the batch holds."""

    def __init__(self, engine: InferenceEngine, fails: Callable[[Batch], bool]) -> None:
        self._fails = fails
        self.num_failures = 0
        for executor in (engine.prefill_executor, engine.decode_executor):
            executor.run = self.checked(executor.run)  # type: ignore[method-assign]

    def checked(self, run: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        def run_or_fail(batch: Batch) -> Any:
            if self._fails(batch):
                self.num_failures += 1
                raise FloatingPointError("the kernel failed")
            return run(batch)

        return run_or_fail


break_engine = Faulty


def has_poison(batch: Batch) -> bool:
    return bool((np.asarray(batch.token_ids) == POISON).any())


def prompts(count: int) -> list[list[int]]:
    return [random_prompt(5 + 3 * number, seed=number, vocab_size=POISON) for number in range(count)]


PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=10, ignore_eos=True, bad_words_token_ids=((POISON,),))


def drain(engine: InferenceEngine, limit: int = 2000) -> list[Any]:
    results = []
    for _ in range(limit):
        if not engine.has_work:
            return results
        results += engine.step()
    raise AssertionError("stuck")


@pytest.mark.full
@pytest.mark.parametrize("culprits", [[0], [6], [2, 3], [0, 3, 6]])
def test_only_those_at_fault_fail(culprits: list[int]) -> None:
    engine = make_engine()
    break_engine(engine, has_poison)
    inputs = prompts(7)
    for number in culprits:
        inputs[number] = [*inputs[number], POISON, 7]
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(inputs)]
    results = drain(engine)
    check(engine, requests, inputs, culprits)
    ends = [result.request_id for result in results if result.finished]
    assert sorted(ends) == sorted(str(number) for number in range(7))


def check(engine: InferenceEngine, requests: list[Request], inputs: list[list[int]], culprits: list[int]) -> None:
    for number, request in enumerate(requests):
        if number in culprits:
            assert request.sequences[0].finish_reason is FinishReason.ERROR
            assert request.error is not None
            assert "FloatingPointError" in request.error
        else:
            assert output_ids(request) == output_ids(run_alone(inputs[number], PARAMS)), number
    assert engine.stats().num_used_blocks == 0
    assert not engine.requests
    engine.blocks.check_invariants()


def test_a_failure_in_the_middle_of_decoding_keeps_what_was_generated() -> None:
    """The culprit fails at its 20th position; the others are deep in their texts by then."""
    engine = make_engine()
    inputs = prompts(5)
    inputs[1] = random_prompt(13, seed=77, vocab_size=POISON)

    def fails(batch: Batch) -> bool:
        """A property of one sequence: its first block is part of the batch and position 20 is computed."""
        return any(
            item.held.request.request_id == "1" and item.held.num_computed >= 20
            for item in engine.batcher.active_slots()
        )

    faulty = break_engine(engine, fails)
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(inputs)]
    drain(engine)
    assert faulty.num_failures >= 2
    assert len(requests[1].sequences[0].output_token_ids) == 8
    check(engine, requests, inputs, [1])


@pytest.mark.full
def test_requests_that_arrive_during_a_trial_wait_and_finish() -> None:
    engine = make_engine()
    break_engine(engine, has_poison)
    inputs = prompts(6)
    inputs[2] = [POISON, 3, 4]
    requests = [engine.add_request(str(number), inputs[number], PARAMS) for number in range(4)]
    engine.step()
    requests += [engine.add_request(str(number), inputs[number], PARAMS) for number in (4, 5)]
    engine.step()
    assert engine.faults.num_parked
    drain(engine)
    check(engine, requests, inputs, [2])


def test_aborts_during_a_trial() -> None:
    engine = make_engine()
    break_engine(engine, has_poison)
    inputs = prompts(6)
    inputs[5] = [POISON, 3, 4]
    requests = [engine.add_request(str(number), inputs[number], PARAMS) for number in range(6)]
    engine.step()
    engine.step()
    for number in (0, 4, 5):
        engine.abort(str(number))
    drain(engine)
    assert requests[0].sequences[0].finish_reason is FinishReason.ABORT
    for number in (1, 2, 3):
        assert output_ids(requests[number]) == output_ids(run_alone(inputs[number], PARAMS))
    assert engine.stats().num_used_blocks == 0


def test_several_completions_of_a_request_survive_together() -> None:
    engine = make_engine()
    break_engine(engine, has_poison)
    params = SamplingParams(n=3, temperature=1.0, seed=9, max_tokens=12, ignore_eos=True, logit_bias={POISON: -1e9})
    good = engine.add_request("good", random_prompt(9, vocab_size=POISON), params)
    for _ in range(4):
        engine.step()
    bad = engine.add_request("bad", [POISON, 1, 2], PARAMS)
    drain(engine)
    assert output_ids(good) == output_ids(run_alone(random_prompt(9, vocab_size=POISON), params))
    assert bad.error


def test_a_passing_failure_harms_nobody() -> None:
    """A step that fails once, for no request's fault: all finish as if nothing had been."""
    engine = make_engine()
    calls = iter(range(10**6))
    faulty = break_engine(engine, lambda batch: next(calls) == 4)
    inputs = prompts(5)
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(inputs)]
    drain(engine)
    assert faulty.num_failures == 1
    check(engine, requests, inputs, [])


def test_an_engine_that_always_fails_gives_up() -> None:
    """One request after the other would be ended for a fault that is not theirs: a restart is the better end."""
    engine = make_engine()
    break_engine(engine, lambda batch: True)
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(prompts(8))]
    with pytest.raises(FloatingPointError):
        drain(engine)
    assert sum(request.error is not None for request in requests) <= MAX_FAILURES_IN_A_ROW + 1


def test_beams_survive() -> None:
    prompt = random_prompt(9, seed=4, vocab_size=POISON)
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True, logit_bias={POISON: -1e9})

    def run(culprit_after: int | None) -> list[tuple[list[int], float]]:
        engine = make_engine()
        break_engine(engine, has_poison)
        request = engine.add_beam_search("beams", prompt, params)
        for number in range(6):
            if number == culprit_after:
                engine.add_request("bad", [POISON, 5, 6], PARAMS)
            engine.step()
        drain(engine)
        assert engine.stats().num_used_blocks == 0
        engine.blocks.check_invariants()
        return [(output.token_ids, output.score or 0.0) for output in request_output(request).outputs]

    expected = run(None)
    for culprit_after in (0, 3, 5):
        found = run(culprit_after)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_drafts_survive() -> None:
    engine = make_engine(speculative=SpeculativeConfig("ngram", adaptive=False))
    break_engine(engine, has_poison)
    inputs = [[7, 8, 9] * 4, [11, 12] * 5, [POISON, 3]]
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(inputs[:2])]
    for _ in range(3):
        engine.step()
    requests.append(engine.add_request("2", inputs[2], PARAMS))
    drain(engine)
    check(engine, requests, inputs, [2])
    assert engine.speculator.stats.num_draft_tokens > 0


@pytest.mark.parametrize("num_others", [0, 1, 3])
def test_a_request_that_ended_in_the_failing_step_convicts_no_other(num_others: int) -> None:
    """A row's error ends a request, and the step that ended it fails afterwards."""
    engine = make_engine()
    collect = engine.postprocess.collect

    def collect_and_fail(ticket: Ticket, results: list[StepResult]) -> None:
        collect(ticket, results)
        if any(result.finish_reason is FinishReason.ERROR for result in results):
            raise FloatingPointError("the kernel failed")

    engine.postprocess.collect = collect_and_fail  # type: ignore[method-assign]
    inputs = prompts(num_others)
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(inputs)]
    stuck = SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=(3,), no_repeat_ngram_size=2)
    culprit = engine.add_request("culprit", [5, 6, 7], stuck)
    drain(engine)
    assert culprit.error
    assert "no token can follow" in culprit.error
    check(engine, requests, inputs, [])


def test_a_failure_that_passes_ends_no_request_that_runs_alone() -> None:
    engine = make_engine()
    calls = iter(range(10**6))
    faulty = break_engine(engine, lambda batch: next(calls) == 4)
    request = engine.add_request("0", prompts(1)[0], PARAMS)
    drain(engine)
    assert faulty.num_failures == 1
    check(engine, [request], prompts(1), [])


@pytest.mark.parametrize("num_completions", [1, 2])
def test_a_request_that_fails_while_it_takes_its_slot_ends_alone(num_completions: int) -> None:
    """It has left the queue by then: it is not queued twice when the step is taken back."""
    engine, inputs = make_engine(), prompts(4)
    listener = engine.batcher._listener
    assert listener is not None
    taken = listener.slot_taken

    def slot_taken(index: int, sequence: Any) -> None:
        if sequence.request.request_id == "1":
            raise FloatingPointError("the parameters of this request cannot be stored")
        taken(index, sequence)

    listener.slot_taken = slot_taken  # type: ignore[method-assign]
    params = [replace(PARAMS, n=num_completions) if number == 1 else PARAMS for number in range(4)]
    requests = [
        engine.add_request(str(number), prompt, one)
        for number, (prompt, one) in enumerate(zip(inputs, params, strict=True))
    ]
    drain(engine)
    check(engine, requests, inputs, [1])
