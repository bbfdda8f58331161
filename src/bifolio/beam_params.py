"""The options of a beam search request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bifolio.errors import RequestError
from bifolio.sampling_params import LogitsProcessor, SamplingParams


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Options of a beam search that keeps the `beam_width` best hypotheses, with the semantics of transformers.

    The score of a finished hypothesis is its summed logprob divided by (its length ** length_penalty).
    """

    beam_width: int = 4
    max_tokens: int | None = 16
    temperature: float = 0.0  # accepted for vLLM's sake: beams are ranked by the model's own probabilities
    length_penalty: float = 1.0  # above 0 favours long texts, below 0 short ones
    early_stopping: bool | Literal["never"] = False
    # True: stop at beam_width finished hypotheses. False: stop when no better one is likely at the current length.
    # "never": stop when no better one is possible.
    num_return_sequences: int | None = None  # None: beam_width
    num_groups: int = 1  # number of groups of beams; groups are penalised for each other's tokens
    diversity_penalty: float = 0.0  # subtracted for every earlier group that chose the token at this step
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    grammar: object | None = None
    skip_special_tokens: bool = True
    sampling: SamplingParams = field(init=False, repr=False, compare=False)  # the shared options, for the sampler

    def __post_init__(self) -> None:
        for name in ("beam_width", "num_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(f"{name} must be a whole number of at least 1, not {value!r}")
        returned = self.num_return_sequences
        if returned is not None and not (isinstance(returned, int) and 1 <= returned <= self.beam_width):
            raise RequestError(f"num_return_sequences={returned!r} must be in 1..beam_width={self.beam_width}")
        if self.beam_width % self.num_groups:
            raise RequestError(f"beam_width={self.beam_width} must be a multiple of num_groups={self.num_groups}")
        for name in ("length_penalty", "diversity_penalty"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise RequestError(f"{name} is {value!r}: pass a finite number")
        if self.temperature != 0.0:
            raise RequestError(f"a beam search does not sample: leave temperature at 0, not {self.temperature!r}")
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(f"early_stopping must be True, False or 'never', not {self.early_stopping!r}")
        object.__setattr__(self, "sampling", self._as_sampling())
        object.__setattr__(self, "stop", self.sampling.stop)
        object.__setattr__(self, "stop_token_ids", self.sampling.stop_token_ids)

    @property
    def num_returned(self) -> int:
        return self.num_return_sequences or self.beam_width

    def _as_sampling(self) -> SamplingParams:
        """Convert the options that beam search shares with sampling; `SamplingParams` checks them."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            logit_bias=self.logit_bias,
            bad_words=self.bad_words,
            bad_words_token_ids=self.bad_words_token_ids,
            allowed_token_ids=self.allowed_token_ids,
            logits_processors=self.logits_processors,
            grammar=self.grammar,
            skip_special_tokens=self.skip_special_tokens,
        )
