"""Adaptive draft lengths, from measured acceptance rates and measured costs of passes with more rows.

Drafts of one kind (n-gram matches of one size; a draft model's) keep about the same acceptance rate. A step with drafts
yields more tokens and takes longer; the lengths with the most tokens per second are chosen, 0 included. Estimates may
be wrong, so the time that drafts did cost is counted as well (`Losses`): it stays within a share of recent steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Lengths = dict[int, int]  # kind of draft -> draft length


class Offer(NamedTuple):
    """Draft tokens available for a sequence."""

    length: int  # at most this many
    kind: int
    num_behind: int = 0  # tokens that a draft model must prefill before it can draft


class _Point(NamedTuple):
    """The cost of one size of pass where it was measured last."""

    seconds: float
    context: int  # tokens that its sequences had, in all


class PassCosts:
    """Measured seconds of a model's pass by its number of rows; interpolated between sizes, extrapolated beyond.

    A pass reads the contexts of its sequences, and each token of them adds about the same time, whatever the rows. It
    is the slope of a regression, by which a cost is carried over to longer and to shorter contexts.
    """

    ROW_SHARE = 0.01  # of a pass: assumed cost of a row before two sizes are measured; low, so that drafts are tried
    # Weights of one measurement: noise makes a pass longer, never shorter, sometimes much longer.
    FASTER, SLOWER, LONGEST = 0.5, 0.1, 1.5

    def __init__(self, needed: int = 2) -> None:
        """`needed`: measurements before a size is known, by the shortest of them: the first passes may be cold."""
        self._needed = needed
        self._points: dict[int, _Point] = {}
        self._sizes: list[int] = []  # sorted keys of `_points`
        self._first: dict[int, list[_Point]] = {}  # of sizes that are not known yet
        self._contexts = _ContextCost()

    def observe(self, num_rows: int, seconds: float, context: int = 0) -> None:
        """`context`: tokens that the sequences of the pass have, in all."""
        size = _rounded(num_rows)
        if size not in self._points:
            first = self._first.setdefault(size, [])
            first.append(_Point(seconds, context))
            if len(first) >= self._needed:
                self._points[size] = min(self._first.pop(size))
                insort(self._sizes, size)
            return
        known = self._cost(size, context)
        seconds = min(seconds, self.LONGEST * known)
        change, slower = seconds - known, self.SLOWER
        if context:  # until the cost of a context is known, passes become longer with it
            slower = max(slower, 2 / (2 + self._contexts.observe(size, seconds, context)))
        self._points[size] = _Point(known + change * (self.FASTER if change < 0 else slower), context)

    @property
    def largest(self) -> int:
        """Rows of the largest measured pass; 0 if there is none."""
        return self._sizes[-1] if self._sizes else 0

    def knows(self, num_rows: int) -> bool:
        return _rounded(num_rows) in self._points

    def seconds(self, num_rows: int, context: int = 0) -> float:
        if not self._sizes:
            return 1.0 + self.ROW_SHARE * num_rows
        if len(self._sizes) == 1:
            size = self._sizes[0]
            return self._cost(size, context) * (1.0 + self.ROW_SHARE * num_rows) / (1.0 + self.ROW_SHARE * size)
        above = min(max(bisect_left(self._sizes, num_rows), 1), len(self._sizes) - 1)
        low, high = self._sizes[above - 1], self._sizes[above]
        cost = self._cost(low, context)
        slope = max((self._cost(high, context) - cost) / (high - low), 0.0)
        return max(cost + slope * (num_rows - low), 0.1 * cost)

    def _cost(self, size: int, context: int) -> float:
        """Of a measured size."""
        seconds, measured = self._points[size]
        return max(seconds + self._contexts.slope * (context - measured), 0.3 * seconds)


class _ContextCost:
    """Seconds that one more token of context adds to a pass: a regression within each size of pass."""

    MEMORY = 64  # passes
    SPREAD = 64  # tokens: contexts that differ less say little beyond the noise

    def __init__(self) -> None:
        self.slope = 0.0
        self._means: dict[int, tuple[int, float, float]] = {}  # size -> number of passes, mean seconds, mean context
        self._products = 0.0  # of seconds and contexts, both less their means
        self._squares = 0.0  # of contexts

    def observe(self, size: int, seconds: float, context: int) -> int:
        """Returns the number of passes of this size that count."""
        number, mean_seconds, mean_context = self._means.get(size, (0, 0.0, 0.0))
        number = min(number + 1, self.MEMORY)
        more, longer = seconds - mean_seconds, context - mean_context
        self._means[size] = number, mean_seconds + more / number, mean_context + longer / number
        kept, weight = 1 - 1 / self.MEMORY, 1 - 1 / number
        self._products = kept * self._products + weight * more * longer
        self._squares = kept * self._squares + weight * longer * longer
        self.slope = max(self._products / (self._squares + self.SPREAD**2), 0.0)
        return number


def _rounded(num_rows: int) -> int:
    """Round to four binary digits: sizes that differ little cost about the same."""
    step = 1 << max(num_rows.bit_length() - 4, 0)
    return (num_rows + step // 2) // step * step


class Acceptance:
    """Recent acceptance rate by kind and by position in the draft, given that the tokens before were accepted."""

    PRIOR, MEMORY = 0.6, 20  # rate before the first trial, number of trials averaged over

    def __init__(self) -> None:
        self._chances: dict[tuple[int, int], float] = {}
        self._trials: Counter[tuple[int, int]] = Counter()

    @property
    def num_trials(self) -> int:
        """Draft tokens that are averaged over, of all kinds and positions."""
        return sum(self._trials.values())

    def observe(self, kind: int, num_guessed: int, num_right: int) -> None:
        """Count every draft token up to the first rejected one as a trial."""
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
class Losses:
    """Time that steps with drafts took longer than the plain steps for the same tokens, in plain steps.

    Losses of the last `HORIZON` steps count; while they exceed a share of these steps, no drafts are made.
    """

    num_steps: float = 100.0  # recent steps; the first ones are granted, so that drafts can be tried
    lost: float = 0.0

    SHARE = 0.015  # of the recent steps
    HORIZON = 512  # steps

    def count(self, num_steps: int) -> None:
        """Steps have passed: losses before them count less."""
        self.num_steps = min(self.num_steps + num_steps, self.HORIZON)
        self.lost *= (1 - 1 / self.HORIZON) ** num_steps

    def add(self, steps: float, tokens: float) -> None:
        """A step with drafts took as long as `steps` plain ones and gave the tokens of `tokens` plain ones."""
        self.lost = max(self.lost + steps - tokens, 0.0)

    @property
    def pause(self) -> int:
        """Steps until drafts may be made again; 0: now."""
        excess = self.lost - self.SHARE * self.num_steps
        return int(excess / self.SHARE) + 1 if excess > 0 else 0


@dataclass(slots=True)
class DraftLengths:
    """Chooses the draft lengths of each step."""

    longest: int
    adaptive: bool = True
    drafting: PassCosts | None = None  # of the draft model; None: drafting is free
    relative_cost: float = 0.0  # of a pass of the draft model, until `drafting` is measured
    steps: PassCosts = field(default_factory=PassCosts)  # of the model itself
    late_steps: PassCosts | None = None  # of those with drafts, where plain ones run ahead; None: `steps` has both
    acceptance: Acceptance = field(default_factory=Acceptance)
    losses: Losses = field(default_factory=Losses)
    context: int = 0  # tokens that the sequences of this step have, in all; 0: costs do not depend on them
    least_pause: int = 0  # steps: the end of a pause has a cost where passes give out states for the next trial
    is_hopeful: bool = True  # drafts might pay off after the present rest
    _num_unused: int = 0  # consecutive steps without drafts although some were offered
    _interval: int = 64  # steps without drafts before one is tried again

    PROBE_EVERY = 64  # the first interval: acceptance changes with the text; each probe in vain doubles it
    LONGEST_INTERVAL = 512
    LATE = 0.0015  # seconds that a step with drafts takes longer than one that runs ahead, until it is measured
    REST = 256  # steps for which drafting is skipped when it cannot pay off
    LEAST_REST = 32  # the same where contexts have a cost: they are a larger part of a step when they have grown
    HOPE = 0.9  # optimistic acceptance: where even this does not pay off, no probe is made
    GAIN = 1.05  # smaller gains are within the noise of the measured costs
    HORIZON = 64  # tokens over which the catch-up prefill must pay off

    def choose(self, num_sequences: int, offers: Sequence[Offer], tokens_left: int) -> tuple[Lengths, bool]:
        """(lengths by kind, whether sequences that need a catch-up are included); `tokens_left`: mean per sequence."""
        if not self.steps.knows(num_sequences):
            return {}, False  # measure a step without drafts first
        if self.losses.pause:
            return {}, False
        ready = [offer for offer in offers if not offer.num_behind]
        best, lengths, all_join = self.GAIN, Lengths(), False
        for joining in (ready, offers) if len(ready) < len(offers) else (ready,):
            gain, found = self._best(num_sequences, joining, tokens_left, self.acceptance.chance)
            if gain > best:
                best, lengths, all_join = gain, found, joining is offers
        if lengths:
            self._num_unused, self._interval = 0, self.PROBE_EVERY
        return lengths, all_join

    def can_pay(self, num_sequences: int) -> bool:
        """Whether the longest drafts of all sequences would pay off if most of them were right; True if unknown."""
        if not self.steps.knows(num_sequences):
            return True
        offers = [Offer(self.longest, 0)] * num_sequences
        return self._best(num_sequences, offers, 1, lambda kind, place: self.HOPE)[0] > self.GAIN

    def declined(self, num_sequences: int, offers: Sequence[Offer], tokens_left: int) -> tuple[bool, int]:
        """When no length pays off: (whether to probe one anyway, number of steps to skip drafting)."""
        if not self.steps.knows(num_sequences):
            return False, 0
        if pause := self.losses.pause:
            return False, max(pause, self.least_pause)
        hopeful = self._best(num_sequences, offers, tokens_left, lambda kind, place: self.HOPE)[0] > self.GAIN
        self.is_hopeful = hopeful
        if hopeful and self._num_unused >= self._interval:
            self._num_unused, self._interval = 0, min(2 * self._interval, self.LONGEST_INTERVAL)
            return True, 0
        if not hopeful:
            rest = self._hopeless_rest(num_sequences)
        elif self.drafting is None:
            rest = 0  # the next n-gram match may be a better one
        else:
            rest = max(self._interval - self._num_unused - 1, 0)  # until then no estimate changes
        self._num_unused += 1 + rest
        return False, rest

    def _hopeless_rest(self, num_sequences: int) -> int:
        """Steps until drafts are considered again: where contexts have a cost, until they are half as long again."""
        if not self.context:
            return self.REST
        return min(max(self.context // (2 * num_sequences), self.LEAST_REST), self.REST)

    def observe_step(self, num_rows: int, seconds: float, *, has_drafts: bool) -> None:
        """Record the duration of a step, drafting excluded."""
        costs = self.late_steps if has_drafts and self.late_steps is not None else self.steps
        costs.observe(num_rows, seconds, self.context)

    def count_loss(
        self, num_sequences: int, num_rows: int, seconds: float, num_right: int, num_behind: int = 0
    ) -> None:
        """Compare a step with drafts with plain steps; disturbed or cold ones count at most `PassCosts.LONGEST`.

        `num_behind`: tokens that the drafter had to catch up with.
        """
        plain, length = self._plain_seconds(num_sequences), num_rows / num_sequences - 1
        usual = self._verify_seconds(num_rows) + length * self._pass_seconds(num_sequences)
        if num_behind:
            usual += self._pass_seconds(num_behind)
        self.losses.add(min(seconds, PassCosts.LONGEST * usual) / plain, 1 + num_right / num_sequences)

    def count_own(self, num_sequences: int, seconds: float) -> None:
        """Time that a drafter took beside plain steps."""
        self.losses.add(seconds / self._plain_seconds(num_sequences), 0.0)

    def _best(
        self, num_sequences: int, offers: Sequence[Offer], tokens_left: int, chance: Callable[[int, int], float]
    ) -> tuple[float, Lengths]:
        """(largest speedup over plain decoding, its lengths); the likeliest draft tokens are added first."""
        counts = Counter((offer.kind, place) for offer in offers for place in range(min(offer.length, self.longest)))
        gains: dict[tuple[int, int], float] = {}
        for kind, place in sorted(counts):
            gains[kind, place] = gains.get((kind, place - 1), 1.0) * chance(kind, place)
        plain = num_sequences / self._plain_seconds(num_sequences)
        num_behind = sum(offer.num_behind for offer in offers)
        tokens, rows = float(num_sequences), num_sequences
        most_rows = 2 * self.steps.largest
        if self.late_steps is not None:  # short drafts do not make up for the wait
            most_rows = 2 * max(most_rows, self.late_steps.largest)
        best, lengths, best_lengths = 1.0, Lengths(), Lengths()
        for (kind, place), gain in sorted(gains.items(), key=lambda item: (-item[1], item[0])):
            tokens += counts[kind, place] * gain
            rows += counts[kind, place]
            if rows > most_rows:
                break  # unmeasured sizes are approached gradually
            lengths[kind] = place + 1
            seconds = self._verify_seconds(rows) + self._draft_seconds(len(offers), max(lengths.values()))
            if num_behind:
                num_steps = max(min(self.HORIZON, tokens_left) * num_sequences / tokens, 1.0)
                seconds += self._pass_seconds(num_behind) / num_steps
            if tokens / seconds / plain > best:
                best, best_lengths = tokens / seconds / plain, dict(lengths)
        return best, best_lengths

    def _plain_seconds(self, num_sequences: int) -> float:
        return self.steps.seconds(num_sequences, self.context)

    def _verify_seconds(self, num_rows: int) -> float:
        """Of a step with drafts, without the drafting."""
        if self.late_steps is None:
            return self.steps.seconds(num_rows, self.context)
        if self.late_steps.largest:
            return self.late_steps.seconds(num_rows, self.context)
        return self.steps.seconds(num_rows, self.context) + self.LATE

    def _draft_seconds(self, num_sequences: int, length: int) -> float:
        return length * self._pass_seconds(num_sequences)

    def _pass_seconds(self, num_rows: int) -> float:
        if self.drafting is None:
            return 0.0
        if self.drafting.largest:
            return self.drafting.seconds(num_rows)
        return self.relative_cost * self.steps.seconds(num_rows, self.context)
