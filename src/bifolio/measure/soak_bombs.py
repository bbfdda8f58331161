"""Requests that were built to do harm, for the soak test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bomb:
    """One hostile request."""

    name: str
    body: Callable[[], dict[str, Any]]
    path: str = "/v1/completions"
    leaves_after: float | None = None  # seconds: the client reads nothing and closes the connection


def _completion(**fields: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"prompt": "Once", "max_tokens": 8, **fields}


def _grammar(**constraint: Any) -> Callable[[], dict[str, Any]]:
    return _completion(structured_outputs=constraint)


LONG = {"max_tokens": 200, "ignore_eos": True}
BOMBS = (
    Bomb("nested repetition", _grammar(regex="a{4000}{4000}")),
    Bomb("slow masks", _grammar(regex="(a{64}){64}")),
    Bomb("ambiguous pattern", _grammar(regex="(.*a.{12}){8}")),
    Bomb("large multiple", _grammar(json={"type": "integer", "multipleOf": 999983})),
    Bomb("wide schema", _grammar(json={"type": "object", "properties": {str(n): {} for n in range(200)}})),
    Bomb("bad words", _completion(bad_words=[f"{n}" * 64 for n in range(256)])),
    Bomb("huge bad word", lambda: {"prompt": "a", "bad_words": ["a" * 3_000_000]}),
    Bomb("breakers", _completion(dry_multiplier=1.0, dry_sequence_breakers=["ab" * 128] * 64)),
    Bomb("long prompt", lambda: {"prompt": "a b " * 500_000}),
    Bomb("many prompts", lambda: {"prompt": ["The fox " * 100] * 64, "max_tokens": 2}),
    Bomb("logprobs", _completion(prompt=["Once upon a time"] * 8, echo=True, logprobs=100, max_tokens=16)),
    Bomb("beams", _completion(beam_search={"width": 8}, max_tokens=24)),
    Bomb("samples", _completion(n=8, best_of=8, max_tokens=24)),
    Bomb("priority", _completion(priority=-1000)),
    Bomb("tokenize", lambda: {"prompt": "once upon " * 60_000}, "/tokenize"),
    Bomb("detokenize", lambda: {"tokens": [5] * (1 << 17)}, "/detokenize"),
    Bomb("embeddings", lambda: {"input": ["The fox " * 50] * 16}, "/v1/embeddings"),
    Bomb("long chat", lambda: {"messages": [{"role": "user", "content": "a b " * 200_000}]}, "/v1/chat/completions"),
    Bomb("slow client", _completion(stream=True, n=8, logprobs=20, **LONG), leaves_after=2.0),
    Bomb("client that leaves", _completion(stream=True, **LONG), leaves_after=0.05),
    Bomb("unfinished request", lambda: {"prompt": "a" * 100_000}, leaves_after=0.0),
)  # fmt: skip
