"""`GrammarMask`: the tokens that a grammar allows next for one sequence, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_MASK_SECONDS = 0.4  # CPU time of one mask on the engine's thread
MEAN_MASK_SECONDS = 0.02  # of all masks of a sequence, beyond a first second
CHEAP_SECONDS = 0.001  # CPU time of a mask that may be computed with others
MOST_FORCED = 256  # tokens that are appended at a time
MOST_PROOFS = 64  # cheap masks in a row that a sequence must show before it joins others again


class GrammarMask:
    """Implements `TokenMask`.

    The state is a function of the tokens, not of the calls: it follows the list as the engine appends to it and cuts
    it; tokens that are exchanged (beams) are announced with `restart`. Drafts are given with each call.

        consumed  |<-------- settled -------->|<- drafts of the last call ->|
        target    |<-------- output, unchanged -------->|<- new output ->|<- pending ->|

    The time of a mask is measured and charged, unless it `joins` others (`sampling.joint_masks`): only sequences whose
    last masks were cheap do. After a joint call that took too long each of its sequences is measured by itself again,
    for twice as many masks as the time before, so that the grammar that caused it is charged.
    """

    __slots__ = (
        "_consumed", "_is_over_budget", "_matcher", "_needed", "_num_cheap", "_num_masks", "_output", "_seconds",
        "_settled", "last_seconds", "num_words",
    )  # fmt: skip

    def __init__(self, matcher: Any, output_token_ids: list[int], num_words: int) -> None:
        self._matcher = matcher  # an llguidance.LLMatcher
        self._output = output_token_ids
        self.num_words = num_words  # 32 tokens each
        self._consumed: list[int] = []  # the tokens that the matcher was fed
        self._settled = 0  # of them, tokens that were in the output at the last call
        self._seconds, self._num_masks, self._is_over_budget = 0.0, 0, False
        self.last_seconds = 0.0  # of the last mask that was measured
        self._num_cheap, self._needed = 0, 1  # measured masks in a row that were cheap; how many it takes to join

    def allowed(self, pending: Sequence[int]) -> NDArray[Any]:
        """Bits of the tokens that may follow; all are set behind a draft that broke the grammar: it is cut anyway.

        A grammar that has cost more time than its budget allows no token, which ends its request with an error.
        """
        if self._is_over_budget:
            return _all(False)
        began = time.thread_time()
        bits = self._allowed(pending)
        self.last_seconds = seconds = time.thread_time() - began
        self._seconds += seconds
        self._num_masks += 1
        self._num_cheap = self._num_cheap + 1 if seconds < CHEAP_SECONDS else 0
        mean_limit = 1.0 + MEAN_MASK_SECONDS * self._num_masks
        self._is_over_budget = seconds > MAX_MASK_SECONDS or self._seconds > mean_limit
        return _all(False) if self._is_over_budget else bits

    def restart(self) -> None:
        """Compare all tokens with the output at the next call: some were exchanged."""
        self._settled = 0

    def forced(self) -> list[int]:
        """The tokens that must follow the output: at each of them the mask has no other; the caller appends them."""
        began, found = time.thread_time(), []
        if not self._is_over_budget and self._go_to(()):
            for token in self._matcher.compute_ff_tokens()[:MOST_FORCED]:
                if self._only_token() != token or self._matcher.try_consume_tokens([token]) != 1:
                    break
                found.append(token)
            self._consumed += found
            if self._matcher.is_stopped() and (end := self._only_token()) is not None:
                found.append(end)
        self._seconds += time.thread_time() - began
        self._num_masks += len(found)
        return found

    # -- masks of several sequences together ------------------------------------------------------------------------
    @property
    def joins(self) -> bool:
        """Whether its next mask may be computed with others, without a measurement of its own."""
        return self._num_cheap >= self._needed and not self._is_over_budget

    def advance(self) -> Any:
        """Consume the new tokens; the matcher whose mask is next, None where `allowed` must be called instead."""
        return self._matcher if self._go_to(()) else None

    def next_job(self) -> tuple[Any, int] | None:
        """(matcher, token) if one new token alone is not consumed, the usual case; None: call `advance`."""
        output, matcher = self._output, self._matcher
        if self._settled != len(self._consumed) or self._settled != len(output) - 1 or matcher.is_stopped():
            return None  # a stopped matcher would consume the end of the text once more
        return matcher, output[-1]

    def accepts(self, token: int) -> bool:
        """Whether the grammar allows the token behind the output; it then consumes it, and the caller appends it."""
        return not self._is_over_budget and self._go_to((token,))

    def suspect(self) -> None:
        """Measure the next masks one by one again: something has taken too long."""
        self._num_cheap, self._needed = 0, min(2 * self._needed, MOST_PROOFS)

    def consumed(self, token: int) -> None:
        """The matcher has consumed the token of `next_job`."""
        self._consumed.append(token)
        self._settled += 1

    def joined(self, was_slow: bool) -> bool:
        """Count a mask that was computed with others; False if the grammar failed: no token may follow."""
        self._num_masks += 1
        if was_slow:
            self.suspect()
        return not self._matcher.is_error()

    # -- details ----------------------------------------------------------------------------------------------------
    def _only_token(self) -> int | None:
        """The token that the mask allows, if it is a single one."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        [places] = np.nonzero(bits)
        if self._matcher.is_error() or len(places) != 1:
            return None
        byte = int(bits[places[0]])
        return None if byte & (byte - 1) else 8 * int(places[0]) + byte.bit_length() - 1

    def _allowed(self, pending: Sequence[int]) -> NDArray[Any]:
        if not self._go_to(pending):
            broken = len(self._consumed) >= len(self._output) and not self._matcher.is_error()
            return _all(broken)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return _all(False) if self._matcher.is_error() else bits

    def _go_to(self, pending: Sequence[int]) -> bool:
        """Feed or take back tokens until exactly output and `pending` were consumed; False if the grammar forbids one.

        Tokens that were settled are not compared again, so a mask costs its new tokens and not the whole text.
        """
        output, consumed = self._output, self._consumed
        if not pending and self._settled == len(consumed) == len(output) - 1:  # one more token, the usual case
            new = output[-1:]
            if self._matcher.try_consume_tokens(new) == 1:
                consumed += new
                self._settled += 1
                return not self._matcher.is_error()
            return False
        start = self._settled if self._settled <= len(output) else 0
        rest = [*output[start:], *pending]
        shared = _common_length(consumed[start:], rest)
        surplus = len(consumed) - start - shared
        if surplus:
            self._matcher.rollback(surplus)
            del consumed[start + shared :]
        if shared < len(rest):
            consumed += rest[shared : shared + self._matcher.try_consume_tokens(rest[shared:])]
        self._settled = min(len(consumed), len(output))
        return len(consumed) == start + len(rest) and not self._matcher.is_error()


def _all(value: bool) -> NDArray[np.uint8]:
    return np.full(1 << 16, 255 if value else 0, dtype=np.uint8)  # longer than any vocabulary's bits


def _common_length(left: list[int], right: list[int]) -> int:
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return next(index for index in range(limit) if left[index] != right[index])
