"""Grammars of tool calls: every text that they allow is read back as valid calls, and recorded answers are allowed."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from tool_samples import SAMPLES

pytest.importorskip("llguidance")

from bifolio.sampling.grammar import Grammar, compile_grammar
from bifolio.text.tools import FORMATS
from bifolio.text.tools.deepseek import DeepSeek
from bifolio.text.tools.events import Arguments, Call, ToolSpec, merged
from bifolio.text.tools.format import LarkWriter, ToolFormat
from bifolio.text.tools.mistral import Mistral
from helpers import tiny_loaded


@pytest.fixture(autouse=True)
def masks_without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammars count here, not the time of their masks, which a busy machine lengthens."""
    monkeypatch.setattr("bifolio.sampling.grammar_mask.MAX_MASK_SECONDS", 60.0)
    monkeypatch.setattr("bifolio.sampling.grammar_mask.MEAN_MASK_SECONDS", 60.0)


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9,
                                                                                  "minimum": 0}},
    "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = {"get_weather": ToolSpec("get_weather", WEATHER, True), "now": ToolSpec("now", {}, True)}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS["now"] = ToolSpec("now", NOTHING, True)
ALL: dict[str, ToolFormat] = {kind.name: kind() for kind in FORMATS}
ALL |= {"mistral-args": Mistral(has_args=True), "deepseek-fences": DeepSeek(has_fences=True)}


def grammar(form: ToolFormat, *, must_call: bool, many: bool, strict: bool = True) -> Grammar:
    tools = [ToolSpec(tool.name, tool.parameters, strict) for tool in TOOLS.values()]
    lark = LarkWriter()
    form.write(lark, tools, must_call=must_call, many=many)
    return Grammar("tools", lark.source())


def walk(constraint: Grammar, begin: str, seed: int, most: int = 400) -> str | None:
    """A random text that the grammar allows, after a beginning; None if it does not end in time."""
    model = tiny_loaded(tokenizer=True)
    tokenizer, ends = model.require_tokenizer(), model.config.eos_token_ids
    output = tokenizer.encode(begin, add_special_tokens=False) if begin else []
    mask = compile_grammar(constraint, model).follow(output)
    rng = np.random.default_rng(seed)
    for _ in range(most):
        allowed = np.flatnonzero(np.unpackbits(np.asarray(mask.allowed([])).view(np.uint8), bitorder="little"))
        assert len(allowed), tokenizer.decode(output)
        if set(ends) & set(allowed.tolist()):
            return tokenizer.decode(output)
        output.append(int(rng.choice(allowed)))
    return None


def calls(form: ToolFormat, text: str) -> list[tuple[str, object]]:
    reader = form.reader(TOOLS, True)
    parts = merged([*reader.push(text), *reader.finish()])
    assert all(isinstance(part, Call | Arguments) for part in parts), (text, parts)
    names = [part.name for part in parts if isinstance(part, Call)]
    values = [json.loads(part.text) for part in parts if isinstance(part, Arguments)]
    return list(zip(names, values, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_every_text_of_a_required_call_is_valid(name: str) -> None:
    form = ALL[name]
    constraint = grammar(form, must_call=True, many=False)
    begin = "" if name != "harmony" else "<|channel|>commentary to"
    for seed in range(4):
        text = walk(constraint, begin, seed)
        assert text is not None
        ((called, value),) = calls(form, text)
        jsonschema.validate(value, TOOLS[called].parameters)


@pytest.mark.parametrize("name", ALL)
def test_free_text_is_free_and_a_call_in_it_is_not(name: str) -> None:
    form = ALL[name]
    constraint = grammar(form, must_call=False, many=True)
    model = tiny_loaded(tokenizer=True)
    tokenizer = model.require_tokenizer()
    compiled = compile_grammar(constraint, model)

    def accepted(text: str) -> bool:
        output: list[int] = []
        mask = compiled.follow(output)
        for token in tokenizer.encode(text, add_special_tokens=False):
            bits = np.unpackbits(np.asarray(mask.allowed([])).view(np.uint8), bitorder="little")
            if not bits[token]:
                return False
            output.append(token)
        bits = np.unpackbits(np.asarray(mask.allowed([])).view(np.uint8), bitorder="little")
        return bool(bits[model.config.eos_token_ids[0]])

    free = "Hello, a < b.\n" if name != "harmony" else "<|channel|>final<|message|>Hello, a < b.\n"
    assert accepted(free)
    family = name.partition("-")[0]
    variant = {"mistral-args": 1, "deepseek": 1}.get(name, 0)
    sample = SAMPLES[family][variant]
    text = sample.text.replace("<|call|>", "").replace(', "id": "abc123def"', "")
    assert accepted(text), text
    broken = text.replace("Rome", "Rimini") if "Rome" in text else text + "]"
    assert not accepted(broken), broken


@pytest.mark.parametrize("name", ALL)
def test_calls_that_are_not_strict_take_any_arguments(name: str) -> None:
    form = ALL[name]
    begin = "" if name != "harmony" else "<|channel|>commentary to"
    found = [walk(grammar(form, must_call=True, many=False, strict=False), begin, seed, 150) for seed in range(6)]
    for text in filter(None, found):
        assert calls(form, text)
