"""Speculative decoding: guess several tokens, verify them in one pass, keep those that would have come anyway.

Verification draws the token of every guessed position exactly as plain decoding would, with the noise that belongs to
the position, and keeps guesses as long as they equal what was drawn. So the output is the plain run's, token for token,
sampled or greedy: speculation changes speed and nothing else. (For a guess that is a single token this accepts as often
as rejection sampling does: with the target's probability of the token.)

    |<---- known ---->|<- guesses ->|
    computed ......... x  g1 g2 g3       one pass over x g1 g2 g3 gives the draws d1 d2 d3 d4
                       ^ last known      g1 = d1, g2 = d2, g3 ≠ d3: d1 d2 d3 are kept, the cache is cut behind g2
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from typing import Protocol

from bifolio.config import SpeculativeConfig
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.sequence import Sequence


class Drafter(Protocol):
    """Where guesses come from."""

    def room(self, sequences: list[Sequence], length: int) -> dict[int, int]:
        """For how many guesses each sequence (by id) wants slots; at most `length`."""
        ...

    def fill(self, items: Sequences[ScheduledSequence]) -> list[tuple[int, ...]]:
        """The guesses for scheduled decodes, as many as room was made for."""
        ...

    def forget(self, sequence: Sequence) -> None: ...


class NgramDrafter:
    """Prompt lookup: what followed the last time these same few tokens occurred will follow again."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._sizes = range(config.ngram_max, config.ngram_min - 1, -1)  # long matches first: they are right more often
        self._indexes: dict[int, _NgramIndex] = {}
        self._guesses: dict[int, tuple[int, ...]] = {}

    def room(self, sequences: list[Sequence], length: int) -> dict[int, int]:
        self._guesses = {}
        for sequence in sequences:
            index = self._indexes.get(sequence.id)
            if index is None:
                index = self._indexes[sequence.id] = _NgramIndex(self._sizes)
            guess = index.guess(sequence.token_ids, length)
            if guess:
                self._guesses[sequence.id] = guess
        return {sequence_id: len(guess) for sequence_id, guess in self._guesses.items()}

    def fill(self, items: Sequences[ScheduledSequence]) -> list[tuple[int, ...]]:
        return [self._guesses.get(item.sequence.id, ())[: item.num_new - 1] for item in items]

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.id, None)


class _NgramIndex:
    """Where each n-gram of one sequence ended last; grows with the sequence."""

    __slots__ = ("_ends", "_num_indexed", "_sizes")

    def __init__(self, sizes: Sequences[int]) -> None:
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def guess(self, tokens: list[int], length: int) -> tuple[int, ...]:
        """Up to `length` tokens that followed the latest earlier occurrence of the longest matching end."""
        for end in range(self._num_indexed + 1, len(tokens)):  # the n-gram at the very end is not its own precedent
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
        for size in self._sizes:
            found = self._ends.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if found is not None:
                return tuple(tokens[found : found + length])
        return ()


@dataclass(slots=True)
class DraftLengths:
    """How many guesses pay: acceptance is measured, and so is what a step with more rows costs.

    A step over r rows takes about `fixed + per_row * r` seconds (fitted to recent steps). With acceptance p, k guesses
    give 1 + p + ... + p^k tokens. The k with the most tokens per second wins, and 0 is among the choices.
    """

    longest: int
    adaptive: bool = True
    acceptance: float = 0.7  # prior; moves with every verified guess
    _rows: list[float] = field(default_factory=lambda: [0.0] * 5)  # decayed sums: 1, r, t, rr, rt
    _since_probe: int = 0

    PROBE_EVERY = 64  # steps without guesses before one is tried again: texts change

    def choose(self, num_sequences: int) -> int:
        if not self.adaptive:
            return self.longest
        fixed, per_row = self._cost()
        best, best_rate = 0, 0.0
        tokens = 0.0
        for k in range(self.longest + 1):
            tokens += self.acceptance**k
            rate = tokens / (fixed + per_row * num_sequences * (1 + k))
            if rate > best_rate * (1.0 if k == 0 else 1.02):  # a gain within the noise is none
                best, best_rate = k, rate
        if best == 0:
            self._since_probe += 1
            if self._since_probe >= self.PROBE_EVERY:
                self._since_probe = 0
                return 1
        return best

    def observe_verification(self, num_guessed: int, num_accepted: int) -> None:
        """Every guess up to the first wrong one is a trial."""
        for trial in range(min(num_accepted + 1, num_guessed)):
            self.acceptance += 0.05 * (float(trial < num_accepted) - self.acceptance)
        self.acceptance = min(max(self.acceptance, 0.02), 0.98)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        decay = 0.98
        values = (1.0, num_rows, seconds, num_rows * num_rows, num_rows * seconds)
        self._rows = [decay * old + new for old, new in zip(self._rows, values, strict=True)]

    def _cost(self) -> tuple[float, float]:
        """(seconds of any step, seconds of each row); rows count as cheap until they were measured."""
        n, r, t, rr, rt = self._rows
        if n < 4:
            return 1.0, 0.01
        variance = rr / n - (r / n) ** 2
        if variance < 1e-9:
            return max(t / n, 1e-9), 0.02 * max(t / n, 1e-9) / max(r / n, 1.0)
        per_row = max((rt / n - r * t / n / n) / variance, 0.0)
        fixed = max(t / n - per_row * r / n, 0.05 * t / n)
        return fixed, per_row


def num_accepted(guesses: Sequences[int], drawn: Sequences[int]) -> int:
    """How many leading guesses equal what was drawn."""
    for index, guess in enumerate(guesses):
        if drawn[index] != guess:
            return index
    return len(guesses)


@dataclass(slots=True)
class SpeculativeStats:
    """Totals since the start."""

    num_drafts: int = 0  # passes that verified guesses
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class Speculator:
    """Joins a drafter, the choice of lengths, and the statistics; the engine talks to this."""

    def __init__(self, config: SpeculativeConfig, drafter: Drafter, max_model_len: int) -> None:
        self.drafter = drafter
        self.lengths = DraftLengths(config.length, config.adaptive)
        self.stats = SpeculativeStats()
        self._max_model_len = max_model_len

    def room(self, sequences: list[Sequence]) -> dict[int, int]:
        """Slots wanted for guesses, by sequence id; sequences of a search do not guess."""
        eligible = [sequence for sequence in sequences if sequence.group is None and self._most(sequence) > 0]
        length = self.lengths.choose(len(sequences)) if eligible else 0
        if length == 0:
            return {}
        wanted = self.drafter.room(eligible, length)
        most = {sequence.id: self._most(sequence) for sequence in eligible}
        return {sequence_id: min(count, most[sequence_id]) for sequence_id, count in wanted.items()}

    def fill(self, plan: StepPlan) -> StepPlan:
        """The plan with its guesses; the draft model runs here."""
        items = [item for item in plan.decodes if item.num_new > 1]
        if not items:
            return plan
        guesses = dict(zip((item.slot for item in items), self.drafter.fill(items), strict=True))
        decodes = tuple(item._replace(drafts=guesses.get(item.slot, ())) for item in plan.decodes)
        return replace(plan, decodes=decodes)

    def observe(self, num_guessed: int, num_right: int) -> None:
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += num_guessed
        self.stats.num_accepted_tokens += num_right
        self.lengths.observe_verification(num_guessed, num_right)

    def _most(self, sequence: Sequence) -> int:
        """Guesses that can still be of use before a limit is reached."""
        left = sequence.request.max_tokens - len(sequence.output_token_ids) - 1
        return min(left, self._max_model_len - sequence.num_tokens)
