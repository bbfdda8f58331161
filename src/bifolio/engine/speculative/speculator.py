"""Speculative decoding: draft several tokens, verify them in one pass, keep the accepted ones.

Verification samples the token of every drafted position exactly as plain decoding does, with the noise of the position,
and accepts drafts as long as they equal the sampled tokens. So the output equals the plain run's, token for token,
sampled or greedy: speculation changes only the speed. (For a single draft token this accepts as often as rejection
sampling does: with the target's probability of the token.)

    |<---- known ---->|<-- drafts -->|
    computed ......... x  g1 g2 g3       one pass over x g1 g2 g3 gives the draws d1 d2 d3 d4
                       ^ last known      g1 = d1, g2 = d2, g3 ≠ d3: d1 d2 d3 are kept, the cache is truncated after g2
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace

from bifolio.engine.host_batch import ON_DEVICE
from bifolio.engine.slot_state import SlotState
from bifolio.engine.speculative.drafter import Drafter
from bifolio.engine.speculative.policy import DraftPolicy
from bifolio.kernels.interface import Array
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.sequence import Sequence

CONTEXT = 16  # tokens before a trial whose hidden states a draft head reads


def num_accepted(guesses: Sequences[int], drawn: Sequences[int]) -> int:
    """Number of leading drafts that equal the sampled tokens."""
    for index, guess in enumerate(guesses):
        if drawn[index] != guess:
            return index
    return len(guesses)


@dataclass(slots=True)
class SpeculativeStats:
    """Totals since the start."""

    num_drafts: int = 0  # passes that verified drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class Speculator:
    """The engine's interface to speculation: a drafter, the policy of draft lengths, and the statistics."""

    def __init__(
        self, drafter: Drafter, policy: DraftPolicy, max_model_len: int, *, plain_has_states: bool = True
    ) -> None:
        """`plain_has_states`: plain decode steps can return hidden states at no cost; a device replays them without."""
        self.drafter = drafter
        self._plain_has_states = plain_has_states
        self.policy = policy
        self.stats = SpeculativeStats()
        self.runs_ahead = False  # the next step has no drafts: where the device launches ahead, it may be launched so
        self._max_model_len = max_model_len
        self._kinds: dict[int, int] = {}  # of this step's drafts, by sequence id
        self._num_behind = 0  # tokens that the drafter catches up with in this step
        self._num_right = 0  # accepted draft tokens of this step
        self._has_drafts = False  # the last launched step verifies drafts
        self._has_states = False  # it returns hidden states
        self._planned = self._collected = 0.0  # when the planning of this step began, when the last was collected

    def begins_step(self, num_active: int, *, is_behind: bool) -> bool:
        """Begin to plan a step with so many active slots; whether it may have drafts.

        `is_behind`: a step is in flight. While that step verifies drafts, no other runs ahead of its tokens.
        """
        self._planned = time.perf_counter()
        self._kinds, self._num_behind, self._num_right = {}, 0, 0
        self.runs_ahead = not (is_behind and self._has_drafts) and self.policy.rest(num_active) > 0
        return not self.runs_ahead

    def room(self, sequences: list[Sequence]) -> dict[int, int]:
        """Number of draft tokens to reserve, by sequence id; beams of a search have no drafts."""
        most = {sequence.id: self._most(sequence) for sequence in sequences if sequence.group is None}
        eligible = [sequence for sequence in sequences if most.get(sequence.id, 0) > 0]
        offers = self.drafter.offers(eligible, self.policy.longest) if eligible else {}
        if not offers:
            return {}
        tokens_left = sum(most[number] for number in offers) // len(offers)
        lengths = self.policy.choose(len(sequences), offers, tokens_left, self.drafter.catch_up)
        self._kinds = {number: offers[number].kind for number in lengths}
        self._num_behind = sum(offers[number].num_behind for number in lengths)
        return {number: min(length, most[number]) for number, length in lengths.items()}

    def fill(self, plan: StepPlan, slots: SlotState) -> StepPlan:
        """The plan with its draft tokens; a draft model runs here.

        Those that one launch on the device verifies may be known there alone (`ON_DEVICE`).
        """
        items = [item for item in plan.decodes if item.num_new > 1] if self._kinds else []
        self._has_drafts = bool(items)
        if not items:
            is_verified = self._returns_states(plan) and slots.verifies_on_device(plan, has_drafts=False)
            return replace(plan, is_verified=is_verified)
        on_device = self.drafter.can_follow and slots.verifies_on_device(plan)
        found = self.drafter.fill(items, on_device=on_device)
        guesses = dict(zip((item.slot for item in items), found, strict=True))
        decodes = tuple(item._replace(drafts=guesses.get(item.slot, ())) for item in plan.decodes)
        return replace(plan, decodes=decodes, is_verified=on_device)

    def known(self, item: ScheduledSequence) -> tuple[int, ...]:
        """The draft tokens of a collected decode, which may have been on the device alone."""
        return self.drafter.known(item) if ON_DEVICE in item.drafts else tuple(item.drafts)

    def reads_states(self, plan: StepPlan) -> bool:
        """Whether the pass of a plan returns hidden states: drafts follow, or a trial after a few more steps.

        A device replays plain steps that run ahead without states.
        """
        if not self.drafter.reads_states:
            return False
        number = len(plan.decodes) + len(plan.prefills)
        if not self._plain_has_states and not plan.prefills:
            return not self.runs_ahead
        rest = self.policy.rest(number)
        return not rest or (rest <= CONTEXT and not self.policy.measures_plain)

    def _returns_states(self, plan: StepPlan) -> bool:
        """Whether a step of decodes on a device returns hidden states, for drafts that follow."""
        if self._plain_has_states or plan.prefills or not self.drafter.can_follow:
            return False
        return self.reads_states(plan)

    def launched(self, plan: StepPlan, states: Array | None) -> None:
        """Hand the hidden states of a launched pass to the drafter."""
        self._has_states = states is not None or (plan.is_verified and not self._has_drafts)
        if plan.is_verified and self.drafter.reads_states:
            self.drafter.follow(plan, self.policy.wanted(len(plan.decodes)))
            return
        self.drafter.absorb(plan, states, is_resting=self.runs_ahead)

    def observe(self, sequence: Sequence, num_guessed: int, num_right: int) -> None:
        """The drafts of a sequence were verified."""
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += num_guessed
        self.stats.num_accepted_tokens += num_right
        self._num_right += num_right
        self.policy.observe(self._kinds.get(sequence.id, 0), num_guessed, num_right)

    def collected(self, plan: StepPlan, started: float) -> None:
        """Measure a step that was launched at `started`: since its planning, or since the end of the one before it."""
        now, before = time.perf_counter(), self._collected
        self._collected = now
        if plan.prefills:
            return
        seconds, number = now - max(min(self._planned, started), before), len(plan.decodes)
        length = 0 if plan.is_uniform else max(len(item.drafts) for item in plan.decodes)
        if not length and not self._has_states:
            self.policy.collected_plain(number, seconds)
            return
        drafted = sum(bool(item.drafts) for item in plan.decodes)
        behind = self._num_behind * self.drafter.catch_up
        self.policy.collected(number, drafted, length, seconds, self._num_right, behind)

    def _most(self, sequence: Sequence) -> int:
        """Draft tokens that fit before a length limit is reached."""
        left = sequence.request.max_tokens - len(sequence.output_token_ids) - 1
        return min(left, self._max_model_len - sequence.num_tokens)
