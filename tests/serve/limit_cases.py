"""Requests with one field at its limit, made from the schema of the API, and requests that were built to do harm.

Every field of every request type gives at least one case: its largest and smallest values, the longest texts and the
fullest lists that its type allows, within the limit on the bytes of a request. A type without a rule here is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import inspect

from bifolio.measure.soak_bombs import BOMBS
from bifolio.serve.http.bounds import parts
from bifolio.serve.protocols import anthropic_types as a
from bifolio.serve.protocols import ollama_types as o
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols import pooling_types as q
from bifolio.serve.protocols.llama_cpp_types import InfillRequest, LlamaCppRequest
from bifolio.serve.protocols.responses_types import ResponsesRequest

MODEL = ""  # the empty name means the served model
ROOM = 3 << 20  # bytes of one value; a request has 4 MiB
ENDPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {  # path -> type, a small request
    "/v1/completions": (p.CompletionRequest, {"prompt": "Once", "max_tokens": 8}),
    "/v1/chat/completions": (p.ChatRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}),
    "/v1/embeddings": (p.EmbeddingRequest, {"input": "Once"}),
    "/tokenize": (p.TokenizeRequest, {}),
    "/detokenize": (p.DetokenizeRequest, {"tokens": [5]}),
    "/v1/messages": (a.MessagesRequest, {"model": MODEL, "messages": [{"role": "user", "content": "a"}],
                                         "max_tokens": 8}),
    "/v1/messages/count_tokens": (a.CountTokensRequest, {"model": MODEL,
                                                         "messages": [{"role": "user", "content": "a"}]}),
    "/api/generate": (o.GenerateRequest, {"model": MODEL, "prompt": "a", "options": {"num_predict": 8}}),
    "/api/chat": (o.OllamaChatRequest, {"model": MODEL, "messages": [{"role": "user", "content": "a"}],
                                        "options": {"num_predict": 8}}),
    "/api/embed": (o.EmbedRequest, {"model": MODEL, "input": "a"}),
    "/api/embeddings": (o.OldEmbedRequest, {"model": MODEL, "prompt": "a"}),
    "/v1/rerank": (q.RerankRequest, {"query": "a", "documents": ["a"]}),
    "/v2/rerank": (q.RerankRequest, {"query": "a", "documents": ["a"]}),
    "/rerank": (q.RerankRequest, {"query": "a", "texts": ["a"]}),
    "/v1/score": (q.ScoreRequest, {"text_1": "a", "text_2": "a"}),
    "/score": (q.ScoreRequest, {"text_1": "a", "text_2": "a"}),
    "/classify": (q.ClassifyRequest, {"input": "a"}),
    "/pooling": (q.PoolingRequest, {"input": "a"}),
    "/embed": (q.EmbedInputs, {"inputs": "a"}),
    "/predict": (q.PredictInputs, {"inputs": "a"}),
    "/api/show": (o.ShowRequest, {"model": MODEL}),
    "/api/pull": (o.PullRequest, {"model": MODEL}),
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 8}),
    "/completion": (LlamaCppRequest, {"prompt": "a", "n_predict": 8}),
    "/infill": (InfillRequest, {"input_prefix": "a", "input_suffix": "b", "n_predict": 8}),
}  # fmt: skip
HOSTILE: dict[str, list[Any]] = {  # values of fields whose cost is not in their length
    "structured_outputs.regex": ["a{4000}{4000}", "a{1000}{1000}", "(.*a.{12}){8}", "(a|aa)*" * 800, "(a{64}){64}"],
    "structured_outputs.grammar": ["start: " + "(" * 200 + '"a"' + ")" * 200, 'start: ("a" | start start)*'],
    "structured_outputs.json": [{"type": "integer", "multipleOf": 999983}, {"$ref": "#"}],
    "dry_sequence_breakers": [["ab" * 128] * 64],
}
HOARD = {"max_tokens": p.BIG, "ignore_eos": True}
COMBINED: dict[str, tuple[str, dict[str, Any]]] = {  # several fields together
    "every slot": ("/v1/completions", {"prompt": "Once", "n": 16, **HOARD}),
    "every slot, by prompts": ("/v1/completions", {"prompt": ["Once", "The", "A", "In"] * 64, **HOARD}),
    "every slot, by beams": ("/v1/completions", {"prompt": "Once", "n": 8, "beam_search": {"width": 16}, **HOARD}),
    "every slot, chosen late": ("/v1/completions", {"prompt": "Once", "n": 1, "best_of": 16, **HOARD}),
    "long prompts": ("/v1/completions", {"prompt": [[5 + n % 60 for n in range(900)]] * 256, "max_tokens": 16}),
    "scored prompts": ("/v1/completions", {"prompt": ["fox " * 40] * 16, "echo": True, "logprobs": 100}),
    "long embeddings": ("/v1/embeddings", {"input": [[5 + n % 60 for n in range(900)]] * 256}),
    "first in line": ("/v1/completions", {"prompt": ["Once"] * 64, "priority": -1000, "max_tokens": 200}),
}


@dataclass(frozen=True)
class Case:
    """One request."""

    name: str
    path: str
    body: Callable[[], dict[str, Any]]

    def content(self) -> bytes:
        return json.dumps(self.body()).encode()


def field_cases() -> list[Case]:
    """Every field of every request at its limits."""
    cases = []
    for path, (kind, base) in ENDPOINTS.items():
        for name, fields in values_at_limits(inspect.type_info(kind)):
            cases.append(Case(f"{path} {name}", path, lambda fields=fields, base=base: _merged(base, fields())))
        for name, values in HOSTILE.items() if path == "/v1/completions" else ():
            for number, value in enumerate(values):
                fields = _nested(name.split("."), value)
                cases.append(Case(f"{path} {name} hostile {number}", path, lambda f=fields, b=base: _merged(b, f)))
    return cases


def bomb_cases() -> list[Case]:
    """The requests of the soak test, and combinations of fields that take every slot."""
    cases = [Case(f"bomb {bomb.name}", bomb.path, bomb.body) for bomb in BOMBS]
    return cases + [Case(f"combined {name}", path, lambda body=body: body) for name, (path, body) in COMBINED.items()]


def _merged(base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """A small request with some fields set; `options` keep the others of the small request, such as its length."""
    nested = [name for name, value in base.items() if isinstance(value, dict) and isinstance(fields.get(name), dict)]
    return {**base, **fields, **{name: {**base[name], **fields[name]} for name in nested}}


def _nested(names: list[str], value: Any) -> dict[str, Any]:
    return {names[0]: value if len(names) == 1 else _nested(names[1:], value)}


Fields = Callable[[], dict[str, Any]]  # made when it is sent: a value has megabytes


def values_at_limits(struct: Any) -> Iterator[tuple[str, Fields]]:
    """(path of the field, a part of the request that sets it) for every field below a struct."""
    for field in struct.fields:
        name = field.encode_name
        for part in parts(field.type):
            inner = part.type if isinstance(part, inspect.Metadata) else part
            items = list(parts(inner.item_type)) if isinstance(inner, inspect.ListType) else []
            if isinstance(inner, inspect.StructType):
                for below, fields in values_at_limits(inner):
                    yield f"{name}.{below}", lambda f=fields, s=inner, n=name: {n: {**smallest(s), **f()}}
            elif any(isinstance(item, inspect.StructType) for item in items):
                for item in items:
                    yield name, lambda t=inner, i=item, n=name: {n: _full_list(t, i)}
                for item in (item for item in items if isinstance(item, inspect.StructType)):
                    for below, fields in values_at_limits(item):
                        yield f"{name}[].{below}", lambda f=fields, s=item, n=name: {n: [{**smallest(s), **f()}]}
            else:
                for make in limits(part):
                    yield name, lambda m=make, n=name: {n: m()}


def limits(described: Any) -> list[Callable[[], Any]]:
    """The values at the limits of a type, each made by a call."""
    if isinstance(described, inspect.Metadata):
        if "max_bytes" in (described.extra or {}):
            most = (described.extra or {})["max_bytes"]
            return [lambda: _wide(most), lambda: _deep(most)]
        return limits(described.type)
    if isinstance(described, inspect.NoneType):
        return []
    if isinstance(described, inspect.BoolType):
        return [lambda: True]
    if isinstance(described, inspect.LiteralType):
        return [lambda value=value: value for value in described.values]
    if isinstance(described, inspect.IntType | inspect.FloatType):
        low = described.ge if described.ge is not None else described.gt + 1e-6
        return [lambda: low, lambda: described.le]
    if isinstance(described, inspect.StrType):
        return [
            lambda: "a" * min(described.max_length, ROOM),
            lambda: ("a1, \u00e9" * ROOM)[: described.max_length // 8],
        ]
    if isinstance(described, inspect.ListType):
        found = [lambda item=item: _full_list(described, item) for item in parts(described.item_type)]
        return found + [lambda make=make: [make()] for item in parts(described.item_type) for make in limits(item)]
    if isinstance(described, inspect.DictType):
        return [lambda: {str(n): smallest(described.value_type) for n in range(described.max_length)}]
    raise TypeError(f"no rule for the limits of {type(described).__name__}")


def smallest(described: Any) -> Any:
    """A small valid value; of a struct, its required fields."""
    if isinstance(described, inspect.Metadata):
        return smallest(described.type)
    if isinstance(described, inspect.UnionType):
        return smallest(next(iter(parts(described))))
    if isinstance(described, inspect.StructType):
        return {field.encode_name: smallest(field.type) for field in described.fields if field.required}
    if isinstance(described, inspect.StrType):
        return "a"
    if isinstance(described, inspect.LiteralType):
        return described.values[0]
    if isinstance(described, inspect.IntType | inspect.FloatType):
        return 5 if described.ge is None or described.ge <= 5 else described.ge
    if isinstance(described, inspect.ListType):
        return [smallest(described.item_type)] * max(described.min_length or 0, 1)
    if isinstance(described, inspect.DictType):
        return {}
    raise TypeError(f"no rule for a small {type(described).__name__}")


def _full_list(described: Any, item: Any) -> list[Any]:
    """As many small items as the type and the size of a request allow."""
    one = smallest(item)
    return [one] * min(described.max_length, ROOM // (len(json.dumps(one)) + 2))


def _wide(most: int) -> dict[str, Any]:
    return {f"k{number}": {} for number in range(min(60, most // 16))} | {"type": "object", "x": "a" * (most - 2000)}


def _deep(most: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(min(most // 8, 400)):
        value = {"not": value}
    return value
