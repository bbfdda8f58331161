"""Perplexity of a model on a text: exp of the mean negative logprob per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bifolio.api.llm import LLM
from bifolio.errors import RequestError
from bifolio.sampling_params import SamplingParams

WINDOW = 512  # tokens per window: the longest context of a prediction
MAX_TOKENS = 4096  # default number of scored tokens

Progress = Callable[[int, int], None]  # (windows scored, windows in all)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity and the number of scored tokens."""

    value: float
    num_tokens: int


def text_perplexity(
    llm: LLM,
    text: str,
    *,
    window: int = WINDOW,
    max_tokens: int | None = MAX_TOKENS,
    progress: Progress | None = None,
) -> Perplexity:
    """Cut the text into windows that do not overlap; the first token of each has no context and is not scored."""
    tokenizer = llm.model.require_tokenizer()
    start = tokenizer.encode("")  # begin-of-text, where the model uses it
    start = start if len(start) == 1 else []
    token_ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    length = min(window, llm.engine.config.max_model_len) - len(start)
    if length < 1 or len(token_ids) + len(start) < 2:
        raise RequestError("the text is too short to score: pass a longer one")
    windows = [[*start, *token_ids[begin : begin + length]] for begin in range(0, len(token_ids), length)]
    return mean_over(llm, [ids for ids in windows if len(ids) > 1], progress)


def mean_over(llm: LLM, windows: Sequence[Sequence[int]], progress: Progress | None = None) -> Perplexity:
    """The perplexity over all windows, scored in batches of the engine's size."""
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    group = llm.engine.config.max_num_seqs
    for begin in range(0, len(windows), group):
        if progress is not None:
            progress(begin, len(windows))
        for output in llm.generate(list(windows[begin : begin + group]), params, use_tqdm=False):
            if output.prompt_logprobs is None:
                raise RequestError(f"the text could not be scored: {output.error}")
            scored = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
            total -= math.fsum(scored)
            count += len(scored)
    return Perplexity(math.exp(total / count), count)
