"""Formats of tool calls: recorded answers, streamed in every split, and calls that are none."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_samples import MALFORMED, SAMPLES, TOOLS, Calls

from bifolio.text.reasoning import texts_of
from bifolio.text.tools import FORMATS
from bifolio.text.tools.events import Arguments, Call, Content, Part, merged
from bifolio.text.tools.format import ToolFormat

FORMAT_NAMES = {kind.name for kind in FORMATS}
BY_NAME: dict[str, ToolFormat] = {kind.name: kind() for kind in FORMATS}
BY_NAME["hermes_unmarked"] = BY_NAME["hermes"]
ROWS = [(name, sample) for name, samples in SAMPLES.items() for sample in samples]
TEXTS = {name: [sample.text for sample in SAMPLES[name]] + MALFORMED[name] for name in SAMPLES}


def parsed(name: str, pieces: list[str], is_certain: bool = False) -> list[Part]:
    reader = BY_NAME[name].reader(TOOLS, is_certain)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return merged([*parts, *reader.finish()])


def calls_of(parts: list[Part]) -> Calls:
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, Call):
            calls.append((part.name, ""))
        elif isinstance(part, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return [(name, json.loads(text)) for name, text in calls]


def random_pieces(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(text) + 1), rng.randint(0, min(len(text), rng.choice((1, 3, 8, 400))))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_every_format_has_samples() -> None:
    assert set(SAMPLES) == set(MALFORMED) == set(BY_NAME) >= FORMAT_NAMES


@pytest.mark.parametrize(("name", "sample"), ROWS)
@pytest.mark.parametrize("is_certain", [False, True])
def test_recorded_answers(name: str, sample, is_certain: bool) -> None:  # type: ignore[no-untyped-def]
    if is_certain and name == "hermes_unmarked":
        pytest.skip("a grammar enforces the marks")
    parts = parsed(name, [sample.text], is_certain)
    assert calls_of(parts) == sample.calls
    assert texts_of(parts) == (sample.reasoning, sample.content)
    assert parsed(name, list(sample.text), is_certain) == parts


@pytest.mark.parametrize("name", SAMPLES)
def test_malformed_calls_are_text(name: str) -> None:
    for text in MALFORMED[name]:
        for pieces in ([text], list(text)):
            parts = parsed(name, pieces)
            assert calls_of(parts) == [], text
            assert texts_of(parts)[1] == text


@pytest.mark.parametrize("name", SAMPLES)
def test_plain_text_passes_unchanged(name: str) -> None:
    for text in ("", "Hello.\n", " a < b [c] {d} ", "Tools are <b>useful</b>: `f(x)`\n\n"):
        assert texts_of(parsed(name, list(text))) == ("", text)


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_streamed_equals_whole(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(TEXTS[name]), min_size=1, max_size=3)))
    pieces = random_pieces(text, data.draw(st.integers(0, 1 << 30)))
    is_certain = text in TEXTS[name][: len(SAMPLES[name])] and data.draw(st.booleans())
    is_certain = is_certain and name in FORMAT_NAMES
    assert parsed(name, pieces, is_certain) == parsed(name, [text], is_certain)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_streamed_equals_whole_in_a_thousand_splits(name: str) -> None:
    rng = random.Random(name)
    for seed in range(1000):
        text = "".join(rng.choices(TEXTS[name], k=rng.randint(1, 3)))
        assert parsed(name, random_pieces(text, seed)) == parsed(name, [text]), (text, seed)


@pytest.mark.parametrize("name", SAMPLES)
def test_no_character_is_lost_beside_calls(name: str) -> None:
    """Text around a call is returned but for the spaces next to the call."""
    if name in ("llama3", "pythonic", "harmony"):
        pytest.skip("a call is the whole answer")
    sample = SAMPLES[name][0]
    parts = parsed(name, list(f"before\n{sample.text} after"))
    assert [name for name, _ in calls_of(parts)] == [name for name, _ in sample.calls]
    content = texts_of(parts)[1]
    assert content.startswith("before")
    assert content.endswith("after")


def test_a_block_of_json_is_held_back_only_while_it_may_be_a_call() -> None:
    reader = BY_NAME["hermes"].reader(TOOLS)
    assert reader.push('Data:\n```json\n{"na') == [Content("Data:")]
    assert merged(reader.push('me": "Bob",')) == [Content('\n```json\n{"name": "Bob",')]
    assert reader.push(' "age": 3}\n') == [Content(' "age": 3}')]
    assert merged(reader.finish()) == [Content("\n")]


def test_a_block_of_json_is_text_where_a_grammar_enforces_calls() -> None:
    text = SAMPLES["hermes_unmarked"][0].text
    assert parsed("hermes", [text], is_certain=True) == [Content(text)]
