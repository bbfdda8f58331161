"""A simulated engine: the real queue, slots, planner and block manager; only the computation is replaced by its time.

One simulated token stands for `grain` real ones, so that hours of a trace take minutes: a decode step of one token then
takes the time of `grain` steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.fleet.step_times import StepTimes, Work, work_of
from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.events import CacheEvents, Removed, Stored
from bifolio.cluster.prefix_router import PrefixRouter
from bifolio.errors import PhaseError
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.batcher import ContinuousBatcher
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.phases import PhaseManager
from bifolio.schedule.plan import BatchSlot, StepPlan
from bifolio.sequence import FinishReason, Request, Sequence, StepResult
from bifolio.serve.process.kv_events import short_hash

VOCABULARY = 1 << 20
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


@dataclass(frozen=True, slots=True)
class ReplicaSizes:
    """The sizes of one engine, in real tokens."""

    cache_tokens: int = 800_000
    max_num_seqs: int = 256
    chunk_size: int = 8192
    block_size: int = 512  # the tokens of one hash of the Mooncake traces
    grain: int = 32

    @property
    def num_blocks(self) -> int:
        return max(self.cache_tokens // self.block_size, 2) + 1


class Outcome(NamedTuple):
    """One step: its duration, and the requests that got their first token or their last one at its end."""

    seconds: float
    first: list[int]
    ended: list[int]


class SimulatedReplica:
    """One engine of a fleet."""

    def __init__(self, name: str, sizes: ReplicaSizes, times: StepTimes, speed: float = 1.0) -> None:
        self.name = name
        self._sizes, self._times = sizes, times
        self._speed = speed  # times as fast as measured: one engine in the place of several
        self._tokens = itertools.count()
        self.blocks = KVCacheBlockManager(sizes.num_blocks, sizes.block_size // sizes.grain)
        self.events = CacheEvents(max_events=1 << 30)
        self.blocks.record_events(self.events)
        self.batcher = ContinuousBatcher(sizes.max_num_seqs, self.blocks, listener=self)
        self.phases = PhaseManager(
            PrefillOrchestrator(self.blocks),
            DecodeOrchestrator(self.blocks),
            chunk_size=sizes.chunk_size // sizes.grain,
            preempt=self.batcher.preempt,
            drop_kept=self.batcher.drop_kept,
        )
        self._received: set[int] = set()  # sequences whose prompt was computed on another engine
        self.is_busy = False
        self.busy_seconds = 0.0
        self.num_preemptions = 0
        self._outcome = Outcome(0.0, [], [])

    # -- requests ------------------------------------------------------------------------------------------------------
    def add(self, number: int, prompt: list[int], num_output: int, *, received: bool = False) -> Request:
        """Queue a request; `received`: its keys and values came from another engine."""
        request = Request(str(number), number, prompt, PARAMS, number, max_tokens=num_output)
        sequence = Sequence(self.blocks.fresh_sequence_id(), request, 0, list(prompt), len(prompt), number)
        request.sequences.append(sequence)
        if received:
            self._received.add(sequence.id)
        self.batcher.add(request)
        return request

    @property
    def has_work(self) -> bool:
        return self.batcher.has_work

    # -- one step ------------------------------------------------------------------------------------------------------
    def step(self) -> Outcome:
        """Plan a step with the real planner, apply it, and return its time."""
        self.batcher.step(self._iterate)
        self.busy_seconds += self._outcome.seconds
        return self._outcome

    def _iterate(self, slots: list[BatchSlot]) -> list[StepResult]:
        plan = self.phases.plan(slots, max(self._sizes.chunk_size // self._sizes.grain, self._sizes.max_num_seqs))
        if plan.is_empty:
            raise PhaseError(f"the simulated engine {self.name} cannot plan a step: its cache is too small")
        self.blocks.take_moves()
        self.num_preemptions += len(plan.preempted)
        seconds = self._seconds(plan)
        first: list[int] = []
        ended: list[int] = []
        for item in plan.scheduled:
            sequence = item.sequence
            sequence.launch(item.num_new, bool(item.sample_slots))
            sequence.advance(item.num_new)
            is_prompt = item.start < sequence.num_prompt
            if is_prompt or sequence.num_computed % self.blocks.block_size == 0:
                self.blocks.commit(sequence.id, sequence.tokens_until(sequence.num_computed), sequence.num_computed)
            if item.sample_slots:
                sequence.append_token(VOCABULARY + next(self._tokens) % VOCABULARY)
                count = len(sequence.output_token_ids)
                if count == 1:
                    first.append(sequence.request.number)
                if count >= sequence.request.max_tokens:
                    sequence.finish(FinishReason.LENGTH)
                    self._received.discard(sequence.id)
                    ended.append(sequence.request.number)
        if any(item.num_new < item.sequence.num_prompt for item in plan.prefills):
            self.batcher.prompts_advanced()
        self._outcome = Outcome(seconds, first, ended)
        return []

    def _seconds(self, plan: StepPlan) -> float:
        grain = self._sizes.grain
        own = StepPlan(plan.decodes, tuple(i for i in plan.prefills if i.sequence.id not in self._received))
        if own.is_empty:
            return 0.0
        work = work_of(own, grain)
        prefill = self._times.seconds(Work(work.prefill_tokens, work.prefill_pairs)) if own.prefills else 0.0
        decode = grain * self._times.seconds(Work(decodes=work.decodes, context_tokens=work.context_tokens))
        if own.prefills and own.decodes:  # one pass does both: the weights are read once for its first token
            decode -= self._times.base
        return (prefill + (decode if own.decodes else 0.0)) / self._speed

    # -- slots (called by the batcher) ---------------------------------------------------------------------------------
    def slot_taken(self, slot: int, sequence: Sequence) -> None:
        self.phases.track(sequence)

    def slot_freed(self, slot: int, sequence: Sequence) -> None:
        self.phases.remove_sequence(sequence.id)


def tell(router: PrefixRouter, replica: SimulatedReplica) -> None:
    """Hand the events of a replica's cache to a router."""
    for event in replica.events.take():
        if isinstance(event, Stored):
            router.stored(replica.name, [short_hash(digest) for digest in event.digests])
        elif isinstance(event, Removed):
            router.removed(replica.name, [short_hash(event.digest)])
        else:
            router.cleared(replica.name)
