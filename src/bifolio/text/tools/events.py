"""The parts of an answer: reasoning, text for the user, and calls of tools.

An answer is a list of events in the order of the text. A call is one `Call` and any number of `Arguments` after it,
whose texts concatenate to one JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol


class Reasoning(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Call(NamedTuple):
    """A call begins."""

    name: str


class Arguments(NamedTuple):
    """JSON text that continues the arguments of the last call."""

    text: str


Part = Reasoning | Content | Call | Arguments


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that a request offers."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema
    is_strict: bool = False  # arguments must follow the schema


Tools = Mapping[str, ToolSpec]


class AnswerReader(Protocol):
    """Reads an answer that arrives in pieces; the parts do not depend on where the text is cut."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after this text."""

    def finish(self) -> list[Part]:
        """Return the remaining parts: no further text follows."""


class OneCall:
    """An answer of which one call is taken: later calls are left out, text and reasoning stay."""

    def __init__(self, inner: AnswerReader) -> None:
        self._inner = inner
        self._num_calls = 0

    def push(self, text: str) -> list[Part]:
        return self._taken(self._inner.push(text))

    def finish(self) -> list[Part]:
        return self._taken(self._inner.finish())

    def _taken(self, parts: Sequence[Part]) -> list[Part]:
        taken: list[Part] = []
        for part in parts:
            self._num_calls += isinstance(part, Call)
            if self._num_calls < 2 or not isinstance(part, Call | Arguments):
                taken.append(part)
        return taken


def merged(parts: Sequence[Part]) -> list[Part]:
    """Join neighbours of one kind, so that answers that were cut differently compare equal."""
    result: list[Part] = []
    texts = [part for part in parts if isinstance(part, Call) or part.text]
    for kind, group in groupby(texts, type):
        if kind is Call:
            result += group
        else:
            result.append(kind("".join([part[0] for part in group])))
    return result
