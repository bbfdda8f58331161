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
from typing import TYPE_CHECKING, Protocol

from bifolio.config import SpeculativeConfig
from bifolio.engine.executor import ModelRunner
from bifolio.engine.memory import weight_bytes
from bifolio.engine.speculative.draft_lengths import DraftLengths, Offer, PassCosts
from bifolio.engine.speculative.draft_model import DraftModelDrafter, check_pair
from bifolio.engine.speculative.head_runner import HeadRunner
from bifolio.engine.speculative.hidden_draft import HiddenDraft
from bifolio.engine.speculative.ngram import NgramDrafter
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Array
from bifolio.model.draft_head import HeadWeights, LoadedHead, prepare_head
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import ModelWeights
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.sequence import Sequence

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine


CONTEXT = 16  # tokens before a trial whose states a draft head reads
LEAST_PAUSE = 4 * CONTEXT  # steps without drafts of a head after losses: a quarter of them gives out states
FEW_TRIALS = 4  # draft tokens of a head, before which one sequence tries: reading the prompts of all would cost more
PLAIN_EVERY = 32  # steps with drafts before plain ones are measured: their cost changes with the load of the machine
WARM_STEPS = 2  # plain steps before the measured one: a drafter leaves other weights in the caches of a processor
PLAIN_STEPS = 4  # the same where steps run ahead: the first and the last of them do not
PLAIN_MEASURED = 8  # plain steps that run ahead before their cost is known: each is far shorter than a step with drafts
MOST_MEASURED = 16  # steps of as many slots that run ahead until the cost of plain ones is known
RESTING_EVERY = 16  # plain steps, while no drafts are made, before one is measured


class Drafter(Protocol):
    """Source of draft tokens."""

    def offers(self, sequences: list[Sequence], length: int) -> dict[int, Offer]:
        """The drafts available for each sequence (by id), at most `length` tokens."""
        ...

    def fill(self, items: Sequences[ScheduledSequence]) -> list[tuple[int, ...]]:
        """The draft tokens of scheduled decodes, as many as are reserved."""
        ...

    def forget(self, sequence: Sequence) -> None: ...


def _least_behind(offers: dict[int, Offer]) -> dict[int, Offer]:
    """The offer that needs the shortest catch-up."""
    least = min(offers, key=lambda sequence_id: offers[sequence_id].num_behind)
    return {least: offers[least]}


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
    """The engine's interface to speculation: a drafter, the choice of lengths, and the statistics."""

    def __init__(
        self, config: SpeculativeConfig, drafter: Drafter, max_model_len: int, lengths: DraftLengths | None = None
    ) -> None:
        self.drafter = drafter
        self.lengths = lengths or DraftLengths(config.length, config.adaptive)
        self.stats = SpeculativeStats()
        self._max_model_len = max_model_len
        self._kinds: dict[int, int] = {}  # of this step's drafts, by sequence id
        self._num_behind = 0  # tokens that the drafter catches up with in this step
        self._draft_seconds = 0.0  # of this step
        self._planned = 0.0  # when the planning of this step began
        self._plan_seconds = 0.0  # of this step, before its launch
        self._own_seconds = 0.0  # of this step: time that a draft head on the host adds to it
        self._unpaid = 0.0  # the same of steps without drafts that are not counted as a loss yet
        self._num_right = 0  # accepted draft tokens of this step
        self._has_drafted = False  # the last step that was launched verifies drafts
        self._rest = 0  # steps to skip drafting for, while `_num_active` slots are active
        self._num_active = 0
        self._num_rested = 0  # steps of the last rest
        self._num_drafted = 0  # consecutive steps with drafts
        self._num_measured = 0  # consecutive steps of as many slots without drafts: the cost of plain ones is unknown
        self.runs_ahead = False  # the next step has no drafts: where the device launches ahead, it may be launched so
        self._collected = 0.0  # when the last step was collected
        self._head = drafter if isinstance(drafter, HiddenDraft) else None
        # Whether plain steps are launched ahead: drafts of a head know when they rest.
        self._launches_ahead = self._head is not None and self._head.runner.kernels.launches_ahead
        self._is_head_on_host = (
            self._head is not None and not self._launches_ahead
        )  # its part of plain steps is counted

    def reads_states(self, plan: StepPlan) -> bool:
        """Whether the pass of a plan gives out hidden states for a draft head.

        While drafts do not pay off, only prompts do, and the last steps before the next trial. A device replays decode
        steps as graphs, which give out no states: there also these steps do not, nor prompts if no drafts can pay off.
        """
        if self._head is None:
            return False
        if plan.prefills:
            is_free = not (self._launches_ahead and self.lengths.adaptive)
            return is_free or self.lengths.can_pay(len(plan.decodes) + len(plan.prefills))
        if not self._launches_ahead:
            return not self._rest or (self._rest < CONTEXT and self.lengths.is_hopeful)
        return not self._rest and (not self.lengths.adaptive or self.lengths.steps.knows(len(plan.decodes)))

    def ignores(self, plan: StepPlan) -> bool:
        """Whether a step is none of a drafter's business: no drafts, no states, no entries of a head."""
        return (
            self.runs_ahead and not plan.prefills and self._head is not None and self._head.runner.blocks.is_untouched
        )

    def launched(self, plan: StepPlan, states: Array | None) -> None:
        """Keep the hidden states of a launched pass for the draft head."""
        if self._head is None:
            return
        is_timed = self._is_head_on_host and states is not None
        started = time.perf_counter() if is_timed else 0.0
        self._head.is_resting = self._rest > 0
        self._head.absorb(plan, states)
        if is_timed:
            self._own_seconds += time.perf_counter() - started

    def warm_up(self) -> None:
        """Capture the passes of a draft head on a device now."""
        if self._head is not None and self._head.runner.on_device is not None:
            self._head.runner.on_device.warm_up(self.lengths.longest)

    def forked(self, parent: Sequence, child: Sequence) -> None:
        if self._head is not None:
            self._head.forked(parent, child)

    def rests(self, num_active: int, *, is_behind: bool) -> bool:
        """Whether the next step has no drafts in any case; called once for each step, with its active slots.

        `is_behind`: a step is in flight. While it verifies drafts, no estimate lets another one run ahead: the device
        does not know how many of them are kept.
        """
        self._planned = time.perf_counter()
        self._unpaid += self._own_seconds
        self._kinds, self._num_behind, self._num_right = {}, 0, 0
        self._draft_seconds, self._plan_seconds, self._own_seconds = 0.0, 0.0, 0.0
        if is_behind and self._has_drafted:
            return False
        self.runs_ahead = self._rest > 0 and num_active == self._num_active
        if self.runs_ahead:
            self._rest -= 1
            return True
        is_other, self._rest, self._num_active = num_active != self._num_active, 0, num_active
        if self._launches_ahead and self.lengths.adaptive:
            is_known = self.lengths.steps.knows(num_active)
            self._num_measured = 0 if is_known or is_other else self._num_measured + 1
            self.runs_ahead = not is_known and self._num_measured <= MOST_MEASURED
            if is_known and not self.lengths.can_pay(num_active):  # found without waiting for the tokens in flight
                self._rest, self.runs_ahead, self.lengths.is_hopeful = self.lengths.REST - 1, True, False
        return self.runs_ahead

    def room(self, sequences: list[Sequence]) -> dict[int, int]:
        """Number of draft tokens to reserve, by sequence id; beams of a search have no drafts."""
        if not self._is_head_on_host:
            return self._reserved(sequences)
        self.lengths.context = sum(sequence.num_tokens for sequence in sequences)
        reserved = self._reserved(sequences)
        self._own_seconds = time.perf_counter() - self._planned
        return reserved

    def _reserved(self, sequences: list[Sequence]) -> dict[int, int]:
        """`room`, whose time is not counted here."""
        most = {sequence.id: self._most(sequence) for sequence in sequences if sequence.group is None}
        eligible = [sequence for sequence in sequences if most.get(sequence.id, 0) > 0]
        offers = self.drafter.offers(eligible, self.lengths.longest) if eligible else {}
        if not offers:
            return {}
        if self.lengths.adaptive:
            if self._num_drafted >= PLAIN_EVERY:
                warm_steps = 0 if self.lengths.drafting is None else WARM_STEPS
                self._rest = PLAIN_STEPS if self._launches_ahead else warm_steps
                return {}
            tokens_left = sum(most[sequence_id] for sequence_id in offers) // len(offers)
            offers = self._accepted_offers(offers, len(sequences), tokens_left)
        self._kinds = {sequence_id: offer.kind for sequence_id, offer in offers.items()}
        if self._is_head_on_host:
            self._num_behind = sum(offer.num_behind for offer in offers.values())
        return {sequence_id: min(offer.length, most[sequence_id]) for sequence_id, offer in offers.items()}

    def _accepted_offers(self, offers: dict[int, Offer], num_sequences: int, tokens_left: int) -> dict[int, Offer]:
        """The offers that pay off, cut to the chosen lengths; otherwise an occasional probe."""
        every = list(offers.values())
        lengths, all_join = self.lengths.choose(num_sequences, every, tokens_left)
        if lengths:
            if all_join and self._is_head_on_host and self.lengths.acceptance.num_trials < FEW_TRIALS:
                offers = _least_behind(offers)
            return {
                sequence_id: offer._replace(length=min(offer.length, lengths[offer.kind]))
                for sequence_id, offer in offers.items()
                if offer.kind in lengths and (all_join or not offer.num_behind)
            }
        probe, self._rest = self.lengths.declined(num_sequences, every, tokens_left)
        if not probe:
            return {}
        return {sequence_id: offer._replace(length=1) for sequence_id, offer in _least_behind(offers).items()}

    def fill(self, plan: StepPlan) -> StepPlan:
        """The plan with its draft tokens; the draft model runs here."""
        self._plan_seconds = time.perf_counter() - self._planned
        items = [item for item in plan.decodes if item.num_new > 1] if self._kinds else []
        self._has_drafted = bool(items)
        if not items:
            return plan
        started = time.perf_counter()
        guesses = dict(zip((item.slot for item in items), self.drafter.fill(items), strict=True))
        self._draft_seconds = time.perf_counter() - started
        decodes = tuple(item._replace(drafts=guesses.get(item.slot, ())) for item in plan.decodes)
        return replace(plan, decodes=decodes)

    def observe_step(self, plan: StepPlan, started: float) -> None:
        """Record the duration of a step without prefill that was launched at `started`, drafting included.

        A step that was launched ahead takes the time since the step before it was collected.
        """
        self._num_rested += 1
        num_left = self._rest % RESTING_EVERY
        if num_left > 1:  # neither this step nor the next one is measured
            return
        now, before = time.perf_counter(), self._collected
        self._collected = now
        if num_left:
            return
        was_ahead, seconds = started < before, now - max(started, before)
        if was_ahead:
            self._plan_seconds = 0.0  # of a later step
        lengths, num_decodes = self.lengths, len(plan.decodes)
        num_tokens = num_decodes if plan.is_uniform else plan.num_tokens
        lengths.losses.count(self._num_rested)
        has_drafts, self._num_rested = num_tokens > num_decodes, 0
        self._num_drafted = self._num_drafted + 1 if has_drafts else 0
        seconds += self._plan_seconds
        has_own = self._own_seconds > 0.0
        if self._is_head_on_host:
            lengths.context = sum(item.start for item in plan.decodes) + num_decodes
            seconds = self._without_own(seconds, has_drafts, num_decodes)
        is_late = self._launches_ahead and not was_ahead  # waited for the tokens before, as drafts do
        if (has_drafts or is_late) and lengths.steps.knows(num_decodes):
            lengths.count_loss(num_decodes, num_tokens, seconds, self._num_right, self._num_behind)
        if has_drafts or not is_late:
            lengths.observe_step(num_tokens, max(seconds - self._draft_seconds, 0.0), has_drafts=has_drafts)
        if has_own:
            self._unpaid += time.perf_counter() - now

    def _without_own(self, seconds: float, has_drafts: bool, num_decodes: int) -> float:
        """The time that a step takes without a head, whose part of plain steps is a loss."""
        own, self._own_seconds = self._own_seconds, 0.0
        if not has_drafts:
            self._unpaid += own
            seconds = max(seconds - own, 0.0)
        if self.lengths.steps.knows(num_decodes):
            self.lengths.count_own(num_decodes, self._unpaid)
            self._unpaid = 0.0
        return seconds

    def observe(self, sequence: Sequence, num_guessed: int, num_right: int) -> None:
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += num_guessed
        self.stats.num_accepted_tokens += num_right
        self._num_right += num_right
        self.lengths.acceptance.observe(self._kinds.get(sequence.id, 0), num_guessed, num_right)

    def _most(self, sequence: Sequence) -> int:
        """Draft tokens that fit before a length limit is reached."""
        left = sequence.request.max_tokens - len(sequence.output_token_ids) - 1
        return min(left, self._max_model_len - sequence.num_tokens)


def with_taps(model: LoadedModel, draft_model: LoadedModel | LoadedHead | None) -> LoadedModel:
    """The model with the taps that a draft head reads."""
    if not isinstance(draft_model, LoadedHead):
        return model
    return replace(model, weights=model.weights.tapped(draft_model.weights.taps))


def new_speculator(engine: InferenceEngine, draft_model: LoadedModel | LoadedHead | None) -> Speculator | None:
    """Create the configured speculator; a draft model's storage is added to the engine's."""
    config = engine.config.speculative
    if config is None:
        return None
    if config.method == "ngram":
        return Speculator(config, NgramDrafter(config), engine.config.max_model_len)
    if config.method in ("eagle", "mtp"):
        if not isinstance(draft_model, LoadedHead):
            raise ConfigError(f"speculative method {config.method!r} needs a draft head: pass draft_model=...")
        return _head_speculator(engine, draft_model, config)
    if not isinstance(draft_model, LoadedModel):
        raise ConfigError("speculative method 'draft' needs a draft model: pass draft_model=...")
    check_pair(engine.model, draft_model)
    runner = ModelRunner.new(draft_model, engine.config.cache, engine.runner.kernels)
    engine.storages.append(runner.storage)
    drafter = DraftModelDrafter(runner, engine.slots, engine.config.chunk_size)
    lengths = DraftLengths(config.length, config.adaptive, drafter.costs, _relative_cost(engine, draft_model.weights))
    return Speculator(config, drafter, engine.config.max_model_len, lengths)


def _head_speculator(engine: InferenceEngine, head: LoadedHead, config: SpeculativeConfig) -> Speculator:
    if engine.runner.peers is not None:
        raise ConfigError(
            f"speculative method {config.method!r} needs tensor_parallel_size 1: choose 'draft' or 'ngram'"
        )
    kernels = engine.runner.kernels
    weights = prepare_head(head.weights, kernels, engine.runner.weights)
    runner = HeadRunner(weights, engine.config.cache, kernels)
    engine.storages.append(runner.blocks)
    if engine.slots.device is not None:
        runner.on_device = engine.slots.device.draft_slots(runner.network, runner.blocks.storage)
    drafter = HiddenDraft(runner, engine.slots, engine.config.chunk_size)
    lengths = DraftLengths(config.length, config.adaptive, drafter.costs, _relative_cost(engine, head.weights))
    if kernels.launches_ahead:
        lengths.steps, lengths.late_steps = PassCosts(PLAIN_MEASURED), PassCosts()
    else:
        lengths.least_pause = LEAST_PAUSE
    return Speculator(config, drafter, engine.config.max_model_len, lengths)


def _relative_cost(engine: InferenceEngine, weights: ModelWeights | HeadWeights) -> float:
    """Bytes of a drafter's weights as a share of the model's."""
    drafter, own = (weight_bytes(each, engine.runner.kernels.formats) for each in (weights, engine.model.weights))
    return drafter / max(own, 1)
