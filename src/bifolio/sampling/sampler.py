"""From logits to tokens, for a whole batch at once: numpy arrays or torch tensors, one definition.

The steps of a row, in this order (transformers' where it has the option):

    1. logit bias                       7. the user's logits processors
    2. repetition penalty               8. allowed tokens and grammar
    3. presence and frequency penalty   9. temperature (0: take the largest logit, done)
    4. DRY                             10. top-k, top-p, min-p, typical, XTC
    5. n-grams and bad words           11. one draw
    6. ends of text before min_tokens

Well-defined oddities: a NaN logit counts as excluded, +inf as the largest finite number; among equal logits greedy
takes the lowest id; a tiny temperature is greedy up to exact ties. A row of which everything is excluded, or whose own
processor fails, gets token id -1 and an entry in `SampledTokens.errors`; the other rows are not affected.

Each draw inverts the cumulative distribution, tokens in the order of their ids, at one uniform number that depends on
(seed, position) alone. Weights are integers (see `sampling.weights`), so a row's token does not depend, to the last
bit, on the rest of the batch, nor on the device that draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.arrays import array_namespace
from bifolio.errors import NO_FINITE_LOGIT, BifolioError, ModelOutputError, RequestError
from bifolio.kernels.weights import ONE
from bifolio.sampling.edits import Edits
from bifolio.sampling.filters import Filters, filter_rows
from bifolio.sampling.logprobs import TokenLogprobs, score_tokens
from bifolio.sampling.table import SamplingTable, TokenMask
from bifolio.sampling.weights import (
    STREAM_XTC,
    Array,
    cleaned,
    cool,
    cooled_weights,
    device,
    draw,
    is_numpy,
    shift,
    to_host,
    to_weights,
    uniform,
)

__all__ = [
    "SampledTokens",
    "Sampler",
    "SamplingTable",
    "TokenMask",
    "greedy_tokens",
    "no_token_error",
    "prompt_logprobs",
    "uniform",
]

_quiet = np.errstate(all="ignore")  # odd logits are handled, not reported
NOTHING = -1  # the token id of a row that could not be drawn
NOTHING_FOLLOWS = (
    "no token can follow: the request's allowed tokens, grammar, bad words or logits processors exclude the whole "
    "vocabulary here, or the model gave no finite logit"
)


@dataclass(slots=True)
class SampledTokens:
    """The outcome of one step, on the host."""

    token_ids: NDArray[np.int32]  # i32[r]  -1 in rows that are in `errors`
    scores: TokenLogprobs | None = None  # of the drawn tokens, from the model's own logits; None: none asked for
    errors: dict[int, BifolioError] = field(default_factory=dict)  # row -> why nothing was drawn

    @classmethod
    def unknown(cls, count: int) -> SampledTokens:
        """Nothing drawn yet and no logprobs asked for."""
        return cls(np.full(count, NOTHING, dtype=np.int32))

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """f32[r]: NaN where not asked for."""
        return self._scores().logprobs

    @property
    def ranks(self) -> NDArray[np.int32]:
        """i32[r]  1: the model's own favourite; 0 where not asked for."""
        return self._scores().ranks

    @property
    def top(self) -> list[list[tuple[int, float]] | None]:
        """Per row, the most likely (id, logprob); None where not asked for."""
        return self._scores().top

    def put(self, draws: Sequence[int], part: SampledTokens) -> None:
        """Fill in some of the draws."""
        self.token_ids[draws] = part.token_ids
        if part.scores is not None:
            self.put_scores(draws, part.scores)
        for index, error in part.errors.items():
            self.errors[draws[index]] = error

    def put_scores(self, draws: Sequence[int] | NDArray[Any], part: TokenLogprobs) -> None:
        """Fill in the scores of some of the draws."""
        if self.scores is None:
            self.scores = TokenLogprobs.empty(len(self.token_ids))
        self.scores.put(draws, part)

    def _scores(self) -> TokenLogprobs:
        return TokenLogprobs.empty(len(self.token_ids)) if self.scores is None else self.scores


class Sampler:
    """Draws the next tokens of a batch with the parameters that a `SamplingTable` holds for each slot."""

    def __init__(self, vocab_size: int, table: SamplingTable) -> None:
        self.vocab_size = vocab_size
        self.table = table

    @_quiet
    def sample(
        self,
        logits: Array,  # f32[r, vocab]  not changed
        slots: Any,  # i32[r]  on the host
        positions: Any,  # i64[r]  index of the token to be drawn in its sequence: prompt + output before it
        pending: Sequence[Sequence[int]] | None = None,
    ) -> SampledTokens:
        """Draw one token for each row.

        `pending[row]` are tokens that precede the drawn one and are not in the sequence's output list yet (drafts).
        """
        slots, positions = np.asarray(slots, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        plain = self._plain_greedy(logits, slots)
        if plain is not None:
            return plain
        logits = _single_precision(logits)
        work, errors = self._edited(logits, slots, pending)
        token_ids = np.full(len(slots), NOTHING, dtype=np.int32)
        greedy = self.table.temperature[slots] == 0.0
        filtered = self.table.is_filtered[slots]
        for rows in _chunks(np.flatnonzero(greedy), work):
            token_ids[rows] = greedy_tokens(_rows(work, rows))
        for rows in _chunks(np.flatnonzero(~greedy & ~filtered), work):
            token_ids[rows] = self._draw_plain(_rows(work, rows), slots[rows], positions[rows])
        for rows in self._filter_groups(slots, filtered, work):
            token_ids[rows] = self._draw_filtered(_rows(work, rows), slots[rows], positions[rows])
        return self._outcome(logits, slots, token_ids, {**errors})

    def _plain_greedy(self, logits: Array, slots: NDArray[Any]) -> SampledTokens | None:
        """The usual greedy step on the CPU in two numpy calls; None for anything else."""
        table = self.table
        if not isinstance(logits, np.ndarray) or table.temperature[slots].any() or table.is_edited[slots].any():
            return None
        if (table.num_logprobs[slots] >= 0).any():
            return None
        best = logits.argmax(axis=-1)
        if not np.isfinite(logits[np.arange(len(best)), best]).all():
            return None
        outcome = SampledTokens.unknown(len(best))
        outcome.token_ids = best.astype(np.int32)
        return outcome

    @_quiet
    def probabilities(
        self, logits: Array, slots: Any, positions: Any = None, pending: Sequence[Sequence[int]] | None = None
    ) -> Array:
        """f32[r, vocab]: the distribution each row is drawn from; greedy rows are one-hot.

        XTC depends on the noise of the position; without positions it is left out. Rows of which everything is
        excluded are 0.
        """
        xp = array_namespace(logits)
        values, kept = self._final(logits, slots, positions, pending)
        values = xp.where(kept, values, xp.full_like(values, -float("inf")))
        total = xp.astype(xp.sum(to_weights(values), axis=-1, keepdims=True), xp.float64) / ONE
        return xp.exp(values) / xp.astype(xp.where(total > 0.0, total, xp.ones_like(total)), xp.float32)

    @_quiet
    def process_logits(
        self, logits: Array, slots: Any, positions: Any = None, pending: Sequence[Sequence[int]] | None = None
    ) -> Array:
        """f32[r, vocab]: logits after all options, shifted so that the largest is 0; -inf where excluded."""
        xp = array_namespace(logits)
        values, kept = self._final(logits, slots, positions, pending)
        return xp.where(kept, values, xp.full_like(values, -float("inf")))

    def edit(self, logits: Array, slots: Any) -> Array:
        """f32[r, vocab] after steps 1 to 8; a row that fails raises its `RequestError`."""
        work, errors = self._edited(_single_precision(logits), _host(slots), None)
        if errors:
            raise next(iter(errors.values()))
        return work

    def _edited(
        self, logits: Array, slots: NDArray[Any], pending: Sequence[Sequence[int]] | None
    ) -> tuple[Array, dict[int, RequestError]]:
        """The logits after steps 1 to 8 (a copy if anything changes), and the rows that failed."""
        rows = np.flatnonzero(self.table.is_edited[slots])
        if not len(rows):
            return logits, {}
        edits = Edits()
        for row in rows.tolist():
            state = self.table.states[slots[row]]
            if state is not None:
                edits.gather(row, state, pending[row] if pending else (), self.vocab_size)
        changed = array_namespace(logits).asarray(logits, copy=True)
        return changed, edits.apply(changed)

    def _draw_plain(self, logits: Array, slots: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
        weights = cooled_weights(*cleaned(logits), self.table.temperature[slots])
        return _draw(weights, uniform(self.table.seed[slots], positions))

    def _draw_filtered(self, logits: Array, slots: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any]:
        xp = array_namespace(logits)
        seeds = self.table.seed[slots]
        uses_xtc = bool(self.table.xtc_probability[slots].any())
        filters = Filters.of(self.table, slots, uniform(seeds, positions, STREAM_XTC) if uses_xtc else None)
        found = filter_rows(logits, self.table.temperature[slots], filters)
        index = _draw(found.weights, uniform(seeds, positions))
        ids = xp.take_along_axis(found.ids, xp.asarray(np.maximum(index, 0)[:, None], device=device(logits)), axis=-1)
        return np.where(index < 0, NOTHING, to_host(ids[:, 0]))

    def _filter_groups(self, slots: NDArray[Any], filtered: NDArray[Any], like: Array) -> Iterator[NDArray[Any]]:
        """Rows with filters, those with a top-k apart: both kinds find their candidates in different ways."""
        has_top_k = self.table.top_k[slots] < self.vocab_size
        for kind in (has_top_k, ~has_top_k):
            yield from _chunks(np.flatnonzero(filtered & kind), like)

    def _final(
        self, logits: Array, slots: Any, positions: Any, pending: Sequence[Sequence[int]] | None
    ) -> tuple[Array, Array]:
        """(f32[r, vocab] shifted logits over temperature, bool[r, vocab] whether the token may be drawn)."""
        xp, slots = array_namespace(logits), _host(slots)
        work, _ = self._edited(_single_precision(logits), slots, pending)
        noise = None if positions is None else uniform(self.table.seed[slots], _host(positions), STREAM_XTC)
        values = xp.asarray(work, copy=True)
        kept = xp.zeros(work.shape, dtype=xp.bool, device=device(work))
        greedy, filtered = self.table.temperature[slots] == 0.0, self.table.is_filtered[slots]
        for row in np.flatnonzero(greedy).tolist():
            values[row : row + 1, :] = shift(work[row : row + 1, :])
            winner = int(greedy_tokens(work[row : row + 1, :])[0])
            if winner != NOTHING:
                kept[row, winner] = True
        for rows in _chunks(np.flatnonzero(~greedy & ~filtered), work):
            index = xp.asarray(rows, device=device(work))
            cooled = cool(_rows(work, rows), self.table.temperature[slots[rows]])
            values[index, :], kept[index, :] = cooled, cooled > -float("inf")
        for rows in self._filter_groups(slots, filtered, work):
            index = xp.asarray(rows, device=device(work))
            part, temperature = _rows(work, rows), self.table.temperature[slots[rows]]
            values[index, :] = cool(part, temperature)
            found = filter_rows(
                part, temperature, Filters.of(self.table, slots[rows], None if noise is None else noise[rows])
            )
            where = xp.broadcast_to(index[:, None], found.kept.shape)
            kept[where[found.kept], found.ids[found.kept]] = True
        return values, kept

    def _outcome(
        self, logits: Array, slots: NDArray[Any], token_ids: NDArray[np.int32], errors: dict[int, BifolioError]
    ) -> SampledTokens:
        for row in np.flatnonzero(token_ids == NOTHING).tolist():
            errors.setdefault(row, no_token_error(logits[row, :]))
        for row in errors:
            token_ids[row] = NOTHING
        outcome = SampledTokens.unknown(len(slots))
        outcome.token_ids, outcome.errors = token_ids, errors
        wanted = self.table.num_logprobs[slots]
        for rows in _chunks(np.flatnonzero((wanted >= 0) & (token_ids >= 0)), logits):
            outcome.put_scores(rows, score_tokens(_rows(logits, rows), token_ids[rows], wanted[rows]))
        return outcome


def no_token_error(logits: Array) -> RequestError | ModelOutputError:
    """The reason why no token follows the positions with these logits: f32[..., vocab], as the network gave them."""
    if not bool(array_namespace(logits).any(array_namespace(logits).isfinite(logits))):
        return ModelOutputError(NO_FINITE_LOGIT)
    return RequestError(
        "no token can follow: the request's allowed tokens, grammar, bad words or logits processors exclude the whole "
        "vocabulary here"
    )


@_quiet
def prompt_logprobs(logits: Array, next_ids: Any, num_top: int) -> TokenLogprobs:
    """Logprobs of the prompt's tokens: f32[t, vocab] logits at each position, i64[t] the token that follows it."""
    logits = _single_precision(logits)
    ids = _host(next_ids)
    whole = TokenLogprobs.empty(len(ids))
    for rows in _chunks(np.arange(len(ids)), logits):
        whole.put(rows, score_tokens(_rows(logits, rows), ids[rows], np.full(len(rows), num_top)))
    return whole


def _single_precision(logits: Array) -> Array:
    xp = array_namespace(logits)
    return xp.astype(logits, xp.float32, copy=False)


def _host(values: Any) -> NDArray[np.int64]:
    return np.asarray(to_host(values), dtype=np.int64)


def _chunks(rows: NDArray[Any], like: Array) -> Iterator[NDArray[Any]]:
    """`rows` in pieces: on the CPU such that a piece stays in the cache, on a device such that it is worth a launch."""
    elements = 1 << 19 if is_numpy(like) else 1 << 26
    size = max(1, elements // like.shape[-1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _rows(logits: Array, rows: NDArray[Any]) -> Array:
    """Those rows, without a copy where they lie together."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return logits[first : last + 1, :]
    return logits[array_namespace(logits).asarray(rows, device=device(logits)), :]


def greedy_tokens(logits: Array) -> NDArray[Any]:
    """i64[r]: the largest logit's index, the lowest among equals; -1 where there is none."""
    xp = array_namespace(logits)
    best = xp.argmax(logits, axis=-1)
    values = to_host(xp.take_along_axis(logits, best[:, None], axis=-1)[:, 0])
    token_ids = np.array(to_host(best))
    for row in np.flatnonzero(~np.isfinite(values)):
        cleaned = shift(logits[int(row) : int(row) + 1, :])
        index = int(xp.argmax(cleaned, axis=-1)[0])
        token_ids[row] = index if float(cleaned[0, index]) == 0.0 else NOTHING
    return token_ids


def _draw(weights: Array, noise: NDArray[np.float64]) -> NDArray[Any]:
    """i64[r]: the drawn index; -1 in rows without any weight."""
    xp = array_namespace(weights)
    index = draw(weights, noise)
    return np.where(to_host(xp.max(weights, axis=-1)) > 0, to_host(index), NOTHING)
