"""Evaluation of a task file, with a certificate: the same bytes at any batch size, order, cache state and replica.

A task is a file of JSON lines. A line has a `prompt` and either `choices` with the number of the right one as `answer`,
or the `answer` as text, which the generated text has to match:

    exact      the whole text, without space around it         (default)
    contains   the answer occurs in the text
    number     the last number of the text is that of the answer
    begins     the text begins with the answer

Further keys: `id`, `stop`, `max_tokens` (64), `match`. Answers are greedy; choices are ranked by their logprob.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from bifolio.api.llm import LLM
from bifolio.api.outputs import scored_continuation
from bifolio.api.shared_engine import Start
from bifolio.engine.adapters import LoadedAdapter
from bifolio.engine.branches import SCORING
from bifolio.errors import ConfigError, RequestError
from bifolio.model.digests import digest_of_facts
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request

FORMAT = "bifolio-evaluation/1"
MAX_ITEMS = 1_000_000
Match = Literal["exact", "contains", "number", "begins"]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
Certificate = dict[str, Any]


class Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One line of a task."""

    prompt: str
    answer: str | int
    choices: list[str] | None = None
    id: str | int | None = None
    stop: list[str] = []
    max_tokens: int = 64
    match: Match = "exact"


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two evaluations of one task, item by item."""

    both: int
    neither: int
    lost: list[str]  # right in the first alone
    won: list[str]  # right in the second alone
    changed: list[str]  # another answer, right or wrong
    p_value: float  # of the exact test of McNemar


def read_task(path: Path) -> list[Item]:
    """The items of a task file; a line that is no item is refused by its number."""
    items: list[Item] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a task: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                items.append(_checked(msgspec.json.decode(line, type=Item), number))
            except (msgspec.DecodeError, ConfigError) as error:
                raise ConfigError(f"line {number} of {path} is no item: {error}") from error
    names = [str(item.id) for item in items]
    if not items or len(items) > MAX_ITEMS or len(set(names)) != len(names):
        raise ConfigError(f"{path} has {len(items)} items: a task has at least one, and each has an id of its own")
    return items


def evaluate(llm: LLM, items: Sequence[Item], name: str) -> Certificate:
    """Answer all items in one continuous batch, and certify the answers; `llm.lora` is the adapter of all of them."""
    [adapter] = llm.adapters_for(None, 1)
    tokenizer = llm.model.require_tokenizer()
    starts: list[Start] = []
    owners: list[tuple[int, list[int]]] = []  # item, tokens of its choice
    for place, item in enumerate(items):
        prompt = tokenizer.encode(item.prompt)
        for choice in item.choices or [None]:  # type: ignore[list-item]
            tokens = [] if choice is None else tokenizer.encode(choice, add_special_tokens=False)
            starts.append(_start(prompt, tokens, item, adapter))
            owners.append((place, tokens))
    requests = llm.run_requests(starts)
    answers: list[list[Request]] = [[] for _ in items]
    for (place, _), request in zip(owners, requests, strict=True):
        answers[place].append(request)
    results = [_result(item, found) for item, found in zip(items, answers, strict=True)]
    task = sorted((msgspec.to_builtins(item) for item in items), key=lambda item: str(item["id"]))
    return certificate_of(llm, name, digest_of_facts(task), results)


def certificate_of(
    llm: LLM, name: str, task_digest: str, results: list[dict[str, Any]], scores: Mapping[str, Any] | None = None
) -> Certificate:
    """The certificate of these results, which have an id, whether they are correct, an answer and its hash."""
    results = sorted(results, key=lambda result: str(result["id"]))
    correct = sum(result["correct"] for result in results)
    [adapter] = llm.adapters_for(None, 1)
    own = {} if adapter is None else {"adapter": adapter.digest.hex()}
    certificate: Certificate = {
        "format": FORMAT,
        "task": {"name": name, "digest": task_digest, "items": len(results)},
        "model": {**llm.identity, **own},
        "numerics": llm.numerics,
        "score": {"correct": correct, "accuracy": correct / len(results), **(scores or {})},
        "items": results,
    }
    return {**certificate, "digest": digest_of_facts(certificate)}


def read_certificate(path: Path) -> Certificate:
    """A certificate from a file, whose digest is that of its content."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a certificate: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path} is no certificate of the format {FORMAT}: write one with eval --task")
    if digest_of_facts({key: value for key, value in found.items() if key != "digest"}) != found.get("digest"):
        raise ConfigError(f"{path} was changed: its digest is not that of its content")
    return found


def verify(found: Certificate, expected: Certificate) -> None:
    """Raise ConfigError with the first difference between a certificate and that of another run."""
    for part in ("task", "model", "numerics"):
        if found[part] != expected[part]:
            raise ConfigError(f"the certificate has another {part}: {expected[part]}, and this run has {found[part]}")
    for own, theirs in zip(found["items"], expected["items"], strict=True):
        if own != theirs:
            answers = f"{own['answer']!r}, and in the certificate {theirs['answer']!r}"
            raise ConfigError(f"the item {own['id']} has the answer {answers}")


def compare(first: Certificate, second: Certificate) -> Pairing:
    """Pair the items of two evaluations of one task."""
    if first["task"]["digest"] != second["task"]["digest"]:
        raise ConfigError("the certificates are of two tasks: evaluate both models on the same file")
    pairs = list(zip(first["items"], second["items"], strict=True))
    lost = [str(a["id"]) for a, b in pairs if a["correct"] and not b["correct"]]
    won = [str(a["id"]) for a, b in pairs if b["correct"] and not a["correct"]]
    both = sum(a["correct"] and b["correct"] for a, b in pairs)
    changed = [str(a["id"]) for a, b in pairs if a["answer"] != b["answer"]]
    return Pairing(both, len(pairs) - both - len(lost) - len(won), lost, won, changed, _mcnemar(len(lost), len(won)))


# -- items -----------------------------------------------------------------------------------------------------------


def _checked(item: Item, number: int) -> Item:
    if item.choices is not None and not (isinstance(item.answer, int) and 0 <= item.answer < len(item.choices)):
        raise ConfigError("the answer to choices is the number of the right one, from 0 on")
    if item.choices is None and not isinstance(item.answer, str):
        raise ConfigError("an answer without choices is a text")
    if item.match not in get_args(Match) or item.max_tokens < 1:
        raise ConfigError("max_tokens is at least 1")
    return item if item.id is not None else msgspec.structs.replace(item, id=number)


def _start(prompt: list[int], tokens: list[int], item: Item, adapter: LoadedAdapter | None) -> Start:
    if item.choices is not None:
        return scoring(prompt, tokens, adapter)
    params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, stop=tuple(item.stop))
    return lambda engine, name: engine.add_request(name, prompt, params, adapter=adapter)


def scoring(prompt: list[int], tokens: list[int], adapter: LoadedAdapter | None) -> Start:
    """A request for the logprobs of the tokens behind a prompt."""
    return lambda engine, name: engine.add_request(
        name, [*prompt, *tokens], SCORING, score_from=len(prompt) - 1, adapter=adapter
    )


def _result(item: Item, requests: list[Request]) -> dict[str, Any]:
    for request in requests:
        if request.error is not None:
            raise RequestError(f"the item {item.id} cannot be answered: {request.error}")
    if item.choices is not None:
        totals = [scored_continuation(request).total for request in requests]
        best = max(range(len(totals)), key=lambda place: (totals[place], -place))
        bits = [total.hex() for total in totals]
        return {"id": item.id, "correct": best == item.answer, "answer": best, "hash": digest_of_facts(bits)}
    sequence = requests[0].sequences[0]
    text = sequence.text.strip()
    is_right = MATCHES[item.match](text, str(item.answer).strip())
    return {"id": item.id, "correct": is_right, "answer": text, "hash": digest_of_facts(sequence.output_token_ids)}


def _number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda text, answer: text == answer,
    "contains": lambda text, answer: answer in text,
    "number": lambda text, answer: _number(text) is not None and _number(text) == _number(answer),
    "begins": lambda text, answer: text.startswith(answer),
}


def _mcnemar(lost: int, won: int) -> float:
    """The probability of so uneven changes, or more uneven ones, if both models are equally good."""
    count, least = lost + won, min(lost, won)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(least + 1)) / 2**count) if count else 1.0
