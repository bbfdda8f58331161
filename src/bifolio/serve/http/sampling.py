"""From the fields of an HTTP request to the parameters of the engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from bifolio.errors import RequestError
from bifolio.sampling_params import SamplingParams, merge_defaults
from bifolio.serve.http.errors import bad_request
from bifolio.serve.protocols.openai_types import BeamSearch, Generation, ResponseFormat, StructuredOutputs

if TYPE_CHECKING:
    from bifolio.serve.http.context import ServerContext

SAME_NAME = (
    "temperature", "top_p", "frequency_penalty", "presence_penalty", "stop", "seed", "top_k", "min_p", "typical_p",
    "repetition_penalty", "no_repeat_ngram_size", "dry_multiplier", "dry_base", "dry_allowed_length",
    "dry_sequence_breakers", "dry_range", "xtc_probability", "xtc_threshold", "bad_words", "allowed_token_ids",
    "min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "logit_bias",
)  # fmt: skip
BEAM_FIELDS = frozenset(
    ("max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logprobs",
     "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "logit_bias", "bad_words",
     "allowed_token_ids", "skip_special_tokens")
)  # fmt: skip
SHOWN_DEFAULTS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "no_repeat_ngram_size", "dry_multiplier", "dry_base", "dry_allowed_length", "xtc_probability",
    "xtc_threshold", "min_tokens",
)  # fmt: skip
JSON_OBJECT_SCHEMA = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class EngineParams:
    """Parameters as they are sent to the engine, checked here so that a mistake is answered at once."""

    values: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams or BeamSearchParams
    grammar: tuple[str, str] | None = None  # (kind, text)
    is_beam_search: bool = False
    drop_output: bool = False  # max_tokens was 0: only the prompt is wanted


def engine_params(
    request: Generation, defaults: dict[str, Any], *, max_tokens: int | None, **more: Any
) -> EngineParams:
    """`defaults` are the model's own; `more` are fields that only one kind of request has."""
    given = {name: getattr(request, name) for name in SAME_NAME}
    explicit = {name: value for name, value in {**given, **more}.items() if value is not None}
    if explicit.get("top_p") == 0.0:
        explicit["top_p"] = 1e-9  # the most likely token alone
    if explicit.get("allowed_token_ids") == []:
        raise bad_request(
            "allowed_token_ids is empty, so no token could be sampled: list token ids, or leave it out",
            "allowed_token_ids",
        )
    if "allowed_token_ids" in explicit:
        explicit["allowed_token_ids"] = sorted(set(explicit["allowed_token_ids"]))
    grammar = wanted_grammar(request.response_format, request.structured_outputs)
    drop_output = max_tokens == 0
    limit = 1 if drop_output else max_tokens
    if request.beam_search is not None:
        values = _beam_values(request.beam_search, request, explicit, limit)
    else:
        values = {**merge_defaults(defaults, **explicit), "n": request.n, "max_tokens": limit}
    _check(values, request.beam_search is not None)
    return EngineParams(values, grammar, request.beam_search is not None, drop_output)


def ending_at(params: EngineParams, token_ids: Sequence[int]) -> EngineParams:
    """The same with further tokens that end the output, unless it ignores the end of the text."""
    if params.values.get("ignore_eos"):
        return params
    ends = list(dict.fromkeys([*params.values.get("stop_token_ids", ()), *token_ids]))
    return dataclasses.replace(params, values={**params.values, "stop_token_ids": ends})


def request_defaults(defaults: dict[str, Any]) -> dict[str, float]:
    """The sampling values of a request that sets none, by the names of the API; `defaults` are the model's."""
    params = SamplingParams(**merge_defaults(defaults))
    return {name: getattr(params, name) for name in SHOWN_DEFAULTS}


def _beam_values(beams: BeamSearch, request: Generation, explicit: dict[str, Any], limit: int | None) -> dict[str, Any]:
    for name in explicit:
        if name not in BEAM_FIELDS:
            raise bad_request(f"{name} has no meaning in a beam search: leave it out", name)
    if request.n > beams.width:
        raise bad_request(f"n={request.n} texts cannot come from {beams.width} beams: raise beam_search.width", "n")
    return {
        **explicit,
        "max_tokens": limit,
        "beam_width": beams.width,
        "num_return_sequences": request.n,
        "length_penalty": beams.length_penalty,
        "early_stopping": beams.early_stopping,
        "num_groups": beams.num_groups,
        "diversity_penalty": beams.diversity_penalty,
    }


async def resolve_strings(context: ServerContext, params: EngineParams) -> EngineParams:
    """The same with the texts of `bad_words` and `dry_sequence_breakers` as token ids: the engine tokenises nothing."""
    words, breakers = params.values.get("bad_words"), params.values.get("dry_sequence_breakers")
    vocab = context.model.config.vocab_size
    if len(params.values.get("allowed_token_ids") or ()) > vocab:
        raise bad_request(f"token ids lie between 0 and {vocab - 1}", "allowed_token_ids", "invalid_token_id")
    if not words and not breakers:
        return params
    tokenizer = context.tokenizers.tokenizer
    given = SamplingParams(bad_words=words or (), dry_sequence_breakers=breakers or (), dry_multiplier=1.0)
    size = 2 * sum(map(len, [*(words or ()), *(breakers or ())]))
    resolved = await context.tokenizers.run(
        lambda: given.resolve_strings(lambda text: tokenizer.encode(text, add_special_tokens=False)), size
    )
    values = {**params.values, "bad_words": []}
    if words:
        values["bad_words_token_ids"] = [*values.get("bad_words_token_ids", ()), *resolved.bad_words_token_ids]
    if breakers:
        values["dry_sequence_breakers"] = list(resolved.dry_sequence_breakers)
    return dataclasses.replace(params, values={name: value for name, value in values.items() if value != []})


def _check(values: dict[str, Any], is_beam_search: bool) -> None:
    try:
        if is_beam_search:
            from bifolio.beam_params import BeamSearchParams

            BeamSearchParams(**values)
        else:
            SamplingParams(**values)
    except RequestError as error:
        raise bad_request(str(error)) from error


def wanted_grammar(form: ResponseFormat | None, outputs: StructuredOutputs | None) -> tuple[str, str] | None:
    """(kind, text) of the constraint, if any; two at once are refused."""
    found: list[tuple[str, str]] = []
    if form is not None and form.type == "json_object":
        found.append(("json_schema", JSON_OBJECT_SCHEMA))
    if form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema is None:
            raise bad_request("response_format needs json_schema.schema", "response_format")
        found.append(("json_schema", _dump(form.json_schema.schema)))
    if form is not None:
        found += _structural_tag(form)
    if outputs is not None:
        found += _structured(outputs)
    if len(found) > 1:
        raise bad_request("ask for one constraint on the text, not for several", "structured_outputs")
    return found[0] if found else None


def _structural_tag(form: ResponseFormat) -> list[tuple[str, str]]:
    given = {name: getattr(form, name) for name in ("structures", "triggers", "format")}
    given = {name: value for name, value in given.items() if value is not None}
    if form.type == "structural_tag":
        return [("structural_tag", _dump(given))]
    if given:
        raise bad_request(f"{next(iter(given))} needs response_format.type structural_tag", "response_format")
    return []


def _structured(outputs: StructuredOutputs) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if outputs.json is not None:
        found.append(("json_schema", _dump(outputs.json)))
    if outputs.json_object:
        found.append(("json_schema", JSON_OBJECT_SCHEMA))
    if outputs.regex is not None:
        found.append(("regex", outputs.regex))
    if outputs.choice is not None:
        found.append(("choice", json.dumps(outputs.choice)))
    if outputs.grammar is not None:
        found.append(("lark", outputs.grammar))
    if outputs.structural_tag is not None:
        tag = outputs.structural_tag
        found.append(("structural_tag", tag if isinstance(tag, str) else _dump(tag)))
    if not found:
        names = "json, regex, choice, grammar, json_object or structural_tag"
        raise bad_request(f"structured_outputs needs {names}", "structured_outputs")
    return found


def _dump(schema: Any) -> str:
    try:
        return msgspec.json.encode(schema).decode()
    except (RecursionError, UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise bad_request(f"the schema cannot be read: {error}", "response_format") from error
