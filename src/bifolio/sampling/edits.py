"""Changes to single logits before anything is filtered: bias, penalties, bans, masks, the user's own functions.

The changes of all rows are collected on the host as lists of (row, token, number) and applied with one indexed
operation for each kind, so that a batch on a GPU costs a handful of launches whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.arrays import array_namespace
from bifolio.errors import RequestError
from bifolio.kernels.logit_edits import MAX_ENDS, LogitEdits
from bifolio.sampling.repetition import dry_matches, dry_penalties, ngram_bans, word_bans
from bifolio.sampling.table import SlotOptions
from bifolio.sampling.weights import Array, device

LOWEST = -3.4028234663852886e38  # a penalty makes a token unlikely, never impossible


class _Entries:
    """(row, token id, number) triples, collected row by row."""

    __slots__ = ("_amounts", "_ids", "_rows")

    def __init__(self) -> None:
        self._rows: list[NDArray[np.int64]] = []
        self._ids: list[NDArray[np.int64]] = []
        self._amounts: list[NDArray[np.float32]] = []

    def add(self, row: int, ids: Any, amounts: Any) -> None:
        index = np.asarray(ids, dtype=np.int64)
        if len(index):
            self._rows.append(np.full(len(index), row, dtype=np.int64))
            self._ids.append(index)
            self._amounts.append(np.broadcast_to(np.asarray(amounts, dtype=np.float32), index.shape))

    def on_device_of(self, logits: Array) -> tuple[Array, Array, Array] | None:
        """(i64[e] rows, i64[e] ids, f32[e] numbers) beside the logits, or None when there are none."""
        if not self._rows:
            return None
        xp, where = array_namespace(logits), device(logits)
        columns = (np.concatenate(column) for column in (self._rows, self._ids, self._amounts))
        rows, ids, amounts = (xp.asarray(column, device=where) for column in columns)
        return rows, ids, amounts


class Edits:
    """All changes for one batch, gathered with `gather` and carried out with `apply`.

    The order is that of transformers, with our own options put where they belong: logit bias; repetition penalty;
    presence, frequency and DRY penalties; bans (n-grams, bad words, ends before min_tokens); the user's processors;
    and last the masks (allowed tokens and grammar), which therefore hold whatever came before.
    """

    def __init__(self) -> None:
        self._bias = _Entries()
        self._repetition = _Entries()
        self._penalties = _Entries()
        self._dry = _Entries()
        self._bans = _Entries()
        self._users: list[tuple[int, SlotOptions, Sequence[int]]] = []
        self._masks: list[tuple[int, NDArray[np.bool_]]] = []

    def gather(self, row: int, state: SlotOptions, pending: Sequence[int], vocab_size: int) -> None:
        """Collect the changes that the parameters and the history of one sequence require."""
        params, history = state.params, state.history
        self._bias.add(row, state.bias_ids, state.bias_amounts)
        if params.repetition_penalty != 1.0:
            self._repetition.add(row, history.seen(pending), params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = history.output_counts(pending)
            self._penalties.add(row, ids, params.presence_penalty + params.frequency_penalty * counts)
        if params.dry_multiplier:
            self._gather_dry(row, state, pending)
        if params.no_repeat_ngram_size:
            self._bans.add(row, ngram_bans(history.tokens(pending), params.no_repeat_ngram_size), 0.0)
        if state.words:
            self._bans.add(row, word_bans(history.tokens(pending), state.words), 0.0)
        if history.num_output + len(pending) < params.min_tokens:
            self._bans.add(row, state.end_ids, 0.0)
        if state.processors:
            self._users.append((row, state, pending))
        mask = _combined_mask(state, pending, vocab_size)
        if mask is not None:
            self._masks.append((row, mask))

    def _gather_dry(self, row: int, state: SlotOptions, pending: Sequence[int]) -> None:
        params = state.params
        tokens = state.history.tokens(pending)
        window = tokens[max(0, len(tokens) - params.dry_range) :] if params.dry_range else tokens
        ids, lengths = dry_matches(window, state.breakers, params.dry_allowed_length)
        penalties = dry_penalties(lengths, params.dry_allowed_length, params.dry_multiplier, params.dry_base)
        self._dry.add(row, ids, penalties)

    def apply(self, logits: Array) -> dict[int, RequestError]:
        """Change f32[r, vocab] logits in place; returns the rows whose own processor failed, with the reason."""
        xp = array_namespace(logits)
        if entries := self._bias.on_device_of(logits):
            rows, ids, amounts = entries
            logits[rows, ids] = logits[rows, ids] + amounts
        if entries := self._repetition.on_device_of(logits):
            rows, ids, amounts = entries
            values = logits[rows, ids]
            changed = xp.where(values < 0, values * amounts, values / amounts)
            overflows = (values > -float("inf")) & (changed == -float("inf"))
            logits[rows, ids] = xp.where(overflows, xp.full_like(changed, LOWEST), changed)
        for kind in (self._penalties, self._dry):
            if entries := kind.on_device_of(logits):
                rows, ids, amounts = entries
                logits[rows, ids] = logits[rows, ids] - amounts
        if entries := self._bans.on_device_of(logits):
            logits[entries[0], entries[1]] = -float("inf")
        errors = self._apply_users(logits)
        self._apply_masks(logits)
        return errors

    def _apply_users(self, logits: Array) -> dict[int, RequestError]:
        errors: dict[int, RequestError] = {}
        for row, state, pending in self._users:
            try:
                logits[row, :] = _processed(logits[row, :], state, pending)
            except Exception as error:  # the user's code may raise anything; only this request may suffer
                errors[row] = RequestError(f"a logits processor of the request failed: {error!r}")
        return errors

    def _apply_masks(self, logits: Array) -> None:
        if not self._masks:
            return
        xp, where = array_namespace(logits), device(logits)
        rows = xp.asarray(np.array([row for row, _ in self._masks], dtype=np.int64), device=where)
        allowed = xp.asarray(np.stack([mask for _, mask in self._masks]), device=where)
        values = logits[rows, :]
        logits[rows, :] = xp.where(allowed, values, xp.full_like(values, -float("inf")))


def device_edits(state: SlotOptions) -> LogitEdits | None:
    """The edits of a slot as a device carries them out; None if an option is carried out on the host alone."""
    params = state.params
    end_ids = state.end_ids if params.min_tokens else state.end_ids[:0]
    if params.no_repeat_ngram_size or params.dry_multiplier or state.processors or len(end_ids) > MAX_ENDS:
        return None
    if any(len(word) > 1 for word in state.words):
        return None
    bias = dict(zip(state.bias_ids.tolist(), state.bias_amounts.tolist(), strict=True))
    if state.allowed is not None:
        bias = {token: bias.get(token, 0.0) for token in np.flatnonzero(state.allowed).tolist()}
    bias |= dict.fromkeys((word[0] for word in state.words), -float("inf"))
    return LogitEdits(
        bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
        bias_amounts=np.fromiter(bias.values(), np.float32, len(bias)),
        excludes_others=state.allowed is not None,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        end_ids=end_ids,
        min_length=len(state.history.prompt) + params.min_tokens if len(end_ids) else 0,
        has_mask=state.mask is not None,
    )


def _processed(row: Array, state: SlotOptions, pending: Sequence[int]) -> Array:
    """f32[vocab]: one row after the user's functions, which may keep or change their argument."""
    xp = array_namespace(row)
    values = xp.asarray(row, copy=True)
    prompt, output = state.history.prompt.tolist(), [*state.output_token_ids, *pending]
    for processor in state.processors:
        values = processor(prompt, output, values)
    result = xp.asarray(values, dtype=xp.float32, device=device(row))
    if result.shape != row.shape:
        raise ValueError(f"it returned the shape {tuple(result.shape)} instead of {tuple(row.shape)}")
    return result


def _combined_mask(state: SlotOptions, pending: Sequence[int], vocab_size: int) -> NDArray[np.bool_] | None:
    """bool[vocab]: tokens allowed by the list of allowed tokens and by the grammar; None without either."""
    if state.mask is None:
        return state.allowed
    grammar = _unpacked(np.asarray(state.mask.allowed(pending)), vocab_size)
    return grammar if state.allowed is None else grammar & state.allowed


def _unpacked(mask: NDArray[Any], vocab_size: int) -> NDArray[np.bool_]:
    """Masks come as booleans or as bits; tokens beyond the end of the mask are not allowed."""
    if mask.dtype != np.bool_:
        mask = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(np.bool_)
    full = np.zeros(vocab_size, dtype=np.bool_)
    full[: len(mask)] = mask[:vocab_size]
    return full
