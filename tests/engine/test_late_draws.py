"""Late draws: sequences with a grammar take part in every step that is launched ahead, and nothing else changes.

The pass of a step runs while the tokens before it are collected; its masks are computed then, and its draw follows. The
device is a stand-in (`stand_in_slots`); each request must get the tokens that it gets alone on the reference kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_in_slots import StandInKernels, StandInSlots

pytest.importorskip("llguidance")

from bifolio.beam_params import BeamSearchParams
from bifolio.engine.engine import InferenceEngine
from bifolio.sampling.grammar import Grammar, compile_grammar
from bifolio.sampling.joint_masks import JointMasks
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import FinishReason, Request
from helpers import drain, make_engine, output_ids, random_prompt, tiny_loaded

VOCAB = 320
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
GRAMMARS = {
    "endless": Grammar.regex("[a-f]{200}"),
    "short": Grammar.regex("[a-f]{2,5}"),
    "open": Grammar.regex("(.|\\n){1,90}"),
    "half": Grammar.regex("[ -~]{1,40}"),
    "words": Grammar.regex("(ab|cd|abe){1,9}"),
    "schema": Grammar.json_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}),
}
Options = tuple[tuple[str, Any], ...]


@cache
def compiled(name: str) -> Any:
    return compile_grammar(GRAMMARS[name], tiny_loaded(tokenizer=True))


def parameters(grammar: str = "", **options: Any) -> SamplingParams:
    chosen = {"grammar": compiled(grammar)} if grammar else {"ignore_eos": True}
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 10, **chosen, **options})


def new_engine(**options: Any) -> InferenceEngine:
    return make_engine(tiny_loaded(tokenizer=True), kernels=StandInKernels(), **options)


def device_of(engine: InferenceEngine) -> StandInSlots:
    device = engine.slots.device
    assert isinstance(device, StandInSlots)
    return device


def prompt_of(number: int) -> list[int]:
    return random_prompt(4 + 3 * number, seed=number, vocab_size=VOCAB)


@cache
def alone(number: int, grammar: str, options: Options) -> Request:
    """The request on an engine of its own that draws on the host and launches nothing ahead."""
    engine = make_engine(tiny_loaded(tokenizer=True), chunk_size=512, token_budget=512)
    request = engine.add_request("alone", prompt_of(number), parameters(grammar, **dict(options)))
    drain(engine)
    return request


def scores(request: Request) -> list[Any]:
    entries = [entry for sequence in request.sequences for entry in sequence.logprobs]
    entries += [entry for entry in request.prompt_logprobs or [] if entry is not None]
    return [(entry.token_id, entry.rank, [token for token, _ in entry.top]) for entry in entries]


def assert_like_alone(request: Request, number: int, grammar: str, options: Options) -> None:
    expected = alone(number, grammar, options)
    assert (request.error is None) is (expected.error is None)  # options may exclude every token
    assert output_ids(request) == output_ids(expected)
    assert [s.finish_reason for s in request.sequences] == [s.finish_reason for s in expected.sequences]
    assert scores(request) == scores(expected)


def test_masked_sequences_take_part_in_every_step() -> None:
    """Sixteen steps draw sixteen tokens for a request with a grammar, as for one without."""
    engine = new_engine()
    free = engine.add_request("free", prompt_of(0), parameters(seed=1, max_tokens=40))
    bound = engine.add_request("bound", prompt_of(1), parameters("endless", seed=2, max_tokens=40))
    for step in range(17):
        engine.step()
        assert len(engine.in_flight) == 1, "each step is launched before the one before it is collected"
        assert len(engine.in_flight[0].plan.scheduled) == 2, f"step {step} left a sequence out"
    assert len(free.sequences[0].output_token_ids) == len(bound.sequences[0].output_token_ids) == 16
    drain(engine)
    assert_like_alone(bound, 1, "endless", (("seed", 2), ("max_tokens", 40)))


def test_greedy_draws_run_ahead_of_their_grammars() -> None:
    """Where the grammar allows the likeliest tokens, only the first one has a mask, and no step is drawn late."""
    engine = new_engine()
    options = {"temperature": 0.0, "max_tokens": 10}
    bound = engine.add_request("bound", prompt_of(10), parameters("open", **options))
    drain(engine)
    calls = device_of(engine).calls
    assert output_ids(bound) == output_ids(alone(10, "", tuple(options.items()))), "choose another prompt"
    assert (calls["decode"], calls["decode_logits"]) == (9, 0)
    assert calls["mask_rows"] == 1
    assert_like_alone(bound, 10, "open", tuple(options.items()))


@pytest.mark.parametrize("grammar", ["endless", "half", "schema"])
def test_forbidden_tokens_are_drawn_again_and_no_other_sequence_waits(grammar: str) -> None:
    engine = new_engine()
    free = engine.add_request("free", prompt_of(0), parameters(seed=1, max_tokens=40))
    options = {"temperature": 0.0, "max_tokens": 12}
    bound = [engine.add_request(str(i), prompt_of(i), parameters(grammar, **options)) for i in (1, 2)]
    before = 0
    for _ in range(12):
        engine.step()
        assert any(item.sequence is free.sequences[0] for item in engine.in_flight[-1].plan.scheduled)
        assert len(free.sequences[0].output_token_ids) >= before
        before = len(free.sequences[0].output_token_ids)
        for sequence in (request.sequences[0] for request in bound):
            if sequence.finish_reason is None:
                assert engine.blocks.num_tokens_of(sequence.id) == sequence.num_scheduled
    assert before == 11
    drain(engine)
    assert device_of(engine).calls["decode_logits"] == 0, "no step is drawn late"
    for number, request in enumerate(bound, start=1):
        assert_like_alone(request, number, grammar, tuple(options.items()))
    assert engine.blocks.num_used_blocks == 0


@pytest.mark.parametrize("arrival", range(2, 8))
def test_greedy_and_sampled_grammars_side_by_side(arrival: int) -> None:
    """Forbidden tokens of greedy sequences are found while the next draw waits for masks of sampled ones."""
    engine = new_engine()
    options = {"temperature": 0.0, "max_tokens": 12}
    greedy = [engine.add_request(str(i), prompt_of(i), parameters("open", **options)) for i in range(4)]
    for _ in range(arrival):
        engine.step()
    sampled = engine.add_request("sampled", prompt_of(4), parameters("endless", seed=arrival))
    drain(engine)
    for number, request in enumerate(greedy):
        assert_like_alone(request, number, "open", tuple(options.items()))
    assert_like_alone(sampled, 4, "endless", (("seed", arrival),))


def test_greedy_sequences_sit_out_no_step_that_is_late_anyway() -> None:
    engine = new_engine()
    options = {"temperature": 0.0, "max_tokens": 30}
    engine.add_request("sampled", prompt_of(1), parameters("endless", seed=2, max_tokens=40))
    greedy = engine.add_request("greedy", prompt_of(0), parameters("endless", **options))
    for step in range(24):
        engine.step()
        assert step < 8 or len(engine.in_flight[-1].plan.decodes) == 2, f"step {step} left a sequence out"
    drain(engine)
    assert_like_alone(greedy, 0, "endless", tuple(options.items()))


def test_only_steps_with_masks_in_flight_are_drawn_late() -> None:
    """Steps without a grammar are one launch each: pass and draw together."""
    engine = new_engine()
    engine.add_request("free", prompt_of(0), parameters(seed=1))
    drain(engine)
    calls = device_of(engine).calls
    assert (calls["decode"], calls["decode_logits"]) == (9, 0)
    engine.add_request("bound", prompt_of(1), parameters("endless", seed=1))
    drain(engine)
    assert (calls["decode"], calls["decode_logits"]) == (9, 9)


def test_an_end_of_text_drops_the_row_in_flight() -> None:
    """The sequence ends while its next pass runs: the token of that pass is discarded, the others go on."""
    engine = new_engine()
    requests = [engine.add_request(str(i), prompt_of(i), parameters("short", seed=i)) for i in range(4)]
    free = engine.add_request("free", prompt_of(4), parameters(seed=4))
    drain(engine)
    assert [r.sequences[0].finish_reason for r in requests] == [FinishReason.STOP] * 4
    for number, request in enumerate(requests):
        assert_like_alone(request, number, "short", (("seed", number),))
    assert_like_alone(free, 4, "", (("seed", 4),))
    assert engine.blocks.num_used_blocks == 0


def test_prompts_beside_masks_in_flight() -> None:
    """A step with a prompt runs eagerly and is drawn late as well."""
    engine = new_engine()
    bound = engine.add_request("bound", prompt_of(0), parameters("endless", seed=1, max_tokens=12))
    for _ in range(3):
        engine.step()
    others = [
        engine.add_request(str(i), prompt_of(i), parameters("words", seed=i, n=2, **PENALTIES)) for i in range(1, 3)
    ]
    engine.step()
    assert len(engine.in_flight[-1].plan.decodes) == 1
    assert engine.in_flight[-1].plan.prefills
    drain(engine)
    assert device_of(engine).calls["fill_tokens"] > 0
    assert_like_alone(bound, 0, "endless", (("seed", 1), ("max_tokens", 12)))
    for number, request in enumerate(others, start=1):
        assert_like_alone(request, number, "words", (("seed", number), ("n", 2), *PENALTIES.items()))


def test_beams_and_draws_of_the_host_beside_masks() -> None:
    """A beam search and a request that the host draws share the late steps."""
    engine = new_engine(max_num_seqs=8)
    bound = engine.add_request("bound", prompt_of(0), parameters("endless", seed=1, max_tokens=16))
    search = BeamSearchParams(beam_width=2, max_tokens=6)
    beams = engine.add_beam_search("beams", prompt_of(1), search)
    host = engine.add_request("host", prompt_of(2), parameters(seed=2, no_repeat_ngram_size=2))
    drain(engine)
    plain = make_engine(tiny_loaded(tokenizer=True))
    expected = plain.add_beam_search("alone", prompt_of(1), search)
    drain(plain)
    assert output_ids(beams) == output_ids(expected)
    assert_like_alone(bound, 0, "endless", (("seed", 1), ("max_tokens", 16)))
    assert_like_alone(host, 2, "", (("seed", 2), ("no_repeat_ngram_size", 2)))


@pytest.mark.parametrize("late", [True, False], ids=["masks", "draw"])
def test_a_failure_between_launch_and_draw_takes_the_step_back(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is repeated and every request gets its tokens."""
    engine = new_engine()
    options = [("endless", {"seed": 1, **PENALTIES}), ("", {"seed": 2}), ("words", {"seed": 3, "logprobs": 2})]
    requests = [engine.add_request(str(i), prompt_of(i), parameters(g, **o)) for i, (g, o) in enumerate(options)]
    for _ in range(4):
        engine.step()
    failures = 0
    owner, name = (JointMasks, "fill") if late else (StandInSlots, "draw")
    original = getattr(owner, name)

    def fail_once(*arguments: Any) -> Any:
        nonlocal failures
        if not failures and engine.in_flight and engine.in_flight[-1].launched.undrawn is not None:
            failures += 1
            raise RuntimeError("no draw today")
        return original(*arguments)

    monkeypatch.setattr(owner, name, fail_once)
    drain(engine)
    assert failures == 1
    for number, (request, (grammar, each)) in enumerate(zip(requests, options, strict=True)):
        assert_like_alone(request, number, grammar, tuple(each.items()))
    engine.blocks.check_invariants()
    assert engine.blocks.num_used_blocks == 0


def test_a_grammar_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    requests = [engine.add_request(str(i), prompt_of(i), parameters("endless", seed=i)) for i in range(3)]
    for _ in range(3):
        engine.step()
    original = JointMasks.fill
    culprit = requests[1].sequences[0].output_token_ids

    def fill(self: JointMasks, masks: Any, rows: Any) -> None:
        if any(mask._output is culprit for mask in masks):
            raise RuntimeError("this grammar is broken")
        original(self, masks, rows)

    monkeypatch.setattr(JointMasks, "fill", fill)
    drain(engine)
    assert requests[1].sequences[0].finish_reason is FinishReason.ERROR
    for number in (0, 2):
        assert_like_alone(requests[number], number, "endless", (("seed", number),))
    assert engine.blocks.num_used_blocks == 0


def test_preempted_sequences_continue_where_they_were() -> None:
    """Blocks run out while masks are in flight: the plan waits for the tokens, preempts, and nothing changes."""
    engine = new_engine(num_blocks=16, max_model_len=48)
    options = {"max_tokens": 25, **PENALTIES}
    requests = [engine.add_request(str(i), prompt_of(i), parameters("endless", seed=i, **options)) for i in range(4)]
    drain(engine)
    assert engine.stats().num_preemptions > 0
    for number, request in enumerate(requests):
        assert_like_alone(request, number, "endless", (("seed", number), *options.items()))
    assert engine.blocks.num_used_blocks == 0


each_request = st.tuples(
    st.sampled_from(["", *GRAMMARS]),
    st.fixed_dictionaries(
        {"seed": st.integers(0, 2)},
        optional={
            "n": st.just(2),
            "logprobs": st.sampled_from([0, 3]),
            "prompt_logprobs": st.just(1),
            "temperature": st.just(0.0),
            "top_p": st.just(0.8),
            "max_tokens": st.sampled_from([1, 3, 25]),
            "repetition_penalty": st.just(1.4),
            "presence_penalty": st.just(0.7),
            "no_repeat_ngram_size": st.just(2),  # drawn on the host
        },
    ).filter(lambda options: not (options.get("n") and options.get("temperature") == 0.0)),
    st.integers(0, 12),  # step of its arrival
    st.one_of(st.none(), st.integers(1, 14)),  # steps until it is aborted
)


@pytest.mark.full
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(each_request, min_size=1, max_size=6),
    st.sampled_from([26, 36, 200]),
    st.sampled_from([3, 32]),
    st.booleans(),
)
def test_any_batch_gets_the_tokens_of_requests_alone(
    batch: list[tuple[str, dict[str, Any], int, int | None]], num_blocks: int, chunk_size: int, caching: bool
) -> None:
    """Grammars, penalties, logprobs, forks, aborts, ends and preemptions in one batch; no block is left."""
    engine = new_engine(
        block_size=2,
        num_blocks=num_blocks,
        max_model_len=48,
        chunk_size=chunk_size,
        enable_prefix_caching=caching,
        max_num_seqs=6,
    )
    requests: dict[int, Request] = {}
    for step in range(2000):
        for number, (grammar, options, arrival, leaving) in enumerate(batch):
            if step == arrival:
                requests[number] = engine.add_request(str(number), prompt_of(number), parameters(grammar, **options))
            if leaving is not None and step == arrival + leaving:
                engine.abort(str(number))
        if step > 12 and not engine.has_work:
            break
        engine.step()
        engine.blocks.check_invariants()
    assert not engine.has_work
    for number, (grammar, options, _, _) in enumerate(batch):
        request = requests[number]
        if any(sequence.finish_reason is FinishReason.ABORT for sequence in request.sequences):
            expected = output_ids(alone(number, grammar, tuple(options.items())))
            for ours, theirs in zip(output_ids(request), expected, strict=True):
                assert ours == theirs[: len(ours)]
        else:
            assert_like_alone(request, number, grammar, tuple(options.items()))
    assert engine.blocks.num_used_blocks == 0
