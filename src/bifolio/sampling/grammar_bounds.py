"""Bounds on the text of a grammar: size, depth and repetition, checked before a compiler sees it."""

from __future__ import annotations

import json
import re
from typing import Any

from bifolio.errors import GrammarError
from bifolio.text.structural_tags import read_structural_tags

MAX_TEXT_CHARS = {"json_schema": 64 << 10, "regex": 8 << 10, "choice": 64 << 10, "lark": 32 << 10, "tools": 128 << 10,
                  "structural_tag": 128 << 10}  # fmt: skip
MAX_DEPTH = 48  # of a schema's nesting, or of a regular expression's brackets
MAX_PATTERNS = 256  # of a schema's strings with a pattern or format: each is an automaton of its own
MAX_REPEATS = 4096  # of one part of a regular expression: `(a{64}){64}` repeats it 4,096 times
_REPEAT = re.compile(r"\{(\d+)?(?:,(\d*))?\}")


def check_text(kind: str, name: str, text: str) -> None:
    """Refuse a grammar by its text alone; `name` is the kind in messages."""
    most = MAX_TEXT_CHARS[kind]
    if len(text) > most:
        raise GrammarError(f"the {name} has {len(text)} characters: shorten it to at most {most}")
    if kind in ("json_schema", "choice", "tools", "structural_tag"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the {name} is not valid JSON: {error}") from error
        if kind == "choice":
            _check_choices(value)
        else:
            _check_schema(_schemas(kind, value))
    elif kind == "regex":
        check_pattern(text)


def check_pattern(pattern: str) -> None:
    """Refuse a regular expression whose automaton would be large: nested deeply, or repeated often."""
    if _bracket_depth(pattern) > MAX_DEPTH:
        raise GrammarError(f"the regular expression is nested more than {MAX_DEPTH} deep: simplify it")
    if _repeats(pattern) > MAX_REPEATS:
        raise GrammarError(f"the regular expression repeats a part more than {MAX_REPEATS} times: allow fewer")


def _check_choices(value: Any) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise GrammarError("a choice is a list of texts, at least one")


def _schemas(kind: str, value: Any) -> Any:
    """The schemas of a grammar, as one value."""
    if kind == "structural_tag":
        return read_structural_tags(value).schemas
    return value["schemas"] if kind == "tools" else value


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict | bool | list):
        raise GrammarError("a JSON schema is an object, true or false")
    num_patterns = 0
    level = [schema]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                num_patterns += "pattern" in value or "format" in value
                if isinstance(value.get("pattern"), str):
                    check_pattern(value["pattern"])
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
        if num_patterns > MAX_PATTERNS:
            raise GrammarError(f"the JSON schema has more than {MAX_PATTERNS} patterns and formats: leave some out")
        level = below
    if level:
        raise GrammarError(f"the JSON schema is nested more than {MAX_DEPTH} deep: flatten it")


def _bracket_depth(pattern: str) -> int:
    depth = deepest = 0
    for character in pattern:
        depth += (character in "([") - (character in ")]")
        deepest = max(deepest, depth)
    return deepest


def _repeats(pattern: str) -> int:
    """The largest product of the counts of nested or adjoining repetitions."""
    inner = [1]  # the largest product inside each open bracket
    last = 1  # of the part before this position
    position = 0
    while position < len(pattern):
        match = _REPEAT.match(pattern, position)
        if match is not None and (match[1] or match[2]):
            counts = [count for count in match.groups() if count]
            last *= max(int(count) if len(count) < 10 else MAX_REPEATS + 1 for count in counts)
            inner[-1] = max(inner[-1], last)
            position = match.end()
            continue
        letter = pattern[position]
        if letter == "(":
            inner.append(1)
        elif letter == ")" and len(inner) > 1:
            last = inner.pop()
            inner[-1] = max(inner[-1], last)
        else:
            last = 1
        position += 2 if letter == "\\" else 1
    return max(inner)
