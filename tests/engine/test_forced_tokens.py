"""Forced tokens: a grammar that leaves no choice appends tokens without steps, and no output changes.

Each request must get the tokens that it gets on an engine where every token takes a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_in_slots import StandInKernels

pytest.importorskip("llguidance")

from bifolio import LLM, SpeculativeConfig
from bifolio.beam_params import BeamSearchParams
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.forced_tokens import ForcedTokens
from bifolio.kernels.reference import ReferenceKernels
from bifolio.sampling.grammar import Grammar, compile_grammar
from bifolio.sampling.thinking import AfterThinking
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request
from helpers import drain, make_engine, output_ids, random_prompt, tiny_folder, tiny_loaded, tiny_model, tiny_tokenizer

VOCAB = 320
GRAMMARS = {
    "record": Grammar.json_schema({
        "type": "object", "required": ["name", "kind"], "additionalProperties": False,
        "properties": {"name": {"type": "string", "maxLength": 3}, "kind": {"enum": ["alpha", "alps", "beta"]}},
    }),
    "choice": Grammar.choice(["red apple", "red fox", "the blue moon"]),
    "constant": Grammar.regex("abcdefabcdef"),
    "free": Grammar.regex("[a-f]{3,9}"),
    "tagged": Grammar.regex("<b>[a-f]{1,4}</b>(<i>[a-f]</i>){2}"),
}  # fmt: skip


@cache
def compiled(name: str) -> Any:
    return compile_grammar(GRAMMARS[name], tiny_loaded(tokenizer=True))


def parameters(name: str, **options: Any) -> SamplingParams:
    if options.pop("biased", False):
        options["logit_bias"] = {70: 3.0, 5: -1e30}
    chosen = {"temperature": 1.0, "seed": 1, "max_tokens": 60, "grammar": compiled(name)}
    return SamplingParams(**{**chosen, **options})


@contextmanager
def token_by_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every token takes a step."""
    with monkeypatch.context() as patched:
        patched.setattr(ForcedTokens, "set_slot", lambda *_: None)
        yield


def prompt_of(number: int) -> list[int]:
    return random_prompt(4 + 3 * number, seed=number, vocab_size=VOCAB)


def run(params: Any, number: int = 0, **options: Any) -> tuple[Request, InferenceEngine]:
    engine = make_engine(tiny_loaded(tokenizer=True), **options)
    request = engine.add_request("a", prompt_of(number), params)
    drain(engine)
    assert engine.blocks.num_used_blocks == 0
    return request, engine


def ends(request: Request) -> list[Any]:
    return [(s.finish_reason, s.stop_reason, s.text) for s in request.sequences]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_forced_tokens_take_no_steps_and_change_nothing(grammar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with token_by_token(monkeypatch):
        plain, slow = run(parameters(grammar))
    forced, fast = run(parameters(grammar))
    assert output_ids(forced) == output_ids(plain)
    assert ends(forced) == ends(plain)
    saved = slow.stats().num_steps - fast.stats().num_steps
    assert plain.metrics.num_forced_tokens == 0
    assert saved == forced.metrics.num_forced_tokens == fast.stats().num_forced_tokens
    assert saved >= {"record": 10, "choice": 1, "constant": 3, "free": 0, "tagged": 5}[grammar]


OPTIONS = st.fixed_dictionaries({}, optional={
    "n": st.integers(2, 3), "temperature": st.sampled_from([0.0, 0.7, 1.5]), "seed": st.integers(0, 9),
    "max_tokens": st.integers(4, 40), "repetition_penalty": st.just(1.4), "frequency_penalty": st.just(0.8),
    "logprobs": st.integers(0, 3), "prompt_logprobs": st.integers(0, 2), "biased": st.just(True),
    "bad_words_token_ids": st.just(((3, 4), (70,))), "min_tokens": st.integers(1, 4), "stop_token_ids": st.just((70,)),
    "top_p": st.just(0.8), "min_p": st.just(0.1), "ignore_eos": st.just(True),
})  # fmt: skip
ENGINES = {
    "roomy": partial(make_engine, chunk_size=512, token_budget=512),
    "chunks": partial(make_engine, chunk_size=3, token_budget=8),
    "crowded": partial(make_engine, num_blocks=40, block_size=4, chunk_size=5),
    "ahead": partial(make_engine, launch_ahead=1),
    "device": partial(make_engine, kernels=StandInKernels()),
    "drafts": partial(make_engine, speculative=SpeculativeConfig("ngram", adaptive=False)),
    "drafts, chunks": partial(
        make_engine, speculative=SpeculativeConfig("ngram", adaptive=False), chunk_size=3, num_blocks=40, block_size=4
    ),
}


@cache
def alone(number: int, grammar: str, options: tuple[tuple[str, Any], ...]) -> Request:
    with pytest.MonkeyPatch.context() as patch, token_by_token(patch):
        return run(parameters(grammar, **dict(options)), number, num_blocks=400)[0]


def scores(request: Request) -> list[Any]:
    entries = [entry for sequence in request.sequences for entry in sequence.logprobs]
    entries += [entry for entry in request.prompt_logprobs or [] if entry is not None]
    return [(entry.token_id, entry.rank, [token for token, _ in entry.top]) for entry in entries]


@pytest.mark.sampled(3)
@pytest.mark.full
@pytest.mark.parametrize("kind", ENGINES)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(sorted(GRAMMARS)), OPTIONS), min_size=1, max_size=5))
def test_any_company_and_engine(kind: str, wanted: list[tuple[int, str, dict[str, Any]]]) -> None:
    engine = ENGINES[kind](tiny_loaded(tokenizer=True))
    keys = [(number, grammar, tuple(sorted(options.items()))) for number, grammar, options in wanted]
    requests = [
        engine.add_request(str(index), prompt_of(number), parameters(grammar, **dict(options)))
        for index, (number, grammar, options) in enumerate(keys)
    ]
    seen: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for result in engine.step():
            if result.token is not None and result.sequence is not None and result.sequence.group is None:
                seen.setdefault((result.request_id, result.index), []).append(result.token)
        engine.blocks.check_invariants()
    for request, key in zip(requests, keys, strict=True):
        expected = alone(*key)
        assert (request.error is None) is (expected.error is None)
        assert output_ids(request) == output_ids(expected)
        assert ends(request) == ends(expected)
        assert scores(request) == scores(expected)
        if request.error is None:
            for sequence in request.sequences:
                assert seen[request.request_id, sequence.index] == sequence.output_token_ids, "a token was not reported"


def test_every_draft_method_continues_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model catches up with tokens that it has not drafted."""
    draft = SpeculativeConfig("draft", draft_model=str(tiny_folder(tokenizer=True, seed=5)), adaptive=False)
    schema = {"grammar": {"type": "array", "items": {"enum": ["alpha one", "beta two"]}, "minItems": 3, "maxItems": 3}}
    texts = {}
    for name, speculative in (("plain", None), ("draft", draft)):
        llm = LLM(tiny_folder(tokenizer=True, seed=3), kernels=ReferenceKernels(), num_blocks=200, block_size=4,
                  max_model_len=96, speculative=speculative)  # fmt: skip
        [output] = llm.generate("the fox", SamplingParams(temperature=0.9, seed=4, max_tokens=60, **schema))
        texts[name] = output.outputs[0].token_ids
        assert output.metrics.num_forced_tokens > 5
    with token_by_token(monkeypatch):
        llm = LLM(tiny_folder(tokenizer=True, seed=3), kernels=ReferenceKernels(), num_blocks=200, max_model_len=96)
        [output] = llm.generate("the fox", SamplingParams(temperature=0.9, seed=4, max_tokens=60, **schema))
    assert texts["plain"] == texts["draft"] == output.outputs[0].token_ids


@pytest.mark.full
@pytest.mark.parametrize("network", ["lfm2", "qwen3moe"])
def test_hybrid_and_expert_models(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    _, path = tiny_model(network, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(path / "tokenizer.json"))
    options: dict[str, Any] = {"num_blocks": 200, "block_size": 4, "max_model_len": 96}
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=60, n=2, grammar=GRAMMARS["tagged"])
    [forced] = LLM(path, kernels=ReferenceKernels(), **options).generate("the fox", params)
    with token_by_token(monkeypatch):
        [plain] = LLM(path, kernels=ReferenceKernels(), **options).generate("the fox", params)
    assert [output.token_ids for output in forced.outputs] == [output.token_ids for output in plain.outputs]
    assert forced.metrics.num_forced_tokens > 8


def test_beams_take_a_step_for_each_token() -> None:
    request, engine = run(BeamSearchParams(beam_width=2, max_tokens=20, grammar=compiled("constant")))
    assert request.error is None
    assert engine.stats().num_forced_tokens == 0


def test_the_end_of_a_limited_reasoning_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = AfterThinking(VOCAB, (7,), (8,), (8, 9, 10), budget=4, grammar=compiled("tagged"))
    options = {"grammar": rule, "allowed_token_ids": None, "logit_bias": {7: 50.0, 8: -50.0}}
    with token_by_token(monkeypatch):
        plain, _ = run(parameters("tagged", **options))
    forced, _ = run(parameters("tagged", **options))
    tokens = forced.sequences[0].output_token_ids
    assert tokens[0] == 7
    assert tokens[5:8] == [8, 9, 10]
    assert output_ids(forced) == output_ids(plain)
    assert forced.metrics.num_forced_tokens >= 2 + 5


def test_a_limit_within_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in range(1, 9):
        with token_by_token(monkeypatch):
            plain, _ = run(parameters("constant", max_tokens=limit))
        forced, _ = run(parameters("constant", max_tokens=limit))
        assert output_ids(forced) == output_ids(plain)
        assert ends(forced) == ends(plain)
