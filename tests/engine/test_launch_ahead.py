"""Steps launched ahead: whatever comes and goes between steps, requests get the tokens that they get alone.

The engine's own state machine and the needle in a crowd run over it unchanged. On the CPU a launched step is complete
at once and its tokens are collected one step later, so that every order of events of a GPU is tried without one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import test_engine_needle
from hypothesis import HealthCheck, settings
from test_engine_machine import EngineMachine

from bifolio.beam_params import BeamSearchParams
from bifolio.engine.engine import InferenceEngine
from bifolio.kernels.reference import ReferenceKernels
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import FinishReason
from helpers import drain, log_softmax, make_engine, output_ids, random_prompt, run_alone

VOCAB = 61
ahead = partial(make_engine, launch_ahead=1)


class AheadMachine(EngineMachine):
    new_engine = staticmethod(ahead)


TestAheadMachine = pytest.mark.full(AheadMachine.TestCase)
TestAheadMachine.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def in_flight(engine: InferenceEngine) -> bool:
    return bool(engine.in_flight)


@pytest.mark.full
@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=1.3, seed=8, n=3, max_tokens=20, stop_token_ids=tuple(range(40, 61))),
], ids=["greedy", "seeded", "with ends", "three with stops"])  # fmt: skip
def test_steps_overlap_and_nothing_changes(params: SamplingParams) -> None:
    prompts = [random_prompt(7 + 3 * index, seed=index, vocab_size=VOCAB) for index in range(4)]
    engine = ahead(max_num_seqs=12)
    requests = [engine.add_request(str(index), prompt, params) for index, prompt in enumerate(prompts)]
    overlaps = 0
    while engine.has_work:
        engine.step()
        overlaps += in_flight(engine)
        engine.blocks.check_invariants()
    assert overlaps > 3
    assert engine.blocks.num_used_blocks == 0
    for request, prompt in zip(requests, prompts, strict=True):
        alone = run_alone(prompt, params)
        assert output_ids(request) == output_ids(alone)
        assert [s.finish_reason for s in request.sequences] == [s.finish_reason for s in alone.sequences]


def test_an_end_by_length_is_foreseen() -> None:
    """No step is launched for a sequence whose last token is already on its way."""
    engine = ahead()
    engine.add_request(
        "a", random_prompt(5, vocab_size=VOCAB), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    )
    drain(engine)
    assert engine.stats().num_decode_tokens == 3  # the first token came from the prompt


@pytest.mark.full
def test_a_prompt_is_launched_while_a_step_runs() -> None:
    """The next launch after a request arrives holds its prompt, beside the decodes whose tokens are not known yet."""
    engine = ahead()
    endless = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add_request("old", random_prompt(5, vocab_size=VOCAB), endless)
    for _ in range(5):
        engine.step()
    assert in_flight(engine)
    request = engine.add_request("new", random_prompt(9, seed=1, vocab_size=VOCAB), endless)
    engine.step()
    (ticket,) = engine.in_flight
    assert [len(ticket.plan.decodes), len(ticket.plan.prefills)] == [1, 1]
    engine.step()
    assert len(request.sequences[0].output_token_ids) == 1
    drain(engine)


@pytest.mark.full
def test_only_slots_that_read_token_values_sit_out() -> None:
    """Beside a penalised request, which waits for each token, the others run in every step."""
    engine = ahead()
    endless = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    fast = engine.add_request("fast", random_prompt(5, vocab_size=VOCAB), endless)
    slow = engine.add_request(
        "slow", random_prompt(6, seed=1, vocab_size=VOCAB), replace(endless, repetition_penalty=1.3)
    )
    for _ in range(22):
        engine.step()
    assert len(fast.sequences[0].output_token_ids) == 21
    assert len(slow.sequences[0].output_token_ids) == 11
    drain(engine)
    for request in (fast, slow):
        assert output_ids(request) == output_ids(run_alone(request.prompt_token_ids, request.params))


def test_who_waits_for_a_common_beginning_follows_at_once() -> None:
    """The second reads the prefix that the first one has just computed; it does not wait until the first has ended."""
    engine = ahead()
    endless = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    beginning = random_prompt(24, vocab_size=VOCAB)
    first, second = (engine.add_request(name, [*beginning, token], endless) for name, token in (("a", 1), ("b", 2)))
    for _ in range(3):
        engine.step()
    assert first.sequences[0].output_token_ids
    assert second.sequences[0].output_token_ids
    assert second.metrics.num_cached_tokens >= 20
    drain(engine)


@pytest.mark.full
def test_an_abort_discards_what_is_in_flight() -> None:
    engine = ahead()
    endless = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    requests = [engine.add_request(str(i), random_prompt(5, seed=i, vocab_size=VOCAB), endless) for i in range(2)]
    for _ in range(6):
        engine.step()
    assert in_flight(engine)
    seen = len(requests[0].sequences[0].output_token_ids)
    engine.abort("0")
    drain(engine)
    assert len(requests[0].sequences[0].output_token_ids) == seen
    assert requests[0].sequences[0].finish_reason is FinishReason.ABORT
    assert output_ids(requests[1]) == output_ids(run_alone(requests[1].prompt_token_ids, endless))
    assert engine.blocks.num_used_blocks == 0


def test_all_kinds_of_sampling_mix() -> None:
    """Penalties, filters and logprobs beside plain requests: each gets the tokens that it gets alone."""
    options = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1, seed=1, top_p=0.8, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=2, max_tokens=6, ignore_eos=True),
    ]
    engine = ahead()
    prompts = [random_prompt(6 + i, seed=i, vocab_size=VOCAB) for i in range(4)]
    requests = [engine.add_request(str(i), p, o) for i, (p, o) in enumerate(zip(prompts, options, strict=True))]
    overlaps = 0
    while engine.has_work:
        engine.step()
        overlaps += in_flight(engine)
    assert overlaps > 0
    for request, prompt, params in zip(requests, prompts, options, strict=True):
        assert output_ids(request) == output_ids(run_alone(prompt, params))


@pytest.mark.full
def test_a_needle_in_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SamplingParams(temperature=1.1, seed=77, max_tokens=14, ignore_eos=True)
    monkeypatch.setattr(test_engine_needle, "make_engine", lambda model, kernels, **options: ahead(**options))
    monkeypatch.setitem(test_engine_needle.NEEDLES, "plain", plain)
    expected = output_ids(run_alone(test_engine_needle.PROMPT, plain))
    for trace in range(12):
        rng = np.random.default_rng(trace)
        engine: InferenceEngine = test_engine_needle.crowded_engine(rng, None)
        request = test_engine_needle.run_in_crowd(engine, "plain", rng)
        assert output_ids(request) == expected, f"trace {trace}"


class ShortListing(ReferenceKernels):
    """Kernels that send a search the likeliest tokens alone, as those for GPUs do."""

    def top_logprobs(self, logits: Any, rows: np.ndarray, count: int) -> Any:
        logprobs = log_softmax(logits[rows])
        ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :count]
        return lambda: (ids, np.take_along_axis(logprobs, ids, axis=-1).astype(np.float32))


@pytest.mark.parametrize("width", [2, 4])
def test_beams_need_only_the_likeliest_tokens(width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=9)
    outcomes = []
    for kind in (ReferenceKernels, ShortListing):
        engine = ahead(kernels=kind(), max_num_seqs=8)
        requests = [
            engine.add_beam_search(str(i), random_prompt(6 + i, seed=i, vocab_size=VOCAB), params) for i in range(2)
        ]
        drain(engine)
        outcomes.append([(output_ids(r), [s.score for s in r.sequences[:1]]) for r in requests])
    for (ours, score), (theirs, expected) in zip(*outcomes, strict=True):
        assert ours == theirs
        np.testing.assert_allclose(score, expected, rtol=1e-5)


def test_benchmarks_run_on_overlapping_steps() -> None:
    from bifolio.measure.latency import measure_latency
    from bifolio.measure.throughput import Test, run_tests

    engine = ahead(max_model_len=64, num_blocks=80, max_num_seqs=4)
    tests = [Test(num_prompt=12, batch=3), Test(num_generated=6, depth=10, batch=2)]
    rows = run_tests(engine, tests, 2)
    assert [len(row.speeds) for row in rows] == [2, 2]
    report = measure_latency(engine, batch=3, num_prompt=8, num_output=5, repetitions=2)
    assert (report.whole.count, report.first_token.count, report.between_tokens.count) == (2, 6, 24)
    assert not engine.has_work


def test_completions_forked_behind_two_passes_count_their_tokens() -> None:
    """The prompt's last two chunks are in flight when the completions fork: none stays in flight for ever."""
    engine = make_engine(launch_ahead=1, chunk_size=4)
    params = SamplingParams(n=3, temperature=0.9, seed=1, max_tokens=6, ignore_eos=True)
    request = engine.add_request("three", random_prompt(11, vocab_size=61), params)
    while engine.has_work:
        engine.step()
    for sequence in request.sequences:
        assert sequence.num_in_flight == 0
        assert sequence.num_computed == sequence.num_tokens - 1
