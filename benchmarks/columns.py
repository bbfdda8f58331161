"""Columns of a table: an engine, options of it, and variables of its environment.

    bifolio                                    default options
    bifolio[kv_cache_dtype=q8_0]               an option of `LLM`
    bifolio[BIFOLIO_ISA=avx2]                  a variable of the environment, in capital letters
    bifolio-http[front_ends=2]                 an option of `bifolio serve`
    llama.cpp[flash_attn=true]                 an option of that engine

This module is imported in the processes of other engines: it needs the standard library alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

PATTERN = re.compile(r"(?P<engine>[\w.-]+)(?:\[(?P<options>[^\]]*)\])?")


class ColumnError(ValueError):
    """A column that cannot be read."""


@dataclass(frozen=True)
class Column:
    """One engine with its settings; equal names are equal columns."""

    name: str
    engine: str = field(compare=False)
    options: dict[str, Any] = field(compare=False, default_factory=dict)
    environment: dict[str, str] = field(compare=False, default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Column:
        found = PATTERN.fullmatch(text.strip())
        if found is None:
            raise ColumnError(f"{text!r} is no column: write an engine, or engine[option=value,...]")
        options: dict[str, Any] = {}
        environment: dict[str, str] = {}
        for part in filter(None, (found["options"] or "").split(",")):
            key, equals, value = part.partition("=")
            if not equals or not key.strip():
                raise ColumnError(f"{part!r} in {text!r} is no option: write option=value")
            if key.strip().isupper():
                environment[key.strip()] = value.strip()
            else:
                options[key.strip()] = read_value(value.strip())
        return cls(text.strip(), found["engine"], options, environment)


def read_value(text: str) -> Any:
    """A number, true, false or null as in JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_columns(text: str) -> tuple[Column, ...]:
    """Columns separated by commas that lie outside brackets."""
    parts = re.split(r",(?![^\[]*\])", text)
    return tuple(Column.parse(part) for part in parts if part.strip())
