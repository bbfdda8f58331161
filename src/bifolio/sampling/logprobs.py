"""Logprobs for reporting: the model's own distribution, before any sampling option (as vLLM reports them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    top: list[list[tuple[int, float]]]  # per token, the most likely (id, logprob), best first

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


def _top(xp: Any, shifted: Array, log_sum: Array, num_top: NDArray[Any]) -> list[list[tuple[int, float]]]:
    counts = np.minimum(num_top, shifted.shape[-1])
    if not counts.any():
        return [[] for _ in counts]
    mask = shifted >= kth_bound(shifted, np.maximum(counts, 1))
    ids, values = sort_candidates(mask, shifted)
    all_ids, logprobs = to_host(ids), to_host(values - log_sum)
    return [
        list(zip(all_ids[row, :count].tolist(), logprobs[row, :count].tolist(), strict=True))
        for row, count in enumerate(counts)
    ]
