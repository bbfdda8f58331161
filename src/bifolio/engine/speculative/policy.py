"""Draft lengths by measured tokens per second.

For each batch size the policy measures the time of a plain step and, in plain steps, the time of a step with drafts;
for each kind of draft it measures how often the token at each place is accepted. Together they give the tokens per
second of each draft length. The policy plays the best length, 0 included. While drafts pay, it measures plain steps now
and then; while they do not, it tries a draft token now and then.

Measurements may mislead: text changes, and so does the load of a machine. A balance, in plain steps, bounds the loss:
each step earns `SHARE`, a step with drafts earns its tokens and pays its time, and a negative balance stops drafting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bifolio.engine.speculative.drafter import Offer

SHARE = 0.015  # of the time of plain decoding: the most that drafts may lose; gains of twice as much are noise
CREDIT = 8.0  # plain steps: the largest balance, and the largest debt of a step that was disturbed
EVERY = 64  # steps without drafts before a trial, and with drafts before plain steps are measured again
MEMORY = 8  # observations that an average remembers
WARM = 2  # plain steps after drafts that are not measured: the drafter's weights are in the caches
PRIOR = 0.6  # acceptance of a draft token before the first trial


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def add_time(self, seconds: float) -> None:
        """Disturbances make a step longer, never shorter; the first step of its kind is often disturbed."""
        change = seconds - self.value
        is_first = not self.count or (self.count == 1 and change < 0.0)
        self.value += change if is_first else change * (0.5 if change < 0.0 else 0.2)
        self.count += 1

    def add_trial(self, is_right: bool) -> None:
        self.count += 1
        self.value += (is_right - self.value) / min(self.count, MEMORY)


@dataclass(slots=True)
class DraftPolicy:
    """Chooses the draft length of each step."""

    longest: int
    adaptive: bool = True
    is_late: bool = False  # plain steps are launched ahead, steps with drafts are not: the first trial may be dear
    balance: float = CREDIT / 4
    _plain: dict[int, _Mean] = field(default_factory=dict)  # seconds of a plain step, by batch size
    _costs: dict[tuple[int, int, int], _Mean] = field(default_factory=dict)  # (batch, drafted, length): plain steps
    _chances: dict[tuple[int, int], _Mean] = field(default_factory=dict)  # (kind, place): share that was accepted
    _num_plain: int = 0  # consecutive steps without drafts
    _num_drafted: int = 0  # steps with drafts since plain ones were measured
    _idle: int = EVERY  # steps since a draft token was rejected
    _is_trial: bool = False  # of the last choice
    _rest: tuple[int, int] = (0, 0)  # (batch size, plain steps until drafts are considered)

    def rest(self, num_sequences: int) -> int:
        """Number of plain steps before one of this batch size may have drafts; needs no token in flight."""
        if not self.adaptive:
            return 0
        size = _rounded(num_sequences)
        if self._rest[0] != size or not self._rest[1]:
            self._rest = size, self._steps_to_draft(num_sequences)
        return self._rest[1]

    def choose(
        self, num_sequences: int, offers: Mapping[int, Offer], tokens_left: int, catch_up: float = 0.0
    ) -> dict[int, int]:
        """The draft tokens of each sequence, by the keys of `offers`; only offers of the largest kind are taken.

        `tokens_left`: mean of a sequence; `catch_up`: seconds in which the drafter reads one token.
        """
        if not self.adaptive:
            return {number: offer.length for number, offer in offers.items()}
        if not offers or self.rest(num_sequences):
            return {}
        kind = max(offer.kind for offer in offers.values())
        offers = {number: offer for number, offer in offers.items() if offer.kind == kind}
        least = min(offers, key=lambda number: offers[number].num_behind)
        plain = self._plain[_rounded(num_sequences)].value
        gain, length = self._best(num_sequences, len(offers), kind)
        if gain <= 1.0 + 2 * SHARE:
            self._is_trial = True
            behind = offers[least].num_behind * catch_up / plain
            return {} if self._steps_to_trial(num_sequences, behind) else {least: 1}
        self._is_trial = (kind, 0) not in self._chances or self._chances[kind, 0].count <= WARM
        saved = (gain - 1.0) * plain * min(tokens_left, EVERY) / len(offers)  # seconds of each sequence
        ready = {  # in a trial the others follow when the drafts of some are accepted
            number: min(offer.length, length)
            for number, offer in offers.items()
            if not offer.num_behind or (offer.num_behind * catch_up <= saved and not self._is_trial)
        }
        return ready or {least: min(offers[least].length, length)}

    def wanted(self, num_sequences: int) -> int:
        """Draft tokens that the next step of this batch size will have at most, if it has any."""
        if not self.adaptive:
            return self.longest
        kinds = {kind for kind, _ in self._chances} or {0}
        return max(1, *(self._best(num_sequences, num_sequences, kind)[1] for kind in kinds))

    def observe(self, kind: int, num_guessed: int, num_right: int) -> None:
        """Count the draft tokens of a sequence up to the first rejected one."""
        for place in range(min(num_right + 1, num_guessed)):
            self._chances.setdefault((kind, place), _Mean()).add_trial(place < num_right)
        if num_right < num_guessed:
            self._idle = 0

    def collected_plain(self, num_sequences: int, seconds: float) -> None:
        """A step without drafts took this time."""
        self._idle, self._num_plain = self._idle + 1, self._num_plain + 1
        self._rest = self._rest[0], max(self._rest[1] - 1, 0)
        self._pay(1.0, 1.0)
        if self._num_plain > WARM or not self._num_drafted:
            self._num_drafted = 0
            self._plain.setdefault(_rounded(num_sequences), _Mean()).add_time(seconds)

    def collected(
        self, num_sequences: int, drafted: int, length: int, seconds: float, num_right: int, behind: float = 0.0
    ) -> None:
        """A step took this time: `drafted` sequences had up to `length` drafts, of which `num_right` were accepted.

        `behind`: seconds in which the drafter caught up with its sequences, an investment unless the step is a trial.
        Steps without drafts that return hidden states for a trial are counted here, too: they lose time.
        """
        size = _rounded(num_sequences)
        plain = self._plain.get(size, _Mean())
        if plain.count <= WARM:
            if not drafted:
                self.collected_plain(num_sequences, seconds)
            return
        self._idle, self._num_plain, self._num_drafted = self._idle + 1, 0, self._num_drafted + 1
        if not drafted:
            self._rest = self._rest[0], max(self._rest[1] - 1, 0)
        cost = self._costs.setdefault((size, _rounded(drafted), length), _Mean())
        seconds = max(seconds - behind, plain.value)
        steps = min(seconds / plain.value, 2.0 * cost.value if cost.count else math.inf)
        if self._num_drafted <= WARM or cost.count <= WARM:
            cost.add_time(steps)
        else:  # contexts have grown since plain steps were measured
            plain.add_time(seconds / cost.value)
        self._pay(steps + self._is_trial * behind / plain.value, 1.0 + num_right / num_sequences)

    def _pay(self, steps: float, tokens: float) -> None:
        """A step took as long as `steps` plain ones and gave the tokens of `tokens` plain ones."""
        self.balance = max(min(self.balance + (1.0 + SHARE) * tokens - steps, CREDIT), -CREDIT)

    def _steps_to_draft(self, num_sequences: int) -> int:
        plain = self._plain.get(_rounded(num_sequences), _Mean())
        if plain.count <= WARM:
            return WARM + 1 - plain.count
        if self.measures_plain:
            return max(WARM + 1 - self._num_plain, 1)
        entry = self._entry(_rounded(num_sequences))
        if self.balance < entry:
            return _steps_to_earn(entry - self.balance)
        kinds = {kind for kind, _ in self._chances} or {0}
        gain = max(self._best(num_sequences, num_sequences, kind)[0] for kind in kinds)
        return 0 if gain > 1.0 + 2 * SHARE else self._steps_to_trial(num_sequences, 0.0)

    def _steps_to_trial(self, num_sequences: int, behind: float) -> int:
        """Steps until a trial of one token is due, and its loss affordable if the token is rejected."""
        size, cost = _rounded(num_sequences), self._unknown_cost
        known = {key: self._cost(key) for key in self._costs if key[0] == size and key[2]}
        if any(cost < 1.0 + drafted * length / size for (_, drafted, length), cost in known.items()):
            cost = known.get((size, 1, 1), 1.0)
        elif known:
            cost = CREDIT  # no length can pay
        loss = min(cost - 1.0 + behind + self._entry(size), CREDIT)
        return max(EVERY // 2 - self._idle, _steps_to_earn(loss - self.balance), 0)

    def _best(self, num_sequences: int, drafted: int, kind: int) -> tuple[float, int]:
        """(tokens per second as a multiple of plain decoding's, length): lengths are approached one by one."""
        best, tokens, likely, size = (1.0, 0), 1.0, 1.0, _rounded(num_sequences)
        known, cost = 0, self._unknown_cost
        for length, chance in enumerate(self._acceptance(kind), start=1):
            likely *= chance
            tokens += likely * drafted / num_sequences
            if length not in (1, 2, self.longest):
                continue
            key = size, _rounded(drafted), length
            if key in self._costs:
                cost = self._cost(key)
                known = length if cost == self._costs[key].value else known
            elif fewer := [self._cost(other) for other in self._costs if other[0] == size and other[2] == length]:
                cost = max(fewer)  # drafts of other numbers of sequences
            expected = cost if known in (0, length) else 1.0 + (cost - 1.0) * length / known
            best = max(best, (tokens / expected, length))
            if known < length:
                break
        return best

    def _entry(self, size: int) -> float:
        """Loss of the step that returns the hidden states before the first drafts, in plain steps."""
        known = (size, 0, 0) in self._costs and self._num_plain > 0  # else the last step has returned them
        return max(self._cost((size, 0, 0)) - 1.0, 0.0) if known else 0.0

    def _cost(self, key: tuple[int, int, int]) -> float:
        """In plain steps. The first step alone shows no high cost: the drafter has read a prompt in it."""
        measured = self._costs[key]
        return measured.value if measured.count > 1 else min(measured.value, self._unknown_cost)

    def _acceptance(self, kind: int) -> Iterator[float]:
        """The chances of the places of a draft; until a place is measured, the one before it stands for it."""
        chance = PRIOR
        for place in range(self.longest):
            if measured := self._chances.get((kind, place)):
                chance = (WARM * chance + measured.count * measured.value) / (WARM + measured.count)
            yield chance

    @property
    def measures_plain(self) -> bool:
        """Whether drafts pay and are interrupted by plain steps."""
        return self._num_drafted >= EVERY

    @property
    def _unknown_cost(self) -> float:
        return CREDIT if self.is_late else 1.0


def _steps_to_earn(amount: float) -> int:
    return math.ceil(max(amount, 0.0) / SHARE)


def _rounded(count: int) -> int:
    """Two binary digits: sizes that differ little cost about the same."""
    step = 1 << max(count.bit_length() - 2, 0)
    return (count + step // 2) // step * step
