"""Reasoning apart from the answer, in every split of the text."""

from __future__ import annotations

import random

import pytest

from bifolio.text.reasoning import FORMATS, PlainReader, ReasoningReader, reasoning_format, texts_of
from bifolio.text.tools import FORMATS as TOOL_FORMATS
from bifolio.text.tools import tool_format
from bifolio.text.tools.events import Call, ToolSpec, merged
from bifolio.text.tools.gemma import Gemma
from bifolio.text.tools.hermes import Hermes

THINK = FORMATS[0]
CASES = [  # whether the prompt ends inside the reasoning, the answer, reasoning, content
    (False, "<think>\nWhy?\nSo.\n</think>\n\nBecause.", "Why?\nSo.", "Because."),
    (True, "Why? a </ b\n</think>\n\nBecause.\n", "Why? a </ b", "Because.\n"),
    (True, "cut off in th", "cut off in th", ""),
    (True, "</think>Yes", "", "Yes"),
    (False, "No <think> here</think>", "", "No <think> here</think>"),
    (False, "<thi", "", "<thi"),
    (False, "<think></think>", "", ""),
    (False, "", "", ""),
]


def read(is_open: bool, pieces: list[str]) -> tuple[str, str]:
    reader = ReasoningReader(THINK, is_open, PlainReader())
    return texts_of([*(part for piece in pieces for part in reader.push(piece)), *reader.finish()])


@pytest.mark.parametrize(("is_open", "text", "reasoning", "content"), CASES)
def test_reasoning_is_separated_in_every_split(is_open: bool, text: str, reasoning: str, content: str) -> None:
    assert read(is_open, [text]) == (reasoning, content)
    assert read(is_open, list(text)) == (reasoning, content)
    for seed in range(50):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(len(text) + 1), rng.randint(0, min(4, len(text)))))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(is_open, pieces) == (reasoning, content)


def test_calls_behind_reasoning() -> None:
    reader = ReasoningReader(THINK, True, Hermes().reader({"now": ToolSpec("now")}))
    text = 'hm <tool_call>\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    parts = merged([*(part for letter in text for part in reader.push(letter)), *reader.finish()])
    assert texts_of(parts) == ("hm <tool_call>", "")
    assert Call("now") in parts


def test_reasoning_and_calls_of_gemma() -> None:
    marks = reasoning_format("{{ '<|channel>thought\\n<channel|>' }}")
    assert marks is not None
    assert marks.markers == ("<|channel>", "<channel|>")
    assert not marks.is_open("<|turn>model\n<|channel>thought\n<channel|>")
    reader = ReasoningReader(marks, False, Gemma().reader({"now": ToolSpec("now")}))
    text = "<|channel>thought\nWhat time is it?\n<channel|><|tool_call>call:now{}<tool_call|>"
    parts = merged([*(part for letter in text for part in reader.push(letter)), *reader.finish()])
    assert texts_of(parts) == ("What time is it?", "")
    assert Call("now") in parts


def test_the_end_of_the_prompt_says_whether_reasoning_is_open() -> None:
    assert THINK.is_open("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert reasoning_format("{{ '<think>' }} ... </think>") == THINK
    assert reasoning_format("no marks") is None
    assert reasoning_format(None) is None


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("hermes", "{% if tools %}<tool_call>{% endif %}"),
        ("qwen3_coder", "<tool_call>\n<function=example>\n<parameter=x>"),
        ("glm", "<tool_call>{name}<arg_key>{k}</arg_key>"),
        ("gemma", "{{ '<|tool_call>call:' + function['name'] + '{' }}"),
        ("mistral", "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]"),
        ("deepseek", "<｜tool▁calls▁begin｜>"),
        ("kimi", "<|tool_calls_section_begin|>"),
        ("granite", "<|start_of_role|>assistant<|end_of_role|><|tool_call|>"),
        ("phi", "<|tool|>{{ tools }}<|/tool|>"),
        ("llama3", '<|start_header_id|> {"name": function name, "parameters": dictionary}'),
        ("pythonic", "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]"),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>"),
        ("hermes", None),
    ],
)
def test_the_format_is_chosen_from_the_template(name: str, template: str | None) -> None:
    assert tool_format(template).name == name
    assert name in {kind.name for kind in TOOL_FORMATS}
