"""JSON that strict clients read: values, and JSON text that a model writes, in any pieces."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_samples import TOOLS

from bifolio.text.strict_json import StrictJsonText, strict_text, write_json
from bifolio.text.tools import FORMATS
from bifolio.text.tools.events import Arguments, Part, merged
from hostile_calls import ANSWERS

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def expected(value: Any) -> Any:
    """The value that a strict client reads."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {expected(key): expected(item) for key, item in value.items()}
    return [expected(item) for item in value] if isinstance(value, list) else value


@pytest.mark.full
@given(value=VALUES)
@settings(max_examples=80, deadline=None)
def test_values_are_written_for_strict_readers(value: Any) -> None:
    written = write_json(value)
    read = json.loads(written.encode(), parse_constant=pytest.fail)
    assert write_json(read) == written


@pytest.mark.full
@given(value=VALUES, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8), is_ascii=st.booleans())
@settings(max_examples=150, deadline=None)
def test_text_becomes_strict_in_any_pieces(value: Any, cuts: list[int], is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii) if is_ascii else write_json(value)
    strict, pieces, at, turn = StrictJsonText(), [], 0, 0
    while at < len(text):
        pieces.append(strict.push(text[at : at + cuts[turn % len(cuts)]]))
        at, turn = at + cuts[turn % len(cuts)], turn + 1
    whole = "".join([*pieces, strict.finish()])
    assert whole == strict_text(text)
    found = json.loads(whole, parse_constant=pytest.fail)
    whole.encode()
    if is_ascii:
        assert _same(found, expected(json.loads(text)))


def _same(found: Any, wanted: Any) -> bool:
    """Equal but for keys that became equal, of which the last one counts."""
    return json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)


@pytest.mark.parametrize(
    ("text", "strict"),
    [
        (r'"\ud83d\ude00 \ude00\ud83d \\ud800 \ud83dA"', r'"\ud83d\ude00 \ufffd\ufffd \\ud800 \ufffdA"'),
        ("[NaN, -Infinity,Infinity , 1e999,-1.5E+400]", "[null, null,null , null,null]"),
        ('{"NaN": 1e-999, "x": "1e999 NaN", "n": 123456789012345678901234567890}',) * 2,
        (r'{"cut": "\ud83d', r'{"cut": "\ufffd'),
        (r'{"cut": "\ud83d\ud', r'{"cut": "\ufffd\ud'),
        ('{"cut": 1e99', '{"cut": 1e99'),
    ],
)
def test_replaced_text(text: str, strict: str) -> None:
    assert strict_text(text) == strict
    one_by_one = StrictJsonText()
    assert "".join([one_by_one.push(letter) for letter in text]) + one_by_one.finish() == strict


@pytest.mark.parametrize("kind", FORMATS, ids=[kind.name for kind in FORMATS])
@pytest.mark.parametrize("is_certain", [False, True])
def test_arguments_of_every_format_are_strict(kind: Any, is_certain: bool) -> None:
    text, wanted = ANSWERS[kind.name]
    for pieces in ([text], list(text), [text[:-60], text[-60:]]):
        reader = kind().reader(TOOLS, is_certain)
        parts: list[Part] = [part for piece in pieces for part in reader.push(piece)]
        found = [part.text for part in merged([*parts, *reader.finish()]) if isinstance(part, Arguments)]
        assert [msgspec.json.decode(arguments.encode()) for arguments in found] == [wanted]
