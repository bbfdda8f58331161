"""Logprobs for reporting: the model's own distribution, before any sampling option (as vLLM reports them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.kernels.interface import TokenScores
from bifolio.sampling.weights import (
    Array,
    device,
    kth_bound,
    log_total,
    namespace,
    shift,
    sort_candidates,
    to_host,
    to_weights,
)


@dataclass(slots=True)
class TokenLogprobs:
    """Scores of given tokens, on the host."""

    logprobs: NDArray[np.float32]  # f32[t]
    ranks: NDArray[np.int32]  # i32[t]  1: no token was more likely
    top: list[list[tuple[int, float]]]  # per token, the most likely (id, logprob), best first; none of logprob -inf

    @classmethod
    def empty(cls, length: int) -> TokenLogprobs:
        return cls(np.zeros(length, dtype=np.float32), np.zeros(length, dtype=np.int32), [[] for _ in range(length)])


def score_tokens(logits: Array, token_ids: NDArray[Any], num_top: NDArray[Any]) -> TokenLogprobs:
    """Logprob and rank of one token per row of f32[r, vocab], and the `num_top[row]` most likely tokens."""
    xp = namespace(logits)
    shifted = shift(logits)
    log_sum = log_total(xp, to_weights(shifted))
    ids = xp.asarray(np.asarray(token_ids, dtype=np.int64)[:, None], device=device(logits))
    values = xp.take_along_axis(shifted, ids, axis=-1)
    ranks = xp.count_nonzero(shifted > values, axis=-1) + 1
    return TokenLogprobs(
        logprobs=to_host((values - log_sum)[:, 0]),
        ranks=to_host(ranks).astype(np.int32),
        top=_top(xp, shifted, log_sum, num_top),
    )


def finish_scores(scores: TokenScores, num_top: NDArray[Any]) -> TokenLogprobs:
    """Logprobs from the numbers that a device sent: those of `score_tokens`, bit for bit."""
    with np.errstate(divide="ignore", invalid="ignore"):  # tokens without logprobs have no total
        log_sum = log_total(np, scores.totals[:, None])
        logprobs, top_logprobs = (scores.logits[:, None] - log_sum)[:, 0], scores.top_logits - log_sum
    exists = np.arange(scores.top_ids.shape[1]) < np.asarray(num_top)[:, None]
    counts = np.count_nonzero(exists & (scores.top_ids >= 0), axis=1)
    return TokenLogprobs(logprobs, scores.ranks, _lists(scores.top_ids, top_logprobs, counts))


def _top(xp: Any, shifted: Array, log_sum: Array, num_top: NDArray[Any]) -> list[list[tuple[int, float]]]:
    counts = np.minimum(num_top, shifted.shape[-1])
    if not counts.any():
        return [[] for _ in counts]
    mask = shifted >= kth_bound(shifted, np.maximum(counts, 1))
    ids, values = sort_candidates(mask, shifted)
    logprobs = to_host(values - log_sum)
    return _lists(to_host(ids), logprobs, np.minimum(counts, np.count_nonzero(logprobs > -np.inf, axis=1)))


def _lists(ids: NDArray[Any], logprobs: NDArray[np.float32], counts: NDArray[Any]) -> list[list[tuple[int, float]]]:
    """The first `counts[row]` (id, logprob) of each row."""
    rows = zip(ids.tolist(), logprobs.tolist(), counts.tolist(), strict=True)
    return [list(zip(row_ids[:count], row_logprobs[:count], strict=True)) for row_ids, row_logprobs, count in rows]
