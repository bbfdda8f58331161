"""Structured output: finished text obeys the grammar, in combination with every other option."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("llguidance")


from grammar_helpers import llm

from bifolio.api.outputs import RequestOutput
from bifolio.beam_params import BeamSearchParams
from bifolio.cli.main import build_app
from bifolio.config import SpeculativeConfig
from bifolio.errors import GrammarError
from bifolio.sampling.grammar import MAX_CACHED, Grammar, compile_grammar, prepare_compiler
from bifolio.sampling_params import SamplingParams
from cli_runner import CliRunner
from helpers import tiny_folder, tiny_loaded, tiny_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def run(grammar: Any, count: int = 8, **params: Any) -> list[RequestOutput]:
    settings = {"max_tokens": 200, "seed": 3, **params}
    prompts = [f"Text {number}:" for number in range(count)]
    return llm().generate(prompts, SamplingParams(grammar=grammar, **settings), use_tqdm=False)


def finished_texts(outputs: list[RequestOutput], least: int) -> list[str]:
    texts = [item.text for output in outputs for item in output.outputs if item.finish_reason == "stop"]
    assert all(output.error is None for output in outputs)
    assert len(texts) >= least
    return texts


@pytest.mark.full
def test_a_schema_holds() -> None:
    for text in finished_texts(run(Grammar.json_schema(PERSON), 16), 14):
        jsonschema.validate(json.loads(text), PERSON)


def test_a_mapping_is_taken_as_a_schema() -> None:
    assert finished_texts(run({"type": "boolean"}), 8)[0] in ("true", "false")


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-f]{3,9}",
        "^(yes|no)+$",
        r"\d{3}-\d{4}",
        r"a\$",
        "[^a-z]{1,5}",
        "(ä|ö|ü|🙂){1,4}",
        r"[a-z]{1,4}@[a-z]{2}\.com",
    ],
)
def test_a_regular_expression_holds(pattern: str) -> None:
    for text in finished_texts(run(Grammar.regex(pattern)), 2):
        assert re.fullmatch(pattern, text), text


def test_a_choice_holds() -> None:
    choices = ["yes", "no", 'a "quoted" \\ one', "two\nlines", "Grüße 你好 🙂", "yesterday"]
    texts = finished_texts(run(Grammar.choice(choices), 40), 40)
    assert set(texts) <= set(choices)
    assert len(set(texts)) > 2


def test_a_lark_grammar_holds() -> None:
    grammar = Grammar.lark(
        'start: term (("+" | "-") term){0,3}\nterm: NUMBER | "(" start ")"\nNUMBER: /[1-9][0-9]{0,2}/'
    )
    for text in finished_texts(run(grammar, 16), 8):
        compile(text, "text", "eval")  # Python's own parser takes it


@pytest.mark.full
def test_any_json_object() -> None:
    for text in finished_texts(run(Grammar.json_object(), 16), 1):
        assert isinstance(json.loads(text), dict)


# -- combined with other options ----------------------------------------------------------------------------------


@pytest.mark.full
def test_with_n_penalties_logprobs_and_greedy() -> None:
    for params in (
        {"n": 4},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"logprobs": 3},
        {"temperature": 0.0},
        {"top_k": 3, "top_p": 0.9},
        {"ignore_eos": True},
        {"logit_bias": {7: 50.0}},
    ):
        for text in finished_texts(run(Grammar.json_schema(PERSON), 6, **params), 4):
            jsonschema.validate(json.loads(text), PERSON)


def test_beams_obey_the_grammar() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=80, grammar=Grammar.json_schema(PERSON))
    outputs = llm().beam_search([[7], [8]], params)
    texts = [item.text for output in outputs for item in output.outputs if item.finish_reason == "stop"]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.full
def test_speculation_changes_nothing() -> None:
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": ["ab", "abab"]}, "minItems": 8, "maxItems": 12})
    params = SamplingParams(grammar=grammar, max_tokens=150, seed=1)
    prompts = [[9, 10], [11, 12]]
    plain = llm().generate(prompts, params, use_tqdm=False)
    guessing = llm(speculative=SpeculativeConfig("ngram", adaptive=False))
    guessed = guessing.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in guessed] == [o.outputs[0].token_ids for o in plain]
    assert json.loads(guessed[0].outputs[0].text)
    stats = guessing.engine.stats()
    assert stats.num_decode_tokens + stats.num_forced_tokens  # it ran


@pytest.mark.full
def test_preemption_changes_nothing() -> None:
    """A pool so small that requests lose their blocks and are recomputed."""
    params = SamplingParams(grammar=Grammar.json_schema(PERSON), max_tokens=100, seed=4)
    prompts = [[20 + number] for number in range(6)]
    expected = llm().generate(prompts, params, use_tqdm=False)
    small = llm(num_blocks=20, max_model_len=128, max_num_seqs=6)
    found = small.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].text for o in found] == [o.outputs[0].text for o in expected]
    assert small.engine.stats().num_preemptions > 0


def test_a_mask_follows_its_list_wherever_it_goes() -> None:
    """Compared with a fresh matcher at every turn: appended, cut, exchanged and announced, with and without drafts."""
    compiled = compile_grammar(Grammar.regex("(ab|cd|abe){1,40}"), tiny_loaded(tokenizer=True))
    tokenizer = tiny_tokenizer()
    texts = ["", "ab", "abcd", "abe", "cdcdab", "abab", "ababcd"]
    lists = [tokenizer.encode(text).ids for text in texts]
    output: list[int] = []
    mask = compiled.follow(output)
    rng = random.Random(1)
    for _ in range(200):
        change = rng.choice(["append", "cut", "exchange"])
        if change == "append":
            output += tokenizer.encode(rng.choice(["ab", "cd"])).ids
        elif change == "cut":
            del output[2 * rng.randint(0, len(output) // 2) :]
        else:
            output[:] = rng.choice(lists)
            mask.restart()
        pending = rng.choice([[], tokenizer.encode("ab").ids, tokenizer.encode("zz").ids])
        expected = compiled.follow([*output, *pending]).allowed([])
        found = mask.allowed(pending)
        if tokenizer.decode(pending) != "zz":  # behind a broken draft anything goes
            np.testing.assert_array_equal(found, expected)


def test_a_grammar_and_a_ban_that_leave_nothing_fail_alone() -> None:
    words = [[token] for token in range(1, llm().model.config.vocab_size)]
    bad = SamplingParams(grammar=Grammar.choice(["yes"]), bad_words_token_ids=words, max_tokens=5)
    good = SamplingParams(grammar=Grammar.choice(["yes"]), max_tokens=5)
    failed, fine = llm().generate([[7], [8]], [bad, good], use_tqdm=False)
    assert failed.error is not None
    assert failed.outputs[0].finish_reason == "error"
    assert fine.outputs[0].text == "yes"


# -- random schemas -----------------------------------------------------------------------------------------------


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    leaves = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(leaves + ["object", "array", "anyOf", "ref", "tuple"] * (2 if depth < 3 else 0))
    if kind == "string":
        low = rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 4)}
    if kind == "integer":
        low = rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
    if kind == "number":
        return {"type": "number", "minimum": rng.randint(-5, 0), "exclusiveMaximum": rng.randint(1, 100)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["a", "b c", 1, 2.5, None, True, "ü", [1], {"k": 1}], rng.randint(1, 5))}
    if kind == "const":
        return {"const": rng.choice(["x", 7, None, [1, "two"], {"a": {"b": []}}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^\\d{3}$", "^(foo|bar)$"])}
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "tuple":
        parts = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "ref":
        return {"$defs": {"part": random_schema(rng, 3)}, "type": "array", "maxItems": 2,
                "items": {"$ref": "#/$defs/part"}} if depth == 0 else random_schema(rng, 3)  # fmt: skip
    names = rng.sample(["a", "b", "long name", "ü", "x1"], rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


@pytest.mark.full
def test_five_hundred_random_schemas() -> None:
    rng = random.Random(11)
    schemas = [random_schema(rng) for _ in range(500)]
    usable, params = [], []
    for schema in schemas:
        try:
            compiled = compile_grammar(Grammar.json_schema(schema), tiny_loaded(tokenizer=True))
        except GrammarError:  # refused as not supported: no promise is broken
            continue
        usable.append(schema)
        params.append(SamplingParams(grammar=compiled, max_tokens=160, seed=len(usable), temperature=1.0))
    assert len(usable) > 480
    outputs = llm().generate([f"Text {number}:" for number in range(len(usable))], params, use_tqdm=False)
    num_finished = 0
    for schema, output in zip(usable, outputs, strict=True):
        assert output.error is None, (schema, output.error)
        if output.outputs[0].finish_reason == "stop":
            num_finished += 1
            jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert num_finished > 0.9 * len(usable)


# -- types, files and the cache ----------------------------------------------------------------------------------------


def test_the_cache_is_bounded_and_used() -> None:
    model = tiny_loaded(tokenizer=True)
    first = compile_grammar(Grammar.choice(["first"]), model)
    assert compile_grammar(Grammar.choice(["first"]), model) is first
    for number in range(MAX_CACHED + 5):
        compile_grammar(Grammar.choice([f"choice {number}"]), model)
    assert len(prepare_compiler(model)._cache) == MAX_CACHED
    assert compile_grammar(Grammar.choice(["first"]), model) is not first


def test_wrong_types_are_named_errors() -> None:
    for wrong in (5, "text", ["a"], object()):
        with pytest.raises(GrammarError):
            llm().generate([[5]], SamplingParams(grammar=wrong), use_tqdm=False)
    with pytest.raises(GrammarError):
        Grammar("yaml", "x")  # type: ignore[arg-type]
    with pytest.raises(GrammarError):
        Grammar.json_schema({"a": {1, 2}})  # type: ignore[dict-item]


def test_generate_takes_a_schema_file(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}))
    folder = tiny_folder(tokenizer=True)
    arguments = ["generate", "-m", str(folder), "List: ", "--json-schema", str(schema), "--seed", "1", "-n", "40"]
    result = CliRunner().invoke(build_app(), arguments, catch_exceptions=False)
    assert set(json.loads(result.stdout.removeprefix("List: "))) <= {1, 2}
    schema.write_text("{")
    with pytest.raises(GrammarError):
        CliRunner().invoke(build_app(), arguments, catch_exceptions=False)
