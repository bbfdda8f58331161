"""Receipts: an answer with all that decides on it, so that another engine can give it again, bit for bit.

A receipt is JSON: the request with its resolved parameters and seed, the tokens of the answer, a digest of the model
and the facts of the arithmetic (`model.digests`), and a digest of all this. An adapter and images are in it by their
digests. `measure.replay` runs it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bifolio.adapter_salt import digest_of_adapter
from bifolio.api.outputs import returned_sequences
from bifolio.beam_params import BeamSearchParams
from bifolio.errors import ConfigError, RequestError
from bifolio.model.digests import digest_of_facts
from bifolio.sampling.grammar import CompiledGrammar, Grammar
from bifolio.sampling.thinking import AfterThinking
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request

FORMAT = "bifolio-receipt/1"
KEYS = ("format", "request", "answer", "model", "numerics", "digest")
MAX_BYTES = 64 << 20
SEPARATE = frozenset(("seed", "max_tokens", "grammar", "structured_outputs", "guided_decoding", "output_kind"))
Receipt = dict[str, Any]


def receipt_of(request: Request, model: Mapping[str, Any], numerics: Mapping[str, Any]) -> Receipt:
    """The receipt of a finished request; `model` and `numerics` are those of its engine."""
    if request.error is not None or not request.is_finished:
        raise RequestError(f"only a finished answer has a receipt: {request.error or 'the request still runs'}")
    receipt: Receipt = {
        "format": FORMAT,
        "request": request_facts(request),
        "answer": [_completion(request, sequence) for sequence in returned_sequences(request)],
        "model": dict(model),
        "numerics": dict(numerics),
    }
    return {**receipt, "digest": digest_of_facts(receipt)}


def request_facts(request: Request) -> dict[str, Any]:
    """A request with everything resolved: a random seed, limits, and texts as tokens."""
    params: SamplingParams | BeamSearchParams = request.params if request.search is None else request.search.params
    if request.params.logits_processors:
        raise RequestError("logits_processors are Python functions, which a receipt cannot hold: leave one out")
    given = request.num_given
    known = request.sequences[0].output_token_ids[:given]
    facts: dict[str, Any] = {
        "prompt_token_ids": [*request.prompt_token_ids, *known],
        "num_given": given,
        "is_beam_search": request.search is not None,
        "params": _changed(params),
        "grammar": _grammar_facts(request.params.grammar),
        "seed": request.seed,
        "max_tokens": request.max_tokens - given,
    }
    if request.adapter is not None:
        facts["adapter"] = digest_of_adapter(request.adapter).hex()
    if request.images:
        facts["images"] = [image.digest.hex() for image in request.images]
    return facts


def write_receipt(folder: Path, name: str, receipt: Receipt) -> Path:
    """Write `NAME.json` into a folder, whole or not at all; an existing file is replaced."""
    path = folder / f"{name}.json"
    new = folder / f".{name}.{os.getpid()}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(receipt) + "\n", encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"the receipt {path} cannot be written: {error}") from error
    return path


def read_receipt(path: Path) -> Receipt:
    """A receipt from a file, or the one that an answer of the server carries; checked."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MB: it is no receipt")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a receipt: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("receipt"), dict):
        found = found["receipt"]
    return checked_receipt(found, str(path))


def checked_receipt(found: Any, name: str = "the receipt") -> Receipt:
    """A receipt whose digest is that of its content."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{name} is no receipt of the format {FORMAT}: pass the JSON of `receipt`")
    missing = [key for key in KEYS if key not in found]
    if missing:
        raise ConfigError(f"{name} lacks {', '.join(missing)}: pass the whole receipt")
    content = {key: value for key, value in found.items() if key != "digest"}
    if digest_of_facts(content) != found["digest"]:
        raise ConfigError(f"{name} was changed: its digest is not that of its content")
    return found


def params_of(facts: Mapping[str, Any], vocab_size: int) -> SamplingParams | BeamSearchParams:
    """The parameters of a request from its facts."""
    values = dict(facts["params"])
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    for name in ("output_kind", "logits_processors"):
        values.pop(name, None)
    try:
        if facts["is_beam_search"]:
            return BeamSearchParams(**{**values, "max_tokens": facts["max_tokens"]})
        grammar = _grammar_from(facts["grammar"], vocab_size)
        return SamplingParams(
            **{**values, "seed": facts["seed"], "max_tokens": facts["max_tokens"], "grammar": grammar}
        )
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"the receipt has parameters that this version does not know: {error}") from error


def _completion(request: Request, sequence: Any) -> dict[str, Any]:
    records = sequence.logprobs.packed(request.num_given) if request.params.logprobs is not None else b""
    return {
        "token_ids": sequence.new_token_ids,
        "finish_reason": None if sequence.finish_reason is None else sequence.finish_reason.value,
        "stop_reason": sequence.stop_reason,
        "logprobs": blake2b(records, digest_size=16).hexdigest() if records else None,
    }


def _changed(params: SamplingParams | BeamSearchParams) -> dict[str, Any]:
    """The fields that differ from their defaults, as JSON has them."""
    found: dict[str, Any] = {}
    for field in (one for one in fields(params) if one.init):
        value = getattr(params, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in SEPARATE and value != default:
            is_mapping = isinstance(value, Mapping)
            found[field.name] = {str(key): one for key, one in value.items()} if is_mapping else value
    listed: dict[str, Any] = json.loads(json.dumps(found))
    return listed


def _grammar_facts(grammar: object | None) -> dict[str, Any] | None:
    if grammar is None:
        return None
    if isinstance(grammar, CompiledGrammar):
        return {"kind": grammar.grammar.kind, "text": grammar.grammar.text}
    if isinstance(grammar, Grammar):
        return {"kind": grammar.kind, "text": grammar.text}
    if isinstance(grammar, AfterThinking):
        return {
            "opening": list(grammar.opening), "closing": list(grammar.closing), "forced": list(grammar.forced),
            "budget": grammar.budget, "grammar": _grammar_facts(grammar.grammar),
        }  # fmt: skip
    raise RequestError(f"a receipt cannot hold a grammar of the type {type(grammar).__name__}: leave one out")


def _grammar_from(facts: Mapping[str, Any] | None, vocab_size: int) -> Any:
    """A grammar from its facts; behind reasoning it is compiled with the request."""
    if facts is None:
        return None
    if "kind" in facts:
        return Grammar(facts["kind"], facts["text"])
    opening, closing, forced = (tuple(facts[name]) for name in ("opening", "closing", "forced"))
    inner = _grammar_from(facts["grammar"], vocab_size)
    return AfterThinking(vocab_size, opening, closing, forced, facts["budget"], inner)
