"""How many guesses pay: acceptance is measured, and so is what passes with more rows cost.

Guesses of one kind (an n-gram match of some size; a draft model's) are right about as often as those before them. A
step with guesses gives more tokens and takes longer; the lengths with the most tokens per second win, and none at all
is among the choices.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Lengths = dict[int, int]  # kind of guess -> how many of it


class Offer(NamedTuple):
    """Guesses that a sequence could have."""

    length: int  # at most this many
    kind: int
    num_behind: int = 0  # tokens that a draft model must catch up with before it can guess


class PassCosts:
    """Seconds of a model's pass by its number of rows, as measured; interpolated between, and carried on beyond."""

    ROW_SHARE = 0.01  # of a pass: what a row costs before two sizes were measured. Low: trying finds out
    # How far one measurement moves the cost: what disturbs a pass only ever makes it longer, sometimes much longer.
    FASTER, SLOWER, LONGEST = 0.5, 0.1, 1.5

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []  # sorted keys of `_seconds`
        self._first: dict[int, float] = {}  # what was measured once: that pass may have been a cold one

    def observe(self, num_rows: int, seconds: float) -> None:
        size = _rounded(num_rows)
        known = self._seconds.get(size)
        if known is not None:
            change = min(seconds, self.LONGEST * known) - known
            self._seconds[size] = known + change * (self.FASTER if change < 0 else self.SLOWER)
        elif size in self._first:
            self._seconds[size] = min(seconds, self._first.pop(size))
            insort(self._sizes, size)
        else:
            self._first[size] = seconds

    @property
    def largest(self) -> int:
        """Rows of the largest pass that was measured; 0: none was."""
        return self._sizes[-1] if self._sizes else 0

    def knows(self, num_rows: int) -> bool:
        return _rounded(num_rows) in self._seconds

    def seconds(self, num_rows: int) -> float:
        if not self._sizes:
            return 1.0 + self.ROW_SHARE * num_rows
        if len(self._sizes) == 1:
            size = self._sizes[0]
            return self._seconds[size] * (1.0 + self.ROW_SHARE * num_rows) / (1.0 + self.ROW_SHARE * size)
        above = min(max(bisect_left(self._sizes, num_rows), 1), len(self._sizes) - 1)
        low, high = self._sizes[above - 1], self._sizes[above]
        cost = self._seconds[low]
        slope = max((self._seconds[high] - cost) / (high - low), 0.0)
        return max(cost + slope * (num_rows - low), 0.1 * cost)


def _rounded(num_rows: int) -> int:
    """To four binary digits: sizes that differ little cost about the same."""
    step = 1 << max(num_rows.bit_length() - 4, 0)
    return (num_rows + step // 2) // step * step


class Acceptance:
    """How often guesses were right lately, by kind and by place in the draft, given that those before were right."""

    PRIOR, MEMORY = 0.6, 20  # trials that are remembered

    def __init__(self) -> None:
        self._chances: dict[tuple[int, int], float] = {}
        self._trials: Counter[tuple[int, int]] = Counter()

    def observe(self, kind: int, num_guessed: int, num_right: int) -> None:
        """Every guess up to the first wrong one is a trial."""
        for place in range(min(num_right + 1, num_guessed)):
            key = (kind, place)
            self._trials[key] = min(self._trials[key] + 1, self.MEMORY)
            known = self.chance(kind, place)
            self._chances[key] = known + (float(place < num_right) - known) / (2 + self._trials[key])

    def chance(self, kind: int, place: int) -> float:
        for known in range(place, -1, -1):
            if (kind, known) in self._chances:
                return self._chances[kind, known]
        return self.PRIOR


@dataclass(slots=True)
class DraftLengths:
    """Chooses, step by step."""

    longest: int
    adaptive: bool = True
    drafting: PassCosts | None = None  # of the draft model; None: guesses cost nothing to make
    relative_cost: float = 0.0  # of a pass of the draft model, until `drafting` was measured
    steps: PassCosts = field(default_factory=PassCosts)  # of the model itself
    acceptance: Acceptance = field(default_factory=Acceptance)
    _num_unused: int = 0  # steps in a row whose offers were not taken

    PROBE_EVERY = 64  # steps without guesses before one is tried again: texts change
    REST = 16  # steps for which nothing is looked at where guesses cannot pay
    HOPE = 0.9  # acceptance that is thought possible: where even this does not pay, nothing is tried
    GAIN = 1.05  # less is within the noise of the measured costs
    HORIZON = 64  # tokens over which catching up must pay for itself

    def choose(self, num_sequences: int, offers: Sequence[Offer], tokens_left: int) -> tuple[Lengths, bool]:
        """(lengths by kind, whether those that are behind take part); `tokens_left`: of an average sequence."""
        if not self.steps.knows(num_sequences):
            return {}, False  # first what it costs without
        ready = [offer for offer in offers if not offer.num_behind]
        best, lengths, all_join = self.GAIN, Lengths(), False
        for joining in (ready, offers) if len(ready) < len(offers) else (ready,):
            gain, found = self._best(num_sequences, joining, tokens_left, self.acceptance.chance)
            if gain > best:
                best, lengths, all_join = gain, found, joining is offers
        if lengths:
            self._num_unused = 0
        return lengths, all_join

    def declined(self, num_sequences: int, offers: Sequence[Offer], tokens_left: int) -> tuple[bool, int]:
        """After no length paid: (whether it is time to try one all the same, steps to rest for)."""
        if not self.steps.knows(num_sequences):
            return False, 0
        hopeful = self._best(num_sequences, offers, tokens_left, lambda kind, place: self.HOPE)[0] > self.GAIN
        if hopeful and self._num_unused >= self.PROBE_EVERY:
            self._num_unused = 0
            return True, 0
        rest = 0 if hopeful and self.drafting is None else self.REST  # the next n-gram may be a better one
        self._num_unused += 1 + rest
        return False, rest

    def _best(
        self, num_sequences: int, offers: Sequence[Offer], tokens_left: int, chance: Callable[[int, int], float]
    ) -> tuple[float, Lengths]:
        """(the most times as fast as without guesses, the lengths that give it). Likely guesses come first."""
        counts = Counter((offer.kind, place) for offer in offers for place in range(min(offer.length, self.longest)))
        gains: dict[tuple[int, int], float] = {}
        for kind, place in sorted(counts):
            gains[kind, place] = gains.get((kind, place - 1), 1.0) * chance(kind, place)
        plain = num_sequences / self.steps.seconds(num_sequences)
        num_behind = sum(offer.num_behind for offer in offers)
        tokens, rows = float(num_sequences), num_sequences
        best, lengths, best_lengths = 1.0, Lengths(), Lengths()
        for (kind, place), gain in sorted(gains.items(), key=lambda item: (-item[1], item[0])):
            tokens += counts[kind, place] * gain
            rows += counts[kind, place]
            if rows > 2 * self.steps.largest:
                break  # the unknown is entered step by step
            lengths[kind] = place + 1
            seconds = self.steps.seconds(rows) + self._draft_seconds(len(offers), max(lengths.values()))
            if num_behind:
                num_steps = max(min(self.HORIZON, tokens_left) * num_sequences / tokens, 1.0)
                seconds += self._pass_seconds(num_behind) / num_steps
            if tokens / seconds / plain > best:
                best, best_lengths = tokens / seconds / plain, dict(lengths)
        return best, best_lengths

    def _draft_seconds(self, num_sequences: int, length: int) -> float:
        return length * self._pass_seconds(num_sequences)

    def _pass_seconds(self, num_rows: int) -> float:
        if self.drafting is None:
            return 0.0
        if self.drafting.largest:
            return self.drafting.seconds(num_rows)
        return self.relative_cost * self.steps.seconds(num_rows)
