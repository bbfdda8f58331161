"""Grammars that would take too long or too much are refused; failures of llguidance are named errors."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

pytest.importorskip("llguidance")


from grammar_helpers import llm

from bifolio.api.llm import LLM
from bifolio.errors import GrammarError
from bifolio.model.loader import load_model
from bifolio.sampling.grammar import Grammar, compile_grammar, prepare_compiler
from bifolio.sampling_params import SamplingParams
from helpers import tiny_folder, tiny_loaded, without_decoder


def nested(levels: int) -> str:
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


HOSTILE = {
    "depth": Grammar("json_schema", nested(2000)),
    "size": Grammar("json_schema", json.dumps({"enum": ["x" * 70000]})),
    "patterns": Grammar.json_schema(
        {"properties": {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n}}}$"} for n in range(1000)}}
    ),
    "product": Grammar.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(10)]} for i in range(12)]}
    ),
    "divisor": Grammar.json_schema({"type": "integer", "multipleOf": 999983, "minimum": 1, "maximum": 10**15}),
    "self": Grammar.json_schema({"$ref": "#"}),
    "unknown": Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}),
    "brackets": Grammar.regex("(" * 3000 + "a" + ")" * 3000),
    "regex size": Grammar.regex("a?" * 5000 + "a" * 5000),
    "look-around": Grammar.regex("(?=.*a)(?=.*b).*"),
    "unbalanced": Grammar.regex("(a"),
    "endless rule": Grammar.lark("start: a\na: b\nb: a"),
    "not lark": Grammar.lark("start: ("),
    "no start": Grammar.lark('begin: "a"'),
    "not a list": Grammar("choice", '{"a": 1}'),
    "not JSON": Grammar("json_schema", "{"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_while_other_threads_go_on(name: str) -> None:
    prepare_compiler(tiny_loaded(tokenizer=True))
    ticks, running = [0], [True]

    def tick() -> None:
        while running[0]:
            time.sleep(0.001)
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    try:
        with pytest.raises(GrammarError):
            compile_grammar(HOSTILE[name], tiny_loaded(tokenizer=True))
    finally:
        seconds = time.perf_counter() - began
        running[0] = False
        thread.join()
    assert seconds < 10  # a bound, not a measurement: most take milliseconds
    assert ticks[0] + 1 > seconds * 5  # the interpreter was not held for long, even on a busy machine


@pytest.mark.full
@pytest.mark.parametrize(
    "pattern",
    ["(a|b)*a(a|b){30}", ".*a.{200}", "((a{1,100}){1,100}){1,100}", "(.{1,10000}){1,10000}", r"[\p{L}]{1,2000}"],
)
def test_expensive_patterns_run_within_bounds_or_end_their_own_request(pattern: str) -> None:
    try:
        bad = SamplingParams(grammar=compile_grammar(Grammar.regex(pattern), llm().model), max_tokens=60, seed=1)
    except GrammarError:
        return
    good = SamplingParams(max_tokens=60, seed=2, ignore_eos=True)
    alone = llm().generate([[8]], good, use_tqdm=False)[0].outputs[0].token_ids
    outputs = llm().generate([[7], [8]], [bad, good], use_tqdm=False)
    assert outputs[1].outputs[0].token_ids == alone
    assert outputs[0].outputs[0].finish_reason in ("stop", "length", "error")


def test_a_tokenizer_that_cannot_be_read_is_refused_by_name_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    model = load_model(without_decoder(tiny_folder(tokenizer=True)))
    with pytest.raises(GrammarError, match="not available with this model, whose tokenizer llguidance cannot read"):
        prepare_compiler(model)
    monkeypatch.setattr(llguidance, "LLTokenizer", None)
    with pytest.raises(GrammarError, match="tokenizer llguidance cannot read: can't determine decoder"):
        compile_grammar(Grammar.regex("[a-z]+"), model)
    plain = LLM(model, max_model_len=64).generate("Once", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(plain[0].outputs[0].token_ids) == 3


class PanicException(BaseException):
    """As Rust code raises it: no Exception."""


@pytest.mark.parametrize("failure", [PanicException("index out of bounds"), TypeError("an old signature")])
def test_panics_and_other_failures_of_llguidance_are_grammar_errors(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llguidance

    def fail(*arguments: Any, **options: Any) -> None:
        raise failure

    model = load_model(tiny_folder(tokenizer=True))
    compiler = prepare_compiler(model)
    monkeypatch.setattr(llguidance, "LLMatcher", fail)
    with pytest.raises(GrammarError, match="grammar cannot be used"):
        compiler.compile(Grammar.lark("start: /a/"))
    monkeypatch.setattr(llguidance, "LLTokenizer", fail)
    with pytest.raises(GrammarError, match=str(failure)):
        prepare_compiler(load_model(tiny_folder(tokenizer=True)))


def test_an_interruption_is_no_grammar_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llguidance, "LLTokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_compiler(load_model(tiny_folder(tokenizer=True)))
