"""Structural tags: free text up to a trigger, then a part that follows its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from bifolio.errors import GrammarError
from bifolio.sampling.grammar import Grammar, compile_grammar
from helpers import tiny_loaded

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TIME = {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"],
        "additionalProperties": False}  # fmt: skip
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=time>", "schema": TIME, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
WEATHER, AT = '<function=weather>{"city": "Rome"}</function>', '<function=time>{"hour":3}</function>'


def new(**flags: bool) -> dict[str, Any]:
    tags = [
        {"begin": each["begin"], "content": {"type": "json_schema", "json_schema": each["schema"]}, "end": each["end"]}
        for each in OLD["structures"]
        if isinstance(each, dict)
    ]
    return {"type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": OLD["triggers"], "tags": tags, **flags}}  # fmt: skip


def is_whole(tags: Any, text: str) -> bool | None:
    """Whether the text may end here; None: the grammar forbids it."""
    model = tiny_loaded(tokenizer=True)
    mask = compile_grammar(Grammar.structural_tag(tags), model).follow([])
    tokens = model.require_tokenizer().encode(text, add_special_tokens=False)
    matcher = mask._matcher
    return bool(matcher.is_accepting()) if matcher.try_consume_tokens(tokens) == len(tokens) else None


@pytest.mark.parametrize("tags", [OLD, json.dumps(OLD), new()], ids=["old", "text", "new"])
@pytest.mark.parametrize(("text", "expected"), [
    ("", True),
    ("The weather < 3 is fine.\n\nReally.", True),
    (WEATHER, True),
    (f"Let me see. {WEATHER} and {AT} done", True),
    (f"{AT}{AT}{WEATHER}", True),
    ("so <function=", False),
    ('so <function=weather>{"city": "Ro', False),
    (WEATHER[:-1], False),
    ("<function=other>{}", None),
    ('<function=weather>{"city": "Paris"}', None),
    ('<function=weather>{"hour": 3}', None),
    ('<function=weather>{"city": "Rome"} oops', None),
])  # fmt: skip
def test_parts_behind_a_trigger_follow_their_schema(tags: Any, text: str, expected: bool | None) -> None:
    assert is_whole(tags, text) is expected


def test_flags() -> None:
    assert is_whole(new(at_least_one=True), "no call") is False
    assert is_whole(new(at_least_one=True), f"a {WEATHER} b {AT} c") is True
    assert is_whole(new(stop_after_first=True), "no call") is True
    assert is_whole(new(stop_after_first=True), f"a {WEATHER}") is True
    assert is_whole(new(stop_after_first=True), f"a {WEATHER} b") is None
    assert is_whole(new(stop_after_first=True, at_least_one=True), "a") is False
    assert is_whole(new(stop_after_first=True, at_least_one=True), f"a {WEATHER}") is True


def test_several_triggers_and_one_that_begins_another() -> None:
    tags = {
        "structures": [
            {"begin": "<a>", "schema": CITY, "end": ""},
            {"begin": "[b", "schema": TIME, "end": "]"},
            {"begin": "<a-long>", "schema": TIME, "end": "!"},
        ],
        "triggers": ["<a", "[b", "<a-long"],
    }
    assert is_whole(tags, 'x <a>{"city": "Oslo"} y [b{"hour": 1}] z <a-long>{"hour": 2}!') is True
    assert is_whole(tags, "[b x") is None


@pytest.mark.parametrize(("change", "words"), [
    ({"structures": []}, "1 to 128"),
    ({"triggers": []}, "at least one"),
    ({"triggers": [""]}, "empty"),
    ({"triggers": ["<tool"]}, "add one to `triggers`"),
    ({"triggers": ["<function=", "<x"]}, "leave it out"),
    ({"colour": 1}, "no field 'colour'"),
    ({"structures": [{"begin": "<function=a", "schema": 3}]}, "needs a JSON schema"),
    ({"structures": [{"begin": "", "schema": {}}]}, "not empty"),
    ({"structures": [{"begin": "<function=", "schema": {}}] * 2}, "different beginnings"),
    ({"format": {"type": "triggered_tags"}}, "either"),
    ({"structures": [{"begin": "<function=", "schema": {"type": "string", "pattern": "(a{64}){640}"}}]}, "repeats"),
])  # fmt: skip
def test_mistakes_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        compile_grammar(Grammar.structural_tag({**OLD, **change}), tiny_loaded(tokenizer=True))


@pytest.mark.parametrize(("form", "words"), [
    ({"type": "json_schema"}, "use 'triggered_tags'"),
    ({"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<", "content": {"type": "regex"}}]},
     "use 'json_schema'"),
    ({"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<", "schema": {}}], "at_least_one": 1},
     "true or false"),
])  # fmt: skip
def test_formats_that_are_not_supported_are_named(form: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        compile_grammar(Grammar.structural_tag({"format": form}), tiny_loaded(tokenizer=True))
