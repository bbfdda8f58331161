"""Sampling options of a request: `SamplingParams`, validated on construction.

Field names match vLLM's, so its users only change the import. `__post_init__` validates every field; an invalid value
raises a `RequestError` that lists the valid ones. `validate_for` checks token ids against the vocabulary of the model,
and `resolve_strings` converts strings that stand for tokens (`bad_words`, `dry_sequence_breakers`) to token ids.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bifolio.errors import RequestError, TokenIdError
from bifolio.structured_outputs import StructuredOutputsParams

LogitsProcessor = Callable[..., Any]
"""`(output_token_ids, logits) -> logits` or `(prompt_token_ids, output_token_ids, logits) -> logits`, one row."""

MAX_LOGPROBS = 1024  # longer lists cost more to send to the client than to compute
MAX_SEED_BITS = 64
IGNORED = {"spaces_between_special_tokens": "the tokenizer decides"}  # fields that are accepted and change nothing


class RequestOutputKind(enum.Enum):
    """Contents of the outputs of a request while it runs."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # the new tokens and text
    FINAL_ONLY = 2  # one output at the end


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options and stop conditions of one request.

    `sampling.sampler` documents the order in which the options are applied. Equal parameters, seed and prompt give
    equal tokens, independent of the other requests in the batch.
    """

    n: int = 1  # completions returned for one prompt
    best_of: int | None = None  # completions drawn, of which the `n` with the best mean logprob are returned
    temperature: float = 1.0  # 0 is greedy: always the most likely token, the lowest id among ties
    top_p: float = 1.0  # keep the smallest set of most likely tokens whose probability reaches top_p
    top_k: int = 0  # keep the top_k most likely tokens and those equal to the last of them; 0 or -1: off
    min_p: float = 0.0  # drop tokens less likely than min_p times the most likely one
    typical_p: float = 1.0  # keep the tokens closest to the expected surprise, up to this mass; 1: off
    repetition_penalty: float = 1.0  # > 1: penalises tokens of prompt and output by dividing positive logits
    presence_penalty: float = 0.0  # subtracted once from tokens that the output contains
    frequency_penalty: float = 0.0  # subtracted as often as the output contains the token
    no_repeat_ngram_size: int = 0  # no sequence of this many tokens occurs twice in prompt and output; 0: off
    dry_multiplier: float = 0.0  # strength of the penalty on continuing a repeated sequence; 0: off
    dry_base: float = 1.75  # growth of that penalty with every token of the repetition
    dry_allowed_length: int = 2  # repetitions shorter than this many tokens are not penalised
    dry_sequence_breakers: tuple[str | int, ...] = ("\n", ":", '"', "*")  # strings or token ids ending a repetition
    dry_range: int = 0  # number of last tokens searched for repetitions; 0: all
    xtc_probability: float = 0.0  # probability, per token, of excluding all likely tokens but the least likely
    xtc_threshold: float = 0.1  # minimum probability of a likely token (XTC)
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these token ids
    bad_words: tuple[str, ...] = ()  # texts that must not be generated
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be generated
    allowed_token_ids: tuple[int, ...] | None = None  # only these tokens are sampled
    min_tokens: int = 0  # stop conditions other than the limits apply after this many output tokens
    max_tokens: int | None = 16  # None: as many as the context takes; 0: only the prompt is computed (and scored)
    stop: tuple[str, ...] = ()  # texts that end the request
    stop_token_ids: tuple[int, ...] = ()  # token ids that end the request
    include_stop_str_in_output: bool = False  # keep the stop text at the end of the output
    ignore_eos: bool = False  # continue after the end-of-text token
    seed: int | None = None  # None: a random seed for each request
    logprobs: int | None = None  # per output token: its logprob and those of this many most likely tokens
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    detokenize: bool = True  # False: token ids alone, no text
    skip_special_tokens: bool = True  # leave tokens such as the end of a turn out of the text
    spaces_between_special_tokens: bool = True  # see IGNORED
    logits_processors: tuple[LogitsProcessor, ...] = ()  # functions that change the logits of every token
    grammar: object | None = None  # a constraint on the text: a `bifolio.Grammar`
    structured_outputs: StructuredOutputsParams | None = None  # the same, as vLLM writes it
    guided_decoding: StructuredOutputsParams | None = None  # older name of structured_outputs
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of outputs that AsyncLLM.generate iterates over

    def __post_init__(self) -> None:
        for name, value in _normalised(self).items():
            object.__setattr__(self, name, value)
        _check_numbers(self)
        _check_relations(self)
        _check_structure(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        """Number of sampled completions, of which `n` are returned."""
        return self.n if self.best_of is None else self.best_of

    def filters_tokens(self, vocab_size: int) -> bool:
        """Whether an option excludes tokens from sampling: top-k to XTC."""
        return not self.is_greedy and (
            0 < self.top_k < vocab_size
            or self.top_p < 1.0
            or self.min_p > 0.0
            or self.typical_p < 1.0
            or self.xtc_probability > 0.0
        )

    @property
    def reads_history(self) -> bool:
        """Whether an option changes logits based on earlier tokens: penalties, bans, grammars, processors."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.no_repeat_ngram_size
            or self.dry_multiplier
            or self.bad_words_token_ids
            or self.min_tokens
            or self.logits_processors
            or self.grammar is not None
            or self.structured_outputs is not None
        )

    @property
    def needs_logprobs(self) -> bool:
        """Whether the logprob of each sampled token is needed: requested, or for ranking by `best_of`."""
        return self.logprobs is not None or self.num_sequences > self.n

    def validate_for(self, vocab_size: int) -> None:
        """Raise `TokenIdError` if a token id of these parameters is outside the vocabulary."""
        _check_ids("logit_bias", self.logit_bias or (), vocab_size)
        _check_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_ids("bad_words_token_ids", (i for word in self.bad_words_token_ids for i in word), vocab_size)
        _check_ids("dry_sequence_breakers", (i for i in self.dry_sequence_breakers if isinstance(i, int)), vocab_size)

    def resolve_strings(self, encode: Callable[[str], list[int]]) -> SamplingParams:
        """Convert `bad_words` and `dry_sequence_breakers` to token ids.

        `encode` must not add special tokens. A bad word is banned with and without a leading space, because most
        tokenizers encode a word differently at the start of a text and inside a sentence.
        """
        changes: dict[str, Any] = {}
        if self.bad_words:
            texts = [text for word in self.bad_words for text in (word, " " + word.lstrip())]
            words = [*self.bad_words_token_ids, *(tuple(encode(text)) for text in texts)]
            changes["bad_words_token_ids"] = tuple(dict.fromkeys(word for word in words if word))
            changes["bad_words"] = ()
        if self.dry_multiplier and any(isinstance(item, str) for item in self.dry_sequence_breakers):
            # A letter before the text keeps tokenizers from adding a space to it.
            ids = [encode("a" + i)[-1] if isinstance(i, str) else i for i in self.dry_sequence_breakers]
            changes["dry_sequence_breakers"] = tuple(dict.fromkeys(ids))
        return dataclasses.replace(self, **changes) if changes else self

    @classmethod
    def with_defaults(cls, generation_config: Mapping[str, Any], **explicit: Any) -> SamplingParams:
        """Build parameters from a model's generation_config.json; `explicit` values take precedence."""
        return cls(**merge_defaults(generation_config, **explicit))


_FROM_GENERATION_CONFIG = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "dry_multiplier": "dry_multiplier",  # these three are not transformers': `bifolio pull` records them
    "dry_base": "dry_base",
    "dry_allowed_length": "dry_allowed_length",
    "bad_words_ids": "bad_words_token_ids",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}


def merge_defaults(generation_config: Mapping[str, Any], **explicit: Any) -> dict[str, Any]:
    """Keyword arguments for `SamplingParams`: a model's own defaults, overridden by explicit values.

    An absent key or a null keeps the model's default; an `explicit` value takes precedence even if it equals the
    default of `SamplingParams`.
    """
    merged: dict[str, Any] = {}
    for theirs, ours in _FROM_GENERATION_CONFIG.items():
        value = generation_config.get(theirs)
        if value is not None:
            merged[ours] = value
    if generation_config.get("do_sample") is False:
        merged["temperature"] = 0.0
    merged.update(explicit)
    return merged


def _normalised(params: SamplingParams) -> dict[str, Any]:
    """Normalise containers of any type to tuples and dicts of plain ints and floats."""
    breakers = params.dry_sequence_breakers
    return {
        "stop": _texts("stop", params.stop),
        "bad_words": _texts("bad_words", params.bad_words),
        "stop_token_ids": _ids("stop_token_ids", params.stop_token_ids),
        "allowed_token_ids": _allowed(params.allowed_token_ids),
        "bad_words_token_ids": _words(params.bad_words_token_ids),
        "dry_sequence_breakers": tuple(_breaker(item) for item in _items("dry_sequence_breakers", breakers)),
        "logit_bias": _bias(params.logit_bias),
        "logits_processors": _processors(params.logits_processors),
    }


def _items(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (str, int)):
        return [value]
    if not isinstance(value, Iterable) or isinstance(value, (Mapping, bytes)):
        raise RequestError(f"{name} must be a list, not {value!r}")
    return list(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = _items(name, value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name} must be a text or a list of texts that are not empty, not {text!r}")
    return tuple(dict.fromkeys(texts))


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    items = _items(name, value)
    for item in items:
        if not _is_integer(item) or item < 0:
            raise RequestError(f"{name} must be a list of token ids (integers from 0), not {item!r}")
    return tuple(dict.fromkeys(int(item) for item in items))


def _allowed(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _ids("allowed_token_ids", value)
    if not ids:
        raise RequestError("allowed_token_ids is empty, so no token could be sampled: list token ids, or leave it out")
    return ids


def _words(value: Any) -> tuple[tuple[int, ...], ...]:
    words = []
    for word in _items("bad_words_token_ids", value):
        if isinstance(word, str) or not isinstance(word, Iterable):
            raise RequestError(f"bad_words_token_ids must be a list of lists of token ids, not {word!r}")
        items = list(word)
        if not items or not all(_is_integer(item) and item >= 0 for item in items):
            raise RequestError(
                f"each of bad_words_token_ids must be token ids (integers from 0), at least one: {items!r}"
            )
        words.append(tuple(int(item) for item in items))
    return tuple(dict.fromkeys(words))


def _breaker(item: Any) -> str | int:
    if isinstance(item, str) and item:
        return item
    if _is_integer(item) and item >= 0:
        return int(item)
    raise RequestError(f"dry_sequence_breakers must be texts or token ids (integers from 0), not {item!r}")


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not {value!r}")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if not _is_integer(token_id) or token_id < 0:
            raise RequestError(f"logit_bias must map token ids (integers from 0) to numbers, but has the key {key!r}")
        bias[int(token_id)] = _number(f"logit_bias[{key}]", amount, -1e30, 1e30)
    return bias or None


def _processors(value: Any) -> tuple[LogitsProcessor, ...]:
    processors = [value] if callable(value) else _items("logits_processors", value)
    for processor in processors:
        if not callable(processor):
            raise RequestError(
                f"logits_processors must be functions (output_token_ids, logits) -> logits, not {processor!r}"
            )
    return tuple(processors)


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """Convert `value` to a float in [low, high] (or (low, high]); a `RequestError` names that range."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        if (low < number if open_low else low <= number) and number <= high:  # false for NaN
            return number
    least = f"above {low:g}" if open_low else f"of at least {low:g}"
    between = least if high >= 1e30 else f"{least} and at most {high:g}"
    raise RequestError(f"{name} is {value!r}: pass a number {between}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    if _is_integer(value) and low <= value and (high is None or value <= high):
        return int(value)
    limit = f" up to {high}" if high is not None else ""
    raise RequestError(f"{name} must be an integer from {low}{limit}, not {value!r}")


# name -> (low, high, whether low itself is excluded)
_FLOATS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 1e30, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "typical_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 1e30, True),
    "presence_penalty": (-1e30, 1e30, False),
    "frequency_penalty": (-1e30, 1e30, False),
    "dry_multiplier": (0.0, 1e30, False),
    "dry_base": (1.0, 1e30, False),
    "xtc_probability": (0.0, 1.0, False),
    "xtc_threshold": (0.0, 1.0, False),
}

# name -> (low, high, whether None is allowed)
_INTEGERS: dict[str, tuple[int, int | None, bool]] = {
    "n": (1, 1024, False),
    "best_of": (1, 1024, True),
    "top_k": (-1, None, False),
    "no_repeat_ngram_size": (0, None, False),
    "dry_allowed_length": (1, None, False),
    "dry_range": (0, None, False),
    "min_tokens": (0, None, False),
    "max_tokens": (0, None, True),
    "seed": (-(1 << (MAX_SEED_BITS - 1)), (1 << MAX_SEED_BITS) - 1, True),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
}

_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _check_numbers(params: SamplingParams) -> None:
    for name, (low, high, open_low) in _FLOATS.items():
        object.__setattr__(params, name, _number(name, getattr(params, name), low, high, open_low))
    for name, (least, most, optional) in _INTEGERS.items():
        value = getattr(params, name)
        if value is not None or not optional:
            object.__setattr__(params, name, _integer(name, value, least, most))
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise RequestError(f"{name} must be True or False, not {getattr(params, name)!r}")


def _check_relations(params: SamplingParams) -> None:
    if params.top_k == -1:
        object.__setattr__(params, "top_k", 0)
    if params.best_of is not None and params.best_of < params.n:
        raise RequestError(f"best_of={params.best_of} must be at least n={params.n}: raise it, or leave it out")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens={params.min_tokens} must not exceed max_tokens={params.max_tokens}")
    if params.stop and not params.detokenize:
        raise RequestError("stop texts need the text of the output: pass detokenize=True, or use stop_token_ids")


def _check_structure(params: SamplingParams) -> None:
    given = [params.grammar, params.structured_outputs, params.guided_decoding]
    if params.structured_outputs is params.guided_decoding:
        given.pop()
    if sum(value is not None for value in given) > 1:
        raise RequestError("pass one of grammar, structured_outputs and guided_decoding")
    outputs = params.structured_outputs or params.guided_decoding
    if outputs is not None and not isinstance(outputs, StructuredOutputsParams):
        raise RequestError(f"structured_outputs must be StructuredOutputsParams, not {outputs!r}")
    object.__setattr__(params, "structured_outputs", outputs)
    if not isinstance(params.output_kind, RequestOutputKind):
        raise RequestError(f"output_kind must be a RequestOutputKind, not {params.output_kind!r}")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise TokenIdError(
                f"{name} has the token id {token_id}, but the vocabulary ends at {vocab_size - 1}: leave it out"
            )
