"""An engine that launches the next decode step before it has seen the tokens of the last one.

While nothing but plain decoding goes on, steps follow each other on the device without a gap:

    device   |<-- step t -->|<-- step t+1 -->|<-- step t+2 -->|
    host     launch t+1 | wait for t, record t | launch t+2 | wait for t+1, record t+1 | ...

A step needs nothing from the host that the host does not know in advance: which rows take part, and that each has one
more token in its block table. The one surprise is a sequence that ends by what it said (a stop token or text): its row
took part in the step after, whose token for it is thrown away. Everything else (prompts, beams, drafts, penalties,
blocks that run out) first collects the step in flight and then takes the ordinary way.

Blocks of a sequence that ended may go to another while a step in flight still writes to them: the device runs steps in
order, so whoever gets a block writes to it later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bifolio.engine.engine import InferenceEngine
from bifolio.engine.gpu.cuda_graphs import CapturedDecode, RowState, Ticket
from bifolio.engine.gpu.logits_graphs import CapturedLogits
from bifolio.engine.gpu.shared_prefix import SharedWork
from bifolio.engine.host_batch import DeviceRows
from bifolio.errors import RequestError
from bifolio.kernels.interface import KernelSet
from bifolio.sampling.sampler import SampledTokens
from bifolio.schedule.plan import StepPlan
from bifolio.schedule.slot import BatchSlot
from bifolio.sequence import Request, RequestPhase, Sequence, StepResult


class TrackedRows(DeviceRows):
    """Block tables on the host that also tell the device's rows what changed."""

    state: RowState

    def update(self, plan: StepPlan) -> None:
        self.update_slots({item.sequence.id: item.slot for item in plan.scheduled})

    def update_slots(self, slot_of: dict[int, int]) -> None:
        for sequence_id, first, block_ids in self._blocks.take_many_row_changes(slot_of):
            slot = slot_of[sequence_id]
            self.tables[slot, first : first + len(block_ids)] = block_ids
            self.state.set_blocks(slot, first, block_ids)


@dataclass(slots=True)
class Flight:
    """A launched step: who takes part, and where the tokens will be."""

    members: list[tuple[int, Sequence]]  # (slot, sequence), in the order of the rows
    draws: bool
    ticket: Ticket


class OverlappedEngine(InferenceEngine):
    """The engine for kernel sets whose arrays are torch tensors."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._flight: Flight | None = None
        self._stalled = False  # somebody waits who cannot be admitted before another ends
        self._work: tuple[bytes, SharedWork | None] = (b"", None)  # what the rows of the last launch share
        self.captured = CapturedDecode(self.runner, self.rows.state, self.config.max_model_len)
        if self.captured.on_gpu and self.runner.kernels.name == "triton":
            state = self.rows.state
            self.decode_executor = CapturedLogits(
                self.runner, self.captured.recorder, state.max_slots, state.max_blocks
            )

    rows: TrackedRows

    def _new_rows(self, kernels: KernelSet) -> DeviceRows:
        max_blocks = self.blocks.blocks_for(self.config.max_model_len) + 1
        rows = TrackedRows(self.config.max_num_seqs, max_blocks, self.blocks, kernels)
        rows.state = RowState(self.config.max_num_seqs, max_blocks, kernels.device)
        return rows

    # -- one step ----------------------------------------------------------------------------------------------------
    def _step(self) -> list[StepResult]:
        """The results of one step, while the next may be running already."""
        flight, self._flight = self._flight, None  # an error below leaves nothing in flight
        if flight is None:
            flight = self._take_off()
            if flight is None:
                before = self._counters.num_prefill_tokens
                results = super()._step()
                # A prompt that was read now may be the beginning that others wait for.
                has_changed = self._counters.num_prefill_tokens > before or any(result.finished for result in results)
                self._stalled = self.batcher.num_waiting > 0 and not has_changed
                return results
        following = self._follow(flight)
        results = self._land(flight)
        self._flight = following
        return self._deliver(results)

    @property
    def has_work(self) -> bool:
        return super().has_work or self._flight is not None

    def abort(self, request_id: str) -> bool:
        self._stalled = False
        return super().abort(request_id)

    def release(self, request_id: str) -> bool:
        self._stalled = False
        return super().release(request_id)

    def _more_may_run(self) -> None:
        self._stalled = False

    def _enqueue(self, request: Request) -> Request:
        self._stalled = False
        return super()._enqueue(request)

    # -- launching -----------------------------------------------------------------------------------------------------
    def _take_off(self) -> Flight | None:
        """Launch the first of a run of captured steps, if nothing else is to be done."""
        if self.speculator is not None or self._must_admit():
            return None
        slots = self.batcher.active_slots()
        if not slots or not all(self._is_plain(slot) for slot in slots):
            return None
        members = [(slot.index, slot.held) for slot in slots]
        if not self._reserve(members):
            return None
        index = np.array([slot for slot, _ in members])
        self._work = b"", None
        self.rows.state.set_rows(
            index,
            np.array([sequence.num_computed for _, sequence in members]),
            np.array([sequence.token_ids[-1] for _, sequence in members]),
            self.table.temperature[index],
            self.table.seed[index],
        )
        return self._launch(members, bool((self.table.temperature[index] > 0).any()))

    def _follow(self, flight: Flight) -> Flight | None:
        """Launch the step after one whose tokens are not known yet."""
        if self._must_admit():
            return None
        members = [
            (slot, sequence)
            for slot, sequence in flight.members
            if sequence.finish_reason is None and len(sequence.output_token_ids) + 1 < sequence.request.max_tokens
        ]
        if not members or not self._reserve(members):
            return None
        return self._launch(members, flight.draws)

    def _launch(self, members: list[tuple[int, Sequence]], draws: bool) -> Flight:
        slots = np.fromiter((slot for slot, _ in members), dtype=np.int32, count=len(members))
        if self._work[0] != slots.tobytes():  # somebody left, or these are the first
            lengths = np.fromiter((sequence.num_computed for _, sequence in members), np.int64, len(members))
            work = self.captured.share(slots, self.rows.tables, lengths)
            if work is not None:
                members, slots = [members[row] for row in work.order], slots[work.order]
            self._work = slots.tobytes(), work
        return Flight(members, draws, self.captured.launch(slots, draws=draws, work=self._work[1]))

    def _reserve(self, members: list[tuple[int, Sequence]]) -> bool:
        """A slot in the cache for everyone's next token; False, with nothing changed, when blocks lack."""
        if not self.blocks.try_append_many([(sequence.id, 1) for _, sequence in members]):
            return False
        copies = self.blocks.take_copies()
        if copies:
            for storage in self.storages:
                storage.copy_blocks(copies)
        self.rows.update_slots({sequence.id: slot for slot, sequence in members})
        return True

    def _must_admit(self) -> bool:
        return not self._stalled and self.batcher.num_waiting > 0

    def _is_plain(self, slot: BatchSlot) -> bool:
        """Decodes, and draws from the model's own distribution (or takes the largest).

        Deterministic, drawing is always the ordinary way's: the two differ in the last bit of the exponential.
        """
        index, table = slot.index, self.table
        if getattr(self.runner.kernels, "deterministic", False) and table.temperature[index] > 0:
            return False
        return (
            slot.phase is RequestPhase.DECODE
            and slot.sample_slots == (index,)
            and slot.held.group is None
            and not table.is_edited[index]
            and not table.is_filtered[index]
            and table.num_logprobs[index] < 0
        )

    # -- recording -----------------------------------------------------------------------------------------------------
    def _land(self, flight: Flight) -> list[StepResult]:
        """Wait for the tokens and take them over."""
        tokens = flight.ticket.wait()
        sampled = sampled_tokens(tokens)
        results: list[StepResult] = []
        ended = False
        block_size = self.blocks.block_size
        for row, (_, sequence) in enumerate(flight.members):
            if sequence.finish_reason is not None:  # ended by the token before, or aborted
                ended = True
                continue
            sequence.num_computed += 1
            if sequence.num_computed % block_size == 0:
                self.blocks.commit(sequence.id, sequence.token_ids, sequence.num_computed)
            results.extend(self.recorder.add_token(sequence.request, sequence, sampled, row))
            ended = ended or sequence.finish_reason is not None
        self._counters.num_steps += 1
        self._counters.num_decode_tokens += len(flight.members)
        if ended:
            self.batcher.evict_completed()  # rows and blocks go back
            self._stalled = False
        return results


def sampled_tokens(token_ids: np.ndarray) -> SampledTokens:
    """Tokens chosen on the device, where -1 says that nothing could be."""
    errors = {
        int(row): RequestError("no token can follow: the model gave no finite logit for the next position")
        for row in np.flatnonzero(token_ids < 0)
    }
    return SampledTokens(token_ids, np.empty(0, np.float32), np.empty(0, np.int32), [], errors)
