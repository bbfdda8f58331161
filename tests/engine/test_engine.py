"""The engine's promises to one request: its tokens, its end, its logprobs, and what is refused before it runs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from bifolio.api.outputs import request_output
from bifolio.errors import ConfigError, EmptyPromptError, PromptTooLongError, RequestError, TokenIdError
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import FinishReason
from helpers import (
    drain,
    log_softmax,
    make_engine,
    make_runner,
    open_entry,
    output_ids,
    random_prompt,
    run_alone,
    run_chunks,
    tiny_loaded,
)

VOCAB = 61
LENGTHS = (1, 4, 7, 13)
PROMPTS = [random_prompt(length, seed=length, vocab_size=VOCAB) for length in LENGTHS]
EVERYTHING = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB)


def scores(request) -> np.ndarray:  # type: ignore[no-untyped-def]
    """f64[t, vocab]: logprobs of the whole vocabulary at every position of prompt and output."""
    entries = [*request.prompt_logprobs[1:], *request.sequences[0].logprobs]
    table = np.full((len(entries), VOCAB), np.nan)
    for row, entry in enumerate(entries):
        for token, logprob in entry.top:
            table[row, token] = logprob
    return table


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[list[int]], np.ndarray]]:
    """Each prompt by itself, in one piece."""
    requests = [run_alone(prompt, EVERYTHING) for prompt in PROMPTS]
    return [(output_ids(request), scores(request)) for request in requests]


def check_same(order, alone, **options) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine(**options)
    requests = {i: engine.add_request(str(i), PROMPTS[i], EVERYTHING) for i in order}
    drain(engine)
    for i, request in requests.items():
        tokens, logprobs = alone[i]
        assert output_ids(request) == tokens
        np.testing.assert_allclose(scores(request), logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk_size", range(1, 14))
def test_chunked_is_whole(chunk_size: int, alone) -> None:  # type: ignore[no-untyped-def]
    check_same([3], alone, chunk_size=chunk_size)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2)])
@pytest.mark.parametrize("chunk_size", [3, 512])
def test_batched_is_alone_packed_in_any_order(order: tuple[int, ...], chunk_size: int, alone) -> None:  # type: ignore[no-untyped-def]
    check_same(order, alone, chunk_size=chunk_size, token_budget=512)


@pytest.mark.parametrize(("block_size", "budget", "slots"), itertools.product([1, 16, 32], [4, 9], [1, 4]))
def test_block_size_budget_and_slots_change_nothing(block_size: int, budget: int, slots: int, alone) -> None:  # type: ignore[no-untyped-def]
    check_same((0, 1, 2, 3), alone, block_size=block_size, num_blocks=200, token_budget=budget, max_num_seqs=slots)


# -- a request's life -------------------------------------------------------------------------------------------------


def test_limits_and_stop_tokens_end_a_request() -> None:
    free = run_alone(PROMPTS[2], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)).sequences[0]
    token = free.output_token_ids[5]
    first = free.output_token_ids.index(token)
    stopped = run_alone(
        PROMPTS[2], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(token,), ignore_eos=True)
    )
    (sequence,) = stopped.sequences
    assert sequence.output_token_ids == free.output_token_ids[: first + 1]
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, token)
    full = run_alone(PROMPTS[2], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), max_model_len=20)
    assert full.sequences[0].finish_reason is FinishReason.LENGTH
    assert full.sequences[0].num_tokens == 20  # the context is full to the last token


def test_the_models_own_end_of_text_ends_a_request() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logit_bias={2: 100.0})
    request = run_alone(PROMPTS[1], params)
    assert output_ids(request) == [[2]]
    assert request.sequences[0].finish_reason is FinishReason.STOP
    ignoring = run_alone(
        PROMPTS[1], SamplingParams(temperature=0, max_tokens=3, logit_bias={2: 100.0}, ignore_eos=True)
    )
    assert output_ids(ignoring) == [[2, 2, 2]]


def test_completions_of_one_prompt_share_its_blocks_and_differ() -> None:
    engine = make_engine(num_blocks=64)
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=8, ignore_eos=True)
    request = engine.add_request("r", PROMPTS[3], params)
    engine.step()
    assert engine.blocks.num_used_blocks == 4  # 13 tokens in blocks of 4, held three times
    drain(engine)
    tokens = output_ids(request)
    assert len({tuple(row) for row in tokens}) == 3
    assert tokens == output_ids(run_alone(PROMPTS[3], params))
    assert engine.blocks.num_used_blocks == 0


def test_a_completion_does_not_depend_on_how_many_were_asked_for() -> None:
    params = {"temperature": 1.0, "seed": 9, "max_tokens": 6, "ignore_eos": True}
    three = output_ids(run_alone(PROMPTS[2], SamplingParams(n=3, **params)))  # type: ignore[arg-type]
    one = output_ids(run_alone(PROMPTS[2], SamplingParams(n=1, **params)))  # type: ignore[arg-type]
    assert three[0] == one[0]


def test_best_of_returns_the_likeliest() -> None:
    params = SamplingParams(temperature=1.3, seed=4, n=2, best_of=5, max_tokens=6, ignore_eos=True, logprobs=0)
    request = run_alone(PROMPTS[2], params)
    output = request_output(request)
    assert len(request.sequences) == 5
    means = sorted((s.cumulative_logprob / 6 for s in request.sequences), reverse=True)
    assert [completion.cumulative_logprob / 6 for completion in output.outputs] == means[:2]
    assert [completion.index for completion in output.outputs] == [0, 1]


def test_logprobs_are_those_of_the_models_logits() -> None:
    params = SamplingParams(temperature=0.7, seed=3, top_k=5, max_tokens=5, ignore_eos=True, logprobs=4)
    request = run_alone(PROMPTS[3], params)
    (sequence,) = request.sequences
    runner, blocks = make_runner(tiny_loaded())
    logits = run_chunks(runner, open_entry(runner, blocks), sequence.token_ids[:-1], 512)
    expected = log_softmax(logits)[len(PROMPTS[3]) - 1 :]
    for entry, row, token in zip(sequence.logprobs, expected, sequence.output_token_ids, strict=True):
        assert entry.token_id == token
        assert abs(entry.logprob - row[token]) < 1e-5
        best = np.argsort(-row)[:4]
        assert [i for i, _ in entry.top] == best.tolist()
        assert entry.rank == 1 + int((row > row[token]).sum())
    assert abs(sequence.cumulative_logprob - sum(entry.logprob for entry in sequence.logprobs)) < 1e-6


@pytest.mark.parametrize("when", range(7))
def test_abort_at_any_moment(when: int) -> None:
    engine = make_engine(chunk_size=4, token_budget=12)
    victim = engine.add_request("victim", PROMPTS[3], SamplingParams(n=2, max_tokens=8, ignore_eos=True))
    other = engine.add_request("other", PROMPTS[2], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for _ in range(when):
        engine.step()
    assert engine.abort("victim")
    ends = [result for result in engine.step() if result.request_id == "victim"]
    assert [(end.finish_reason, end.token) for end in ends] == [(FinishReason.ABORT, None)] * 2
    assert victim.is_finished
    assert not engine.abort("victim")
    drain(engine)
    assert output_ids(other) == output_ids(run_alone(PROMPTS[2], other.params))
    assert engine.blocks.num_used_blocks == 0


def test_abort_of_one_who_waits_and_of_nobody() -> None:
    engine = make_engine(max_num_seqs=1, token_budget=16)
    engine.add_request("runs", PROMPTS[2], SamplingParams(max_tokens=3, ignore_eos=True))
    waiting = engine.add_request("waits", PROMPTS[1], SamplingParams(max_tokens=3))
    engine.step()
    assert engine.abort("waits")
    assert not engine.abort("nobody")
    drain(engine)
    assert waiting.sequences[0].finish_reason is FinishReason.ABORT
    assert engine.stats().num_waiting == 0


def test_a_failing_processor_ends_its_own_request_alone() -> None:
    def explode(output_ids, logits):  # type: ignore[no-untyped-def]
        if len(output_ids) == 2:
            raise ZeroDivisionError("the user's own mistake")
        return logits

    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    failing = SamplingParams(max_tokens=6, logits_processors=(explode,), ignore_eos=True)
    bad = engine.add_request("bad", PROMPTS[2], failing)
    good = engine.add_request("good", PROMPTS[3], params)
    drain(engine)
    assert bad.sequences[0].finish_reason is FinishReason.ERROR
    assert "the user's own mistake" in str(bad.error)
    assert len(bad.sequences[0].output_token_ids) == 2
    assert output_ids(good) == output_ids(run_alone(PROMPTS[3], params))
    assert engine.blocks.num_used_blocks == 0


def test_prefixes_are_found_again_but_not_across_salts() -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    requests = []
    for number, salt in enumerate([b"", b"", b"tenant", b"tenant"]):
        requests.append(engine.add_request(str(number), PROMPTS[3], params, salt=salt))
        drain(engine)
    assert [request.metrics.num_cached_tokens for request in requests] == [0, 12, 0, 12]
    assert len({tuple(output_ids(request)[0]) for request in requests}) == 1


def test_a_prompt_can_be_found_while_its_step_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is still busy when the host plans the next step: the blocks are named by then."""
    engine = make_engine()
    found = []
    collect = engine.collect

    def watched() -> None:
        found.append(engine.blocks.cached_prefix_length(PROMPTS[3]))
        collect()

    monkeypatch.setattr(engine, "collect", watched)
    engine.add_request("a", PROMPTS[3], SamplingParams(temperature=0, max_tokens=1))
    drain(engine)
    assert found == [12]


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = make_engine(enable_prefix_caching=False)
    for number in range(2):
        request = engine.add_request(str(number), PROMPTS[3], SamplingParams(max_tokens=1))
        drain(engine)
    assert request.metrics.num_cached_tokens == 0


def test_metrics_are_in_the_order_of_events() -> None:
    request = run_alone(PROMPTS[3], SamplingParams(max_tokens=4, ignore_eos=True))
    times = request.metrics
    assert 0 < times.arrival <= times.first_scheduled <= times.first_token <= times.finished
    assert times.time_to_first_token == pytest.approx(times.queue_time + times.prefill_time)
    assert times.decode_time > 0


def test_statistics_count_tokens_by_phase() -> None:
    engine = make_engine(chunk_size=5)
    engine.add_request("a", PROMPTS[3], SamplingParams(max_tokens=4, ignore_eos=True))
    drain(engine)
    engine.add_request("b", PROMPTS[3], SamplingParams(max_tokens=4, ignore_eos=True))
    drain(engine)
    stats = engine.stats()
    assert (stats.num_prefill_tokens, stats.num_decode_tokens) == (13 + 1, 3 + 3)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (26, 12)
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_before_they_touch_anything() -> None:
    engine = make_engine(max_model_len=16, max_waiting=1)
    params = SamplingParams(max_tokens=4)
    with pytest.raises(EmptyPromptError, match="at least one token"):
        engine.add_request("r", [], params)
    for token in (-1, VOCAB, 10**12):
        with pytest.raises(TokenIdError, match=f"{token} is outside the vocabulary of {VOCAB} tokens"):
            engine.add_request("r", [3, token], params)
    with pytest.raises(PromptTooLongError, match=r"16 tokens and 15 fit .*shorten it or raise max_model_len"):
        engine.add_request("r", [3] * 16, params)
    with pytest.raises(TokenIdError, match="stop_token_ids"):
        engine.add_request("r", [3], SamplingParams(stop_token_ids=(VOCAB,)))
    with pytest.raises(RequestError, match="tokenizer"):
        engine.add_request("r", [3], SamplingParams(stop=("x",)))
    with pytest.raises(RequestError, match="max_num_seqs >= 9"):
        engine.add_request("r", [3], SamplingParams(n=9))
    engine.add_request("r", [3] * 15, params)
    with pytest.raises(RequestError, match="choose another id"):
        engine.add_request("r", [3], params)
    with pytest.raises(RequestError, match="waiting already"):
        engine.add_request("s", [3], params)
    drain(engine)
    assert engine.blocks.num_used_blocks == 0
    assert engine.blocks.sequence_ids() == []


@pytest.mark.parametrize("prompt", [["a"], [1.5], [None], [[1]], [True, "b"]])
def test_prompts_that_are_not_token_ids_are_a_named_error(prompt: list[object]) -> None:
    with pytest.raises(RequestError, match="token id"):
        make_engine().add_request("r", prompt, SamplingParams())  # type: ignore[arg-type]


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    engine = make_engine(max_model_len=16)
    request = engine.add_request("r", [3] * 16, SamplingParams(max_tokens=0, prompt_logprobs=0))
    drain(engine)
    assert output_ids(request) == [[]]
    assert request.prompt_logprobs is not None
    assert len(request.prompt_logprobs) == 16


def test_settings_that_cannot_work_say_which_would() -> None:
    with pytest.raises(ConfigError, match="num_blocks >= 33 or max_model_len <= 36"):
        make_engine(num_blocks=10, block_size=4, max_model_len=128)
    with pytest.raises(ConfigError, match="token_budget >= 8"):
        make_engine(token_budget=7, max_num_seqs=8)
    for bad in ({"max_num_seqs": 0}, {"chunk_size": 0}, {"block_size": 0}, {"num_blocks": 1}):
        with pytest.raises(ConfigError):
            make_engine(**bad)


@pytest.mark.parametrize("options", [{"dry_multiplier": 1.0}, {"bad_words": ["fox"]}])
def test_texts_that_stand_for_tokens_are_refused_without_a_tokenizer(options: dict[str, Any]) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="no tokenizer that turns"):
        engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=2, **options))


@pytest.mark.parametrize("breakers", [(), (3, 5)])
def test_repetitions_are_penalised_without_a_tokenizer(breakers: tuple[int, ...]) -> None:
    dry = {"dry_multiplier": 1.0, "dry_sequence_breakers": breakers}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, **dry)  # type: ignore[arg-type]
    assert len(output_ids(run_alone(PROMPTS[2], params))[0]) == 6
