"""Every field of every request has a bound on its number and its size, declared in its type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from bifolio.serve.http.errors import ApiError
from bifolio.serve.http.exchange import decode
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.views.openapi import OPERATIONS, PROTOCOL_OPERATIONS

REQUESTS = [row[3] for row in (*OPERATIONS, *PROTOCOL_OPERATIONS) if row[3] is not None]


def unbounded(described: Any, path: str) -> Iterator[str]:
    """The paths of the values below a type whose size a client decides."""
    if isinstance(described, inspect.UnionType):
        for item in described.types:
            yield from unbounded(item, path)
    elif isinstance(described, inspect.StructType):
        for field in described.fields:
            yield from unbounded(field.type, f"{path}.{field.name}")
    elif isinstance(described, inspect.Metadata):
        inner = described.type
        if isinstance(inner, inspect.DictType) and inner.max_length and "max_bytes" in (described.extra or {}):
            return
        yield from unbounded(inner, path)
    elif isinstance(described, inspect.ListType):
        if described.max_length is None:
            yield path
        yield from unbounded(described.item_type, path + "[]")
    elif isinstance(described, inspect.DictType):
        if described.max_length is None:
            yield path
        yield from unbounded(described.key_type, path + "{}")
        yield from unbounded(described.value_type, path + "{}")
    elif isinstance(described, inspect.StrType):
        if described.max_length is None:
            yield path
    elif isinstance(described, inspect.IntType | inspect.FloatType):
        if (described.ge is None and described.gt is None) or (described.le is None and described.lt is None):
            yield path
    elif not isinstance(described, inspect.BoolType | inspect.NoneType | inspect.LiteralType):
        yield f"{path}: {type(described).__name__}"


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_field_is_bounded(kind: type[msgspec.Struct]) -> None:
    assert list(unbounded(inspect.type_info(kind), kind.__name__)) == []


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"bad_words": ["a" * 4_000_000]}, "bad_words"),
        ({"dry_sequence_breakers": ["a" * 300]}, "dry_sequence_breakers"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias"),
        ({"metadata": {"a": "b" * 70_000}}, "metadata"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "b" * 70_000}}}}, "schema"),
        ({"tempurature": 1}, "tempurature"),
    ],
)
def test_a_field_beyond_its_bound_is_refused_by_name(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(json.dumps({"prompt": "a", **extra}).encode(), p.CompletionRequest)
    assert caught.value.status == 400
    assert param in (caught.value.param or "")
