"""Request traces of production services: arrival times, lengths, and common prefixes.

    Azure      CSV    TIMESTAMP,ContextTokens,GeneratedTokens
    Mooncake   JSONL  {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}

A Mooncake hash id identifies 512 tokens of a prompt and all tokens before them: equal ids are equal prefixes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np

from bifolio.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens per hash id


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace, by its lengths; its text is not known."""

    arrival: float  # seconds after the first request
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...] = ()  # of consecutive parts of the prompt; empty: no shared prefix
    tokens_per_hash: int = MOONCAKE_BLOCK


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a file, in order of arrival; times are relative to the first."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: pass an Azure .csv or a Mooncake .jsonl trace")
    read = _read_azure if path.suffix.lower() == ".csv" else _read_mooncake
    try:
        requests = list(islice(read(path), limit))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is neither an Azure trace (CSV with TIMESTAMP,ContextTokens,GeneratedTokens) nor a Mooncake one "
            f"(JSON lines with timestamp, input_length, output_length, hash_ids): {error!r}"
        ) from error
    if not requests:
        raise ConfigError(f"{path} holds no requests")
    first = min(request.arrival for request in requests)
    return sorted((replace(r, arrival=r.arrival - first) for r in requests), key=lambda r: r.arrival)


def _read_azure(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            moment = datetime.fromisoformat(
                row["TIMESTAMP"][:26]
            )  # `fromisoformat` accepts at most six digits of a second
            yield TraceRequest(moment.timestamp(), _count(row["ContextTokens"]), _count(row["GeneratedTokens"]))


def _read_mooncake(path: Path) -> Iterator[TraceRequest]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.strip():
                continue
            entry = json.loads(line)
            yield TraceRequest(
                float(entry["timestamp"]) / 1e3,
                _count(entry["input_length"]),
                _count(entry["output_length"]),
                tuple(int(number) for number in entry["hash_ids"]),
            )


def _count(value: str | int) -> int:
    number = int(value)
    if number < 0:
        raise ValueError(f"{number} is not a number of tokens")
    return number


def scaled(requests: Sequence[TraceRequest], scale: float, max_model_len: int) -> tuple[list[TraceRequest], int]:
    """Lengths times `scale`, at least one token each; and the number of requests cut to fit into `max_model_len`."""
    if not scale > 0:
        raise ConfigError(f"the scale of lengths must be above 0, not {scale:g}")
    results, num_cut = [], 0
    for request in requests:
        num_output = min(max(round(request.num_output * scale), 1), max_model_len - 1)
        wanted = max(round(request.num_prompt * scale), 1)
        num_prompt = min(wanted, max_model_len - num_output)
        num_cut += num_prompt < wanted
        per_hash = max(round(request.tokens_per_hash * scale), 1)
        results.append(replace(request, num_prompt=num_prompt, num_output=num_output, tokens_per_hash=per_hash))
    return results, num_cut


def longest(requests: Sequence[TraceRequest], scale: float) -> int:
    """Tokens of the longest request, prompt and output, after scaling."""
    return max(max(round(r.num_prompt * scale), 1) + max(round(r.num_output * scale), 1) for r in requests)


def make_prompts(requests: Sequence[TraceRequest], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens with the given lengths; parts with equal hash ids have equal tokens."""
    return [_prompt(request, index, vocab_size, seed) for index, request in enumerate(requests)]


def _prompt(request: TraceRequest, index: int, vocab_size: int, seed: int) -> list[int]:
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        if len(tokens) >= request.num_prompt:
            break
        generator = np.random.default_rng((seed, 1, hash_id))
        tokens.extend(generator.integers(0, vocab_size, request.tokens_per_hash).tolist())
    rest = request.num_prompt - len(tokens)
    if rest > 0:
        tokens.extend(np.random.default_rng((seed, 2, index)).integers(0, vocab_size, rest).tolist())
    return tokens[: request.num_prompt]
