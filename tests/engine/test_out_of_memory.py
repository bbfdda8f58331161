"""Steps that run out of memory: nothing of them counts, less is done at a time, and the engine lives on.

The error is raised where the forward pass would raise it, by rules that a real device could follow: too many tokens at
once, too many sequences, or simply now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from test_engine_machine import EngineMachine

from bifolio.api.outputs import request_output
from bifolio.beam_params import BeamSearchParams
from bifolio.config import SpeculativeConfig
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.fault.out_of_memory import CALM_STEPS, MAX_FAILURES_ALONE, STEP_FAILED, is_out_of_memory
from bifolio.kernels.interface import Batch
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import FinishReason
from helpers import drain, make_engine, output_ids, random_prompt, run_alone

torch = pytest.importorskip("torch")


VOCAB = 61
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)


class Full:
    """Passes on a device that has no room for some batches."""

    def __init__(self, engine: InferenceEngine, fails: Callable[[Batch], bool]) -> None:
        self._fails = fails
        self.num_failures = 0
        self.largest = 0  # tokens of a batch that passed
        for executor in (engine.prefill_executor, engine.decode_executor):
            executor.run = self.checked(executor.run)  # type: ignore[method-assign]

    def checked(self, run: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        def run_or_fail(batch: Batch) -> Any:
            if self._fails(batch):
                self.num_failures += 1
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            self.largest = max(self.largest, batch.num_tokens)
            return run(batch)

        return run_or_fail


restrict = Full


def prompts(count: int, length: int = 5) -> list[list[int]]:
    return [random_prompt(length + 3 * number, seed=number, vocab_size=VOCAB) for number in range(count)]


def check_idle(engine: InferenceEngine) -> None:
    assert engine.stats().num_used_blocks == 0
    assert not engine.requests
    engine.blocks.check_invariants()


def run_all(engine: InferenceEngine, inputs: list[list[int]]) -> None:
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(inputs)]
    drain(engine)
    for prompt, request in zip(inputs, requests, strict=True):
        assert output_ids(request) == output_ids(run_alone(prompt, PARAMS))
    check_idle(engine)


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.full
def test_large_steps_become_small_ones() -> None:
    engine = make_engine(chunk_size=64)
    full = restrict(engine, lambda batch: batch.num_tokens > 24)
    run_all(engine, prompts(6, length=20))
    assert full.num_failures == 2  # 64 tokens, 32 tokens
    assert full.largest > 16


@pytest.mark.full
def test_fewer_sequences_run_where_many_do_not_fit() -> None:
    engine = make_engine()
    full = restrict(engine, lambda batch: sum(segment.num_sequences for segment in batch.segments) > 3)
    run_all(engine, prompts(8))
    assert 1 <= full.num_failures <= 8


def test_the_youngest_waits() -> None:
    engine = make_engine()
    restrict(engine, lambda batch: sum(segment.num_sequences for segment in batch.segments) > 3)
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(prompts(4))]
    for _ in range(4):
        engine.step()
    assert [bool(request.sequences[0].output_token_ids) for request in requests] == [True, True, True, False]
    drain(engine)
    check_idle(engine)


def test_a_passing_shortage_is_forgotten() -> None:
    engine = make_engine()
    calls = iter(range(10**6))
    restrict(engine, lambda batch: next(calls) == 3)
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for number, prompt in enumerate(prompts(3)):
        engine.add_request(str(number), prompt, long)
    for _ in range(6):
        engine.step()
    assert engine.faults.is_limited
    assert engine.batcher.num_running < 3
    for _ in range(2 * CALM_STEPS):
        engine.step()
    assert engine.batcher.num_running == 3
    engine.abort_all()
    drain(engine)
    check_idle(engine)


def test_one_that_never_fits_ends_with_advice_and_the_others_go_on() -> None:
    engine = make_engine()
    poison = 60
    full = restrict(engine, lambda batch: bool((batch.token_ids == poison).any()))
    inputs = [random_prompt(6 + number, seed=number, vocab_size=poison) for number in range(3)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, bad_words_token_ids=((poison,),))
    bad = engine.add_request("bad", [5, 6, poison], params)
    good = [engine.add_request(str(number), prompt, params) for number, prompt in enumerate(inputs)]
    results = []
    while engine.has_work:
        results += engine.step()
    assert bad.error is not None
    assert bad.error.startswith(STEP_FAILED)
    assert "gpu_memory_utilization" in bad.error
    assert bad.sequences[0].finish_reason is FinishReason.ERROR
    assert sum(result.finished for result in results if result.request_id == "bad") == 1
    assert full.num_failures >= MAX_FAILURES_ALONE
    for prompt, request in zip(inputs, good, strict=True):
        assert output_ids(request) == output_ids(run_alone(prompt, params))
    assert engine.batcher.max_running is None
    check_idle(engine)


def test_an_engine_thread_sees_no_error() -> None:
    engine = make_engine()
    calls = iter(range(10**6))
    restrict(engine, lambda batch: next(calls) % 5 == 2)
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(prompts(5))]
    for _ in range(1000):
        if not engine.has_work:
            break
        engine.step()
    assert all(request.error is None for request in requests)
    check_idle(engine)


@pytest.mark.parametrize("when", [1, 4, 7])
def test_beams_and_samples_survive(when: int) -> None:
    prompt = random_prompt(9, seed=4, vocab_size=VOCAB)
    beams = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    samples = SamplingParams(n=3, temperature=1.0, seed=9, max_tokens=10, ignore_eos=True)

    def run(fails: Callable[[int], bool]) -> tuple[list[list[int]], list[list[int]]]:
        engine = make_engine(speculative=None)
        calls = iter(range(10**6))
        restrict(engine, lambda batch: fails(next(calls)))
        search = engine.add_beam_search("beams", prompt, beams)
        request = engine.add_request("samples", prompt, samples)
        drain(engine)
        check_idle(engine)
        return [output.token_ids for output in request_output(search).outputs], output_ids(request)

    assert run(lambda call: call == when) == run(lambda call: False)


def test_drafts_survive() -> None:
    engine = make_engine(speculative=SpeculativeConfig("ngram", adaptive=False))
    calls = iter(range(10**6))
    full = restrict(engine, lambda batch: next(calls) in (2, 5))
    run_all(engine, [[7, 8, 9] * 4, [11, 12] * 5])
    assert full.num_failures == 2
    assert engine.speculator.stats.num_draft_tokens > 0


def test_what_a_failed_step_had_recorded_is_told() -> None:
    """The error comes in the middle of taking tokens over: nobody's token may get lost."""
    engine = make_engine()
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(prompts(4))]
    add_token, calls = engine.postprocess._add_token, iter(range(10**6))

    def failing(*arguments: Any) -> Any:
        if next(calls) == 6:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return add_token(*arguments)

    engine.postprocess._add_token = failing  # type: ignore[method-assign]
    told: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for result in engine.step():
            if result.token is not None:
                told[result.request_id].append(result.token)
    for request in requests:
        assert told[request.request_id] == output_ids(request)[0]
    check_idle(engine)


# -- steps launched ahead -------------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize("fails", [lambda call: call == 0, lambda call: call in (3, 4, 5), lambda call: call % 4 == 3])
def test_steps_in_flight_are_taken_back(fails: Callable[[int], bool]) -> None:
    engine = make_engine(launch_ahead=1)
    calls = iter(range(10**6))
    full = restrict(engine, lambda batch: fails(next(calls)))
    run_all(engine, prompts(6))
    assert full.num_failures


FAULTS = {13, 14}  # a third could hit the same request alone once more, which would rightly end it


class ShortOfMemory(EngineMachine):
    """The engine's state machine, with launches that fail now and then, twice in a row at most."""

    @staticmethod
    def new_engine(**options: Any) -> InferenceEngine:
        engine = make_engine(launch_ahead=1, **options)
        calls = iter(range(10**6))
        restrict(engine, lambda batch: next(calls) in FAULTS)
        return engine


TestShortOfMemory = pytest.mark.full(ShortOfMemory.TestCase)
TestShortOfMemory.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
