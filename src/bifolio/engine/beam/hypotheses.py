"""Beam search over scores: running and finished hypotheses and the stopping rule, without cache and device.

Every step ranks the continuations of all running beams:

    beams × vocabulary ──top k──▶ candidates, best first ──▶ the best that do not end: next step's beams
                                                        └──▶ those among the first `width` that end: finished

k is large enough that `width` beams continue even if every end-of-text token is among the candidates. The rules for
finishing, comparing scores and stopping are those of transformers' `generate(num_beams=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bifolio.beam_params import BeamSearchParams
from bifolio.sequence import LogprobRecords

NEVER = -1.0e9  # worse than any real score
CHUNK = 128  # columns per chunk in the top-k of long rows


class Candidate(NamedTuple):
    """One continuation of one beam."""

    beam: int  # index of the running beam it continues
    token: int
    score: float  # summed logprob, the token included


@dataclass(slots=True)
class Hypothesis:
    """A finished text."""

    score: float  # length-penalised
    cumulative_logprob: float
    token_ids: list[int]
    stop_reason: int | str | None = None
    finish_reason: str = "stop"
    logprobs: LogprobRecords = field(default_factory=LogprobRecords)


class Ending(NamedTuple):
    """The reason why a candidate ends."""

    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamGroup:
    """The state of one search (or of one of its diversity groups)."""

    params: BeamSearchParams
    width: int
    num_ends: int  # token ids that end a text
    max_tokens: int
    scores: list[float] = field(default_factory=list)  # of the running beams, best first
    finished: list[Hypothesis] = field(default_factory=list)  # best first, at most `width`
    num_steps: int = 0
    can_improve: bool = True

    def __post_init__(self) -> None:
        self.scores = [0.0]  # the prompt is the only beam of the first step

    @property
    def num_candidates(self) -> int:
        return max(2, 1 + self.num_ends) * self.width

    def advance(
        self, candidates: Sequence[Candidate], ending: Callable[[Candidate], Ending | None]
    ) -> tuple[list[Candidate], list[tuple[Candidate, Hypothesis]], bool]:
        """(beams of the next step, newly finished, done), given the candidates best first."""
        ends = [ending(candidate) for candidate in candidates]
        length = self.num_steps + 1
        full = len(self.finished) >= self.width and self.params.early_stopping is True
        fresh: list[tuple[Candidate, Hypothesis]] = []
        for candidate, end in list(zip(candidates, ends, strict=True))[: self.width]:
            if end is not None and self.can_improve and not full:
                score = candidate.score / length**self.params.length_penalty
                hypothesis = Hypothesis(score, candidate.score, [], end.stop_reason, finish_reason=end.finish_reason)
                fresh.append((candidate, hypothesis))
        self.finished = sorted([*self.finished, *(h for _, h in fresh)], key=lambda h: -h.score)[: self.width]
        kept = {id(hypothesis) for hypothesis in self.finished}
        fresh = [(candidate, hypothesis) for candidate, hypothesis in fresh if id(hypothesis) in kept]
        running = [c for c, end in zip(candidates, ends, strict=True) if end is None][: self.width]
        self.scores = [candidate.score for candidate in running]
        self.num_steps = length
        self.can_improve = self.can_improve and self._could_improve()
        open_beam = not (len(self.finished) >= self.width and self.params.early_stopping is True)
        return running, fresh, not (running and self.can_improve and open_beam)

    def _could_improve(self) -> bool:
        """Whether a running beam can still exceed the score of the worst finished text."""
        if not self.scores:
            return False
        if len(self.finished) < self.width:
            return True
        if self.params.beam_width == 1:  # greedy: the first finished text is the result
            return False
        penalty = self.params.length_penalty
        at_end = self.params.early_stopping == "never" and penalty > 0
        length = self.max_tokens if at_end else self.num_steps
        return bool(self.scores[0] / length**penalty > self.finished[-1].score)


def best_candidates(
    logprobs: np.ndarray,  # f32[b, vocab]
    running: Sequence[float],  # summed logprob of each beam
    count: int,
) -> list[Candidate]:
    """The `count` best continuations over all beams, best first; among equals the lowest beam and token."""
    columns, values = top_of_rows(logprobs, min(count, logprobs.shape[1]))
    totals = values.astype(np.float32) + np.asarray(running, dtype=np.float32)[:, None]
    order = np.lexsort((columns.ravel(), np.repeat(np.arange(len(running)), totals.shape[1]), -totals.ravel()))
    chosen = [index for index in order[:count].tolist() if totals.ravel()[index] > NEVER]
    width = totals.shape[1]
    return [Candidate(index // width, int(columns.ravel()[index]), float(totals.ravel()[index])) for index in chosen]


def top_of_rows(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(columns i64[r, count], values f32[r, count]) of the largest in each row, in no particular order.

    The `count` largest elements lie in the `count` chunks with the largest maxima; only those are searched.
    """
    rows, width = values.shape
    if count * CHUNK * 2 >= width:
        columns = np.argpartition(values, width - count, axis=1)[:, width - count :] if count < width else None
        if columns is None:
            columns = np.broadcast_to(np.arange(width), (rows, width))
        return columns, np.take_along_axis(values, columns, axis=1)
    padded = -(-width // CHUNK) * CHUNK
    if padded != width:
        values = np.pad(values, ((0, 0), (0, padded - width)), constant_values=-np.inf)
    chunks = values.reshape(rows, -1, CHUNK)
    maxima = chunks.max(axis=2)
    best = np.argpartition(maxima, maxima.shape[1] - count, axis=1)[:, -count:]
    inside = np.take_along_axis(chunks, best[:, :, None], axis=1).reshape(rows, -1)
    picks = np.argpartition(inside, inside.shape[1] - count, axis=1)[:, -count:]
    columns = np.take_along_axis(best, picks // CHUNK, axis=1) * CHUNK + picks % CHUNK
    return columns, np.take_along_axis(inside, picks, axis=1)


def log_normalisers(logits: np.ndarray) -> np.ndarray:
    """f32[r, 1]: logarithm of the summed exponentials of each row, independent of the other rows; 0 without any."""
    highest = logits.max(axis=-1, keepdims=True)
    highest = np.where(np.isfinite(highest), highest, np.float32(0))
    total = np.exp(logits - highest).sum(axis=-1, keepdims=True, dtype=np.float64)
    return np.asarray(np.log(np.where(total > 0.0, total, 1.0)) + highest, dtype=np.float32)


def diversity_penalties(chosen: Sequence[int], vocab_size: int, penalty: float) -> np.ndarray:
    """f32[vocab]: penalties for tokens that earlier groups chose in this step."""
    counts = np.bincount(np.asarray(chosen, dtype=np.int64), minlength=vocab_size)
    return (counts * -penalty).astype(np.float32)
