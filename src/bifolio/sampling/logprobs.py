"""Logprobs for reporting: the model's own distribution, before any sampling option (as vLLM reports them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.arrays import array_namespace
from bifolio.kernels.interface import TokenScores
from bifolio.logprob_records import pack_records
from bifolio.sampling.weights import (
    Array,
    device,
    kth_bound,
    log_total,
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
    num_top: NDArray[np.int64]  # i64[t]  valid entries of the rows below; -1: not asked for
    top_ids: NDArray[np.int32]  # i32[t, k]  the most likely tokens, best first; none of logprob -inf
    top_logprobs: NDArray[np.float32]  # f32[t, k]

    @classmethod
    def empty(cls, length: int) -> TokenLogprobs:
        """No logprobs asked for."""
        return cls(
            np.full(length, np.nan, dtype=np.float32),
            np.zeros(length, dtype=np.int32),
            np.full(length, -1, dtype=np.int64),
            np.zeros((length, 0), dtype=np.int32),
            np.zeros((length, 0), dtype=np.float32),
        )

    def put(self, rows: NDArray[Any] | Sequence[int], part: TokenLogprobs) -> None:
        """Replace some of the rows."""
        missing = part.top_ids.shape[1] - self.top_ids.shape[1]
        if missing > 0:
            self.top_ids = np.pad(self.top_ids, ((0, 0), (0, missing)))
            self.top_logprobs = np.pad(self.top_logprobs, ((0, 0), (0, missing)))
        width = part.top_ids.shape[1]
        self.logprobs[rows], self.ranks[rows], self.num_top[rows] = part.logprobs, part.ranks, part.num_top
        self.top_ids[rows, :width], self.top_logprobs[rows, :width] = part.top_ids, part.top_logprobs

    def take(self, rows: NDArray[Any]) -> TokenLogprobs:
        return TokenLogprobs(
            self.logprobs[rows], self.ranks[rows], self.num_top[rows], self.top_ids[rows], self.top_logprobs[rows]
        )

    @property
    def top(self) -> list[list[tuple[int, float]] | None]:
        """Per token, the most likely (id, logprob), best first; None where not asked for."""
        rows = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), self.num_top.tolist(), strict=True)
        return [
            None if count < 0 else list(zip(ids[:count], values[:count], strict=True)) for ids, values, count in rows
        ]

    def pack(self, token_ids: NDArray[np.int32], num_pairs: int) -> NDArray[np.int32]:
        """The scores of these tokens as records (`logprob_records`) with room for `num_pairs` alternatives."""
        counts = np.clip(self.num_top, 0, num_pairs)
        return pack_records(token_ids, self.logprobs, self.ranks, counts, self.top_ids, self.top_logprobs, num_pairs)


def score_tokens(logits: Array, token_ids: NDArray[Any], num_top: NDArray[Any]) -> TokenLogprobs:
    """Logprob and rank of one token per row of f32[r, vocab], and the `num_top[row]` most likely tokens."""
    xp = array_namespace(logits)
    shifted = shift(logits)
    log_sum = log_total(xp, to_weights(shifted))
    ids = xp.asarray(np.asarray(token_ids, dtype=np.int64)[:, None], device=device(logits))
    values = xp.take_along_axis(shifted, ids, axis=-1)
    ranks = xp.count_nonzero(shifted > values, axis=-1) + 1
    return TokenLogprobs(
        to_host((values - log_sum)[:, 0]),
        to_host(ranks).astype(np.int32),
        *_top(xp, shifted, log_sum, num_top),
    )


def finish_scores(scores: TokenScores, num_top: NDArray[Any]) -> TokenLogprobs:
    """Logprobs from the numbers that a device sent: those of `score_tokens`, bit for bit."""
    wanted = np.asarray(num_top, dtype=np.int64)
    width = max(int(wanted.max()), 0)
    top_ids = scores.top_ids[:, :width]
    with np.errstate(divide="ignore", invalid="ignore"):  # tokens without logprobs have no total
        log_sum = log_total(np, scores.totals[:, None])
        logprobs, top_logprobs = (scores.logits[:, None] - log_sum)[:, 0], scores.top_logits[:, :width] - log_sum
    counts = np.count_nonzero((np.arange(top_ids.shape[1]) < wanted[:, None]) & (top_ids >= 0), axis=1)
    return TokenLogprobs(logprobs, scores.ranks, np.where(wanted < 0, -1, counts), top_ids, top_logprobs)


def _top(
    xp: Any, shifted: Array, log_sum: Array, num_top: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """(number of valid entries i64[r], ids i32[r, k], logprobs f32[r, k]) of the most likely tokens."""
    counts = np.minimum(np.asarray(num_top, dtype=np.int64), shifted.shape[-1])
    if not (counts > 0).any():
        return counts, np.zeros((len(counts), 0), np.int32), np.zeros((len(counts), 0), np.float32)
    mask = shifted >= kth_bound(shifted, np.maximum(counts, 1))
    ids, values = sort_candidates(mask, shifted)
    logprobs, width = to_host(values - log_sum), int(counts.max())
    counts = np.minimum(counts, np.count_nonzero(logprobs > -np.inf, axis=1))
    return counts, to_host(ids)[:, :width].astype(np.int32), logprobs[:, :width]
