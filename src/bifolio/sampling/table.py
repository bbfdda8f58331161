"""The sampling parameters of all running sequences, by slot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import RequestError, TokenIdError
from bifolio.sampling.history import History
from bifolio.sampling_params import LogitsProcessor, SamplingParams

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)  # below it a float32 quotient could be 0 / 0


class TokenMask(Protocol):
    """A constraint that changes with every token, such as a grammar."""

    def allowed(self, pending: Sequence[int]) -> NDArray[Any]:
        """Which tokens may follow the sequence and then `pending`: bool[vocab], or 32 bits per word, lowest first."""

    def restart(self) -> None:
        """Note that tokens of the sequence were exchanged, not only appended or cut off."""


@dataclass(slots=True)
class SlotOptions:
    """The options of one sequence that are no single numbers."""

    params: SamplingParams
    history: History
    output_token_ids: list[int]  # the engine's own list, not a copy
    bias_ids: NDArray[np.int64]  # i64[b]
    bias_amounts: NDArray[np.float32]  # f32[b]
    end_ids: NDArray[np.int64]  # i64[e] end-of-text and stop ids, banned until min_tokens are out
    allowed: NDArray[np.bool_] | None  # bool[vocab]
    words: tuple[tuple[int, ...], ...]  # forbidden sequences
    breakers: NDArray[np.int32]  # i32[k] ids that end a repetition for DRY
    processors: tuple[LogitsProcessor, ...]  # each (prompt, output, logits) -> logits
    mask: TokenMask | None


@dataclass(slots=True)
class SamplingTable:
    """Sampling parameters by slot: columns for the numbers, a `SlotOptions` for the rest.

    A slot is set once, when a sequence gets it, and read every step.
    """

    num_slots: int
    vocab_size: int
    seed: NDArray[np.uint64] = field(init=False)  # u64[slots]
    temperature: NDArray[np.float32] = field(init=False)  # f32[slots]  0: greedy
    top_k: NDArray[np.int64] = field(init=False)  # i64[slots]  vocab_size: off
    top_p: NDArray[np.float64] = field(init=False)  # f64[slots]
    min_p: NDArray[np.float64] = field(init=False)  # f64[slots]
    typical_p: NDArray[np.float64] = field(init=False)  # f64[slots]
    xtc_probability: NDArray[np.float64] = field(init=False)  # f64[slots]
    xtc_threshold: NDArray[np.float64] = field(init=False)  # f64[slots]
    num_logprobs: NDArray[np.int64] = field(init=False)  # i64[slots]  -1: none, 0: of the drawn token alone
    is_filtered: NDArray[np.bool_] = field(init=False)  # bool[slots]  any of top-k ... XTC
    is_edited: NDArray[np.bool_] = field(init=False)  # bool[slots]  anything that changes logits before that
    reads_history: NDArray[np.bool_] = field(init=False)  # bool[slots]  an edit depends on the tokens before it
    states: list[SlotOptions | None] = field(init=False)

    def __post_init__(self) -> None:
        slots = self.num_slots
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.temperature = np.zeros(slots, dtype=np.float32)
        self.top_k = np.full(slots, self.vocab_size, dtype=np.int64)
        self.top_p = np.ones(slots)
        self.min_p = np.zeros(slots)
        self.typical_p = np.ones(slots)
        self.xtc_probability = np.zeros(slots)
        self.xtc_threshold = np.zeros(slots)
        self.num_logprobs = np.full(slots, -1, dtype=np.int64)
        self.is_filtered = np.zeros(slots, dtype=np.bool_)
        self.is_edited = np.zeros(slots, dtype=np.bool_)
        self.reads_history = np.zeros(slots, dtype=np.bool_)
        self.states = [None] * slots

    def set(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int] | NDArray[np.int32],
        output_token_ids: list[int],
        eos_token_ids: Collection[int] = frozenset(),
        mask: TokenMask | None = None,
    ) -> None:
        """Fill a slot. `output_token_ids` is kept by reference and read at every step: append to it in place."""
        params.validate_for(self.vocab_size)
        state = _make_state(params, prompt_token_ids, output_token_ids, eos_token_ids, mask, self.vocab_size)
        self.states[slot] = state
        self.seed[slot] = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
        self.temperature[slot] = 0.0 if params.is_greedy else max(params.temperature, _SMALLEST_TEMPERATURE)
        self.top_k[slot] = min(params.top_k, self.vocab_size) or self.vocab_size
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.typical_p[slot] = params.typical_p
        self.xtc_probability[slot] = params.xtc_probability
        self.xtc_threshold[slot] = params.xtc_threshold
        self.num_logprobs[slot] = -1 if not params.needs_logprobs else params.logprobs or 0
        self.is_filtered[slot] = params.filters_tokens(self.vocab_size)
        self.reads_history[slot] = params.reads_history or mask is not None
        self.is_edited[slot] = self.reads_history[slot] or len(state.bias_ids) > 0 or state.allowed is not None

    def clear(self, slot: int) -> None:
        """Let go of a sequence; its slot may be set again."""
        self.states[slot] = None
        self.temperature[slot] = 0.0
        self.num_logprobs[slot] = -1
        self.is_filtered[slot] = self.is_edited[slot] = self.reads_history[slot] = False

    def restart_history(self, slot: int) -> None:
        """Say that tokens of the output list were exchanged, not only appended or cut off."""
        state = self.states[slot]
        if state is not None:
            state.history.restart()
            if state.mask is not None:
                state.mask.restart()


def _make_state(
    params: SamplingParams,
    prompt: Sequence[int] | NDArray[np.int32],
    output: list[int],
    eos_token_ids: Collection[int],
    mask: TokenMask | None,
    vocab_size: int,
) -> SlotOptions:
    bias = params.logit_bias or {}
    ends = sorted({*eos_token_ids, *params.stop_token_ids})
    tokens = np.asarray(prompt)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise TokenIdError(f"the prompt has a token id outside the vocabulary of {vocab_size} tokens")
    return SlotOptions(
        params=params,
        history=History(tokens, output, vocab_size),
        output_token_ids=output,
        bias_ids=np.fromiter(bias.keys(), dtype=np.int64, count=len(bias)),
        bias_amounts=np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
        end_ids=np.array([token_id for token_id in ends if token_id < vocab_size], dtype=np.int64),
        allowed=_allowed_mask(params.allowed_token_ids, vocab_size),
        words=_words(params, eos_token_ids),
        breakers=_breakers(params),
        processors=tuple(_with_prompt(processor) for processor in params.logits_processors),
        mask=mask,
    )


def _allowed_mask(ids: tuple[int, ...] | None, vocab_size: int) -> NDArray[np.bool_] | None:
    if ids is None:
        return None
    mask = np.zeros(vocab_size, dtype=np.bool_)
    mask[list(ids)] = True
    return mask


def _words(params: SamplingParams, eos_token_ids: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Forbidden sequences; the end of the text alone cannot be forbidden, or the request could not end."""
    if params.bad_words:
        raise RequestError("bad_words are texts: turn them into token ids with SamplingParams.resolve_strings first")
    return tuple(word for word in params.bad_words_token_ids if not (len(word) == 1 and word[0] in eos_token_ids))


def _breakers(params: SamplingParams) -> NDArray[np.int32]:
    if not params.dry_multiplier:
        return np.empty(0, dtype=np.int32)
    if any(isinstance(item, str) for item in params.dry_sequence_breakers):
        raise RequestError(
            "dry_sequence_breakers has texts: turn them into token ids with SamplingParams.resolve_strings first"
        )
    return np.array(params.dry_sequence_breakers, dtype=np.int32)


def _with_prompt(processor: LogitsProcessor) -> LogitsProcessor:
    """The processor as a function of (prompt, output, logits), whichever of the two forms it has."""
    try:
        signature = inspect.signature(processor)
    except ValueError:  # a builtin that does not tell
        return _without_prompt(processor)
    if _takes(signature, 2):
        return _without_prompt(processor)
    if _takes(signature, 3):
        return processor
    raise RequestError(
        f"the logits processor {processor!r} must take (output_token_ids, logits) or "
        "(prompt_token_ids, output_token_ids, logits)"
    )


def _takes(signature: inspect.Signature, num_arguments: int) -> bool:
    try:
        signature.bind(*([None] * num_arguments))
    except TypeError:
        return False
    return True


def _without_prompt(processor: LogitsProcessor) -> Callable[[Any, Any, Any], Any]:
    return lambda _prompt, output, logits: processor(output, logits)
