"""Fields of requests that are accepted and ignored, with the reason: the tables of all protocols together.

A test sends every field of every request and fails for one that changes nothing and is not listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bifolio.serve.protocols import (
    anthropic_types,
    llama_cpp_types,
    ollama_types,
    openai_types,
    pooling_types,
    responses_types,
)

TABLES: dict[str, openai_types.Ignored] = {  # by the name of the protocol
    "OpenAI": openai_types.IGNORED,
    "OpenAI's Responses": responses_types.IGNORED,
    "Anthropic": anthropic_types.IGNORED,
    "ollama": ollama_types.IGNORED,
    "llama.cpp": llama_cpp_types.IGNORED,
    "rerankers and classifiers": pooling_types.IGNORED,
}


REQUEST_NAMES = ("Request", "Generation", "Conversation", "OllamaBase")  # fields of these are at the top of a body


def reason_for(owners: Sequence[tuple[type[msgspec.Struct], str]]) -> str | None:
    """Why a field is ignored; None if it is not. `owners`: (struct, field) from the request down to the field."""
    for start in range(len(owners)):
        below = [name for _, name in owners[start:]]
        paths = [".".join(below[:end]) for end in range(1, len(below) + 1)]
        for kind in owners[start][0].__mro__:
            for table in TABLES.values():
                reason = next((table[kind][path] for path in paths if path in table.get(kind, ())), None)
                if reason is not None:
                    return reason
    return None


def ignored_rows() -> list[tuple[str, str, str]]:
    """(protocol, field, reason) of all tables, for the documents; fields below a struct have its name before them."""
    rows = []
    for protocol_name, table in TABLES.items():
        for kind, reasons in table.items():
            prefix = "" if kind.__name__.endswith(REQUEST_NAMES) else f"{kind.__name__}."
            rows += [(protocol_name, prefix + name, reason) for name, reason in reasons.items()]
    return rows


def describe(schemas: dict[str, Any]) -> None:
    """Add the reasons to the schemas of an OpenAPI document."""
    for table in TABLES.values():
        for kind, reasons in table.items():
            for schema in (schemas[name] for name in _names_below(kind) if name in schemas):
                for name, reason in reasons.items():
                    if name in schema.get("properties", {}):
                        schema["properties"][name]["description"] = f"Ignored: {reason}."


def _names_below(kind: type[openai_types.Strict]) -> list[str]:
    """The names of a struct and of those derived from it."""
    children: list[type[openai_types.Strict]] = kind.__subclasses__()
    return [kind.__name__, *(name for child in children for name in _names_below(child))]
