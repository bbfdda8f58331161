"""Per-slot state of the batch: block tables, newest tokens, sampling parameters; and sampling as part of a launch.

A sequence keeps its slot while it runs, so a step updates only differences. Where the kernel set keeps a copy on its
device (`DeviceSlots`), the same updates are sent there, and tokens are sampled there; a launched step then needs only
the list of its slots from the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.engine.forced_tokens import ForcedTokens
from bifolio.engine.host_batch import ON_DEVICE, HostBatch, Readout, newest_token, wants_prompt_logits
from bifolio.engine.unmasked_draws import UnmaskedDraws
from bifolio.errors import NO_FINITE_LOGIT, ModelOutputError, PhaseError, RequestError
from bifolio.images import shift_at
from bifolio.kernels.interface import Array, Batch, DeviceSlots, KernelSet, PendingTokens, TokenScores
from bifolio.sampling.edits import device_edits
from bifolio.sampling.joint_masks import JointMasks
from bifolio.sampling.logprobs import finish_scores
from bifolio.sampling.sampler import NOTHING, NOTHING_FOLLOWS, SampledTokens, Sampler, SamplingTable
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.sequence import Sequence

NO_DRAFT = -2  # place without a draft, of a sequence that has fewer than others


@dataclass(slots=True)
class Draws:
    """The draws of a launched step: those of the host are known, those of the device are in flight."""

    known: SampledTokens
    device_draws: np.ndarray = field(default_factory=lambda: np.arange(0))  # i64[d]  draws that the device makes
    num_logprobs: np.ndarray | None = None  # i64[d]  of those draws, -1: none
    excluding: np.ndarray | None = None  # bool[d]  whether options of the request exclude tokens
    pending: PendingTokens | None = None
    to_check: np.ndarray | None = None  # i64[c]  draws ahead of their grammars (`engine.unmasked_draws`)

    def collect(self) -> SampledTokens:
        """All tokens; waits for the device."""
        if self.pending is not None:
            tokens = self.pending.wait()
            self.known.token_ids[self.device_draws] = tokens
            self._take_scores(tokens, self.pending.scores())
            self.pending = None
            for index in np.flatnonzero(tokens == NOTHING).tolist():
                excludes = self.excluding is not None and bool(self.excluding[index])
                reason = RequestError(NOTHING_FOLLOWS) if excludes else ModelOutputError(NO_FINITE_LOGIT)
                self.known.errors[int(self.device_draws[index])] = reason
        return self.known

    def _take_scores(self, tokens: np.ndarray, scores: TokenScores | None) -> None:
        if scores is None or self.num_logprobs is None:
            return
        found = finish_scores(scores, self.num_logprobs)
        wanted = (self.num_logprobs >= 0) & (tokens != NOTHING)
        if wanted.all() and len(tokens) == len(self.known.token_ids):
            self.known.scores = found
        else:
            self.known.put_scores(self.device_draws[wanted], found.take(wanted))


class SlotState:
    """The slots of one engine, on the host and, with `DeviceSlots`, on the device."""

    def __init__(
        self,
        blocks: KVCacheBlockManager,
        kernels: KernelSet,
        sampler: Sampler,
        max_blocks: int,
        device: DeviceSlots | None = None,
        has_drafts: bool = False,
    ) -> None:
        num_slots = len(sampler.table.temperature)
        self.sampler = sampler
        self.device = device
        self.tables = np.zeros((num_slots, max_blocks), dtype=np.int32)  # block ids by slot, padded with block 0
        self._blocks = blocks
        self._kernels = kernels
        self._newest = np.full(num_slots, ON_DEVICE, dtype=np.int32)  # tokens drawn by launched steps
        self._is_current = np.zeros(num_slots, dtype=np.bool_)  # the device knows the slot's length and newest token
        self._on_device = np.zeros(num_slots, dtype=np.bool_)  # the slot is drawn on the device
        self._counts_tokens = np.zeros(num_slots, dtype=np.bool_)  # and its edits depend on the tokens before
        self._knows_history = np.zeros(num_slots, dtype=np.bool_)  # the device has counted all of these
        self._has_mask = np.zeros(num_slots, dtype=np.bool_)  # and its mask is sent with each draw
        self._masks = JointMasks()
        self.forced = ForcedTokens(num_slots)
        self.unmasked = UnmaskedDraws(sampler.table, device, not has_drafts and not blocks.has_states)

    @property
    def table(self) -> SamplingTable:
        return self.sampler.table

    # -- slots --------------------------------------------------------------------------------------------------------
    def set_slot(self, slot: int, sequence: Sequence, end_ids: frozenset[int]) -> None:
        """Initialise the slot for a sequence."""
        request = sequence.request
        grammar: Any = request.params.grammar  # compiled when the request was added
        mask = None if grammar is None else grammar.follow(sequence.output_token_ids)
        params, seed = request.params, sequence.seed
        self.table.set(slot, params, seed, request.prompt_array, sequence.output_token_ids, end_ids, mask=mask)
        self.forced.set_slot(slot, sequence, self.table.states[slot])
        self._is_current[slot] = False
        self._knows_history[slot] = False
        if self.device is not None:
            self._set_on_device(slot, sequence)

    def _set_on_device(self, slot: int, sequence: Sequence) -> None:
        """Decide where the slot's tokens are drawn; its history is sent with its first draw."""
        request = sequence.request
        state, params = self.table.states[slot], request.params
        edits = None if self.device is None or state is None or sequence.group is not None else device_edits(state)
        if self.device is None or edits is None or not self.device.draws(params, edits):
            edits = None
        self._on_device[slot] = edits is not None
        self._counts_tokens[slot] = edits is not None and edits.counts_tokens
        self._has_mask[slot] = edits is not None and edits.has_mask
        if self.device is not None:
            prepared = None if request.adapter is None else request.adapter.prepared
            rope = (request.rope or 0) + (shift_at(request.images, request.images[-1].end) if request.images else 0)
            self.device.set_params(slot, params, sequence.seed, edits, rope, prepared)
        self.unmasked.set_slot(slot, params, edits)

    def clear_slot(self, slot: int) -> None:
        self.table.clear(slot)
        self.forced.clear_slot(slot)
        self._on_device[slot] = self._counts_tokens[slot] = self._has_mask[slot] = False
        self.unmasked.clear_slot(slot)

    def waits_for_tokens(self, slot: int) -> bool:
        """Whether the next draw of the slot needs the values of the tokens before: its step cannot run ahead."""
        return bool(self.table.reads_history[slot] and not self._on_device[slot]) or self.unmasked.waits(slot)

    def draws_late(self, plan: StepPlan) -> bool:
        """Whether a mask of the step depends on tokens in flight.

        The pass of such a step is launched ahead like any other; its draw follows when those tokens are collected.
        """
        return _any_in_flight(plan, self._has_mask & ~self.unmasked.is_on)

    def launched(self, plan: StepPlan, is_late: bool) -> None:
        """Count the draws of a launched step; call it before its sequences count their tokens in flight."""
        others_are_late = is_late and _any_in_flight(plan, self._has_mask & ~self.unmasked.may_be_on)
        self.unmasked.launched(plan, is_late, others_are_late)

    # -- one step ------------------------------------------------------------------------------------------------------
    def update(self, plan: StepPlan) -> None:
        """Update the block tables of the scheduled sequences."""
        slot_of = {item.sequence.id: item.slot for items in (plan.decodes, plan.prefills) for item in items}
        for sequence_id, first, block_ids in self._blocks.take_changes(slot_of):
            slot = slot_of[sequence_id]
            self.tables[slot, first : first + len(block_ids)] = block_ids
            if self.device is not None:
                self.device.set_blocks(slot, first, block_ids)

    def lay_out(self, plan: StepPlan, readout: Readout) -> HostBatch:
        """The plan's batch; tokens that a launched step samples are -1."""
        return HostBatch.from_plan(plan, readout, self.tables, self._newest, self._blocks.block_size)

    def run_on_device(self, plan: StepPlan, batch: HostBatch, given: Array | None = None) -> Array | None:
        """Logits of a step with prompts or drafts that the device has captured; None if it has not.

        `given`: rows in place of the embeddings of all tokens, [t, width]; None: no token is of an image.
        """
        if self.device is None:
            return None
        slots = np.array([item.slot for item in plan.scheduled], dtype=np.int32)
        return self.device.prompt_logits(replace(batch.on_host(), given=given), slots)

    def states_on_device(self, batch: HostBatch) -> Array:
        """f32[t, taps * d]: the hidden states that the pass of `run_on_device` gave out."""
        if self.device is None:
            raise PhaseError("these slots are not on a device: run the plan as a batch")
        return self.device.prompt_states(batch.num_tokens)

    def verified_states(self, row: int) -> Array:
        """f32[1, taps * d]: the hidden state of the newest token of a decode whose drafts `verify` has verified."""
        if self.device is None:
            raise PhaseError("these slots are not on a device: run the plan as a batch")
        return self.device.verified_states(row)

    def stage(self, plan: StepPlan, batch: HostBatch) -> Batch:
        """The batch in the kernel set's arrays, tokens in flight included."""
        staged = batch.to(self._kernels)
        if self.device is not None and staged.adapters is not None:
            staged = replace(staged, adapters=self.device.stage_adapters(staged.adapters))
        if self.device is None or not (batch.token_ids[: len(plan.decodes)] == ON_DEVICE).any():
            return staged
        slots = np.fromiter((item.slot for item in plan.decodes), np.int32, len(plan.decodes))
        filled = self.device.fill_tokens(staged.token_ids, slots)
        return replace(staged, token_ids=filled)

    def verifies_on_device(self, plan: StepPlan, *, has_drafts: bool = True) -> bool:
        """Whether the drafts of a plan are verified and accepted by one launch on the device (`verify`).

        Without drafts the launch is a decode step that returns hidden states.
        """
        if self.device is None or plan.prefills or not plan.decodes or self._blocks.has_states:
            return False
        most = max(item.num_new for item in plan.decodes) - 1
        slots = np.fromiter((item.slot for item in plan.decodes), np.int32, len(plan.decodes))
        if bool(most) != has_drafts or not self.draws_drafts(slots) or not self.device.can_verify(slots, most):
            return False
        return all(_awaits_one_token(item) for item in plan.decodes)

    def verify(self, plan: StepPlan) -> Draws:
        """Launch the pass of a plan with drafts, its draws and their acceptance."""
        if self.device is None:
            raise PhaseError("these slots are not on a device: run the plan as a batch")
        slots = np.fromiter((item.slot for item in plan.decodes), np.int32, len(plan.decodes))
        self._send_progress(plan, slots)
        drafts = np.full((len(slots), max(len(item.drafts) for item in plan.decodes)), NO_DRAFT, dtype=np.int32)
        for row, item in zip(drafts, plan.decodes, strict=True):
            row[: len(item.drafts)] = item.drafts
        pending = self.device.verify(slots, drafts)
        owners = np.repeat(slots, [item.num_new for item in plan.decodes])
        unknown, excluding = SampledTokens.unknown(len(owners)), self.table.is_edited[owners]
        return Draws(unknown, np.arange(len(owners)), self.table.num_logprobs[owners], excluding, pending)

    def decodes_on_device(self, plan: StepPlan) -> np.ndarray | None:
        """i32[n]: the slots of a plan that runs as one decode step on the device; None if it does not."""
        if self.device is None or plan.prefills:
            return None
        if not plan.is_uniform and any(item.num_new > 1 for item in plan.decodes):
            return None
        slots = np.fromiter((item.slot for item in plan.decodes), np.int32, len(plan.decodes))
        if plan.states is not None:
            reads = np.array([used.read for used in plan.states], np.int32)
            writes = np.array([used.writes[0][1] if used.writes else -1 for used in plan.states], np.int32)
            self.device.set_states(slots, reads, writes)
        self._send_progress(plan, slots)
        return slots

    def _send_progress(self, plan: StepPlan, slots: np.ndarray) -> None:
        """Send lengths and newest tokens of the decodes that the device does not have."""
        behind = ~self._is_current[slots]
        if self.device is None or not behind.any():
            return
        late = [item for item, is_late in zip(plan.decodes, behind.tolist(), strict=True) if is_late]
        self.device.set_progress(
            slots[behind],
            np.array([item.start for item in late]),
            np.array([newest_token(item, self._newest) for item in late]),
        )
        self._is_current[slots[behind]] = self._on_device[slots[behind]]  # beams change on the host

    def draw_with_pass(self, plan: StepPlan, slots: np.ndarray) -> Draws | None:
        """Launch pass and draw of a decode step together; None when the host draws some tokens or the draw is late."""
        if self.device is None or not self._on_device[slots].all() or self.draws_late(plan):
            return None
        self._send_edits(self.device, slots)
        pending = self.device.decode(slots, self.tables, _lengths(plan))
        self._newest[slots] = ON_DEVICE
        count = len(slots)
        unknown, excluding = SampledTokens.unknown(count), self.table.is_edited[slots]
        to_check = self.unmasked.to_check(slots)
        return Draws(unknown, np.arange(count), self.table.num_logprobs[slots], excluding, pending, to_check)

    def logits_on_device(self, plan: StepPlan, slots: np.ndarray) -> Array:
        """Launch the pass of a decode step without its draw: f32[n, vocab], valid until the next launch."""
        if self.device is None:
            raise PhaseError("these slots are not on a device: run the plan as a batch")
        if not plan.is_uniform and any(item.sequence.group is not None for item in plan.decodes):  # beams change blocks
            return self.device.decode_logits(slots)
        return self.device.decode_logits(slots, self.tables, _lengths(plan))

    def draw(self, logits: Array, readout: Readout) -> Draws | None:
        """Sample a token for every sampled row, on the device where supported, else on the host."""
        if not readout.sample_rows:
            return None
        on_device = self._on_device[readout.sample_slots]
        if any(readout.pending):
            verified = self._verify(logits, readout)
            if verified is not None:
                return verified
            on_device[:] = False
        if not on_device.any():
            known = self._draw_here(logits, readout, range(len(readout.sample_rows)))
            return Draws(known)
        there = np.flatnonzero(on_device)
        slots = np.asarray(readout.sample_slots, dtype=np.int32)
        num_logprobs = self.table.num_logprobs[slots[there]]
        excluding = self.table.is_edited[slots[there]]
        unknown, to_check = SampledTokens.unknown(len(on_device)), self.unmasked.to_check(slots)
        draws = Draws(unknown, there, num_logprobs, excluding, to_check=to_check)
        if self.device is not None:
            self._send_edits(self.device, slots[there])
            rows, positions = np.asarray(readout.sample_rows), np.asarray(readout.positions)
            draws.pending = self.device.draw(logits, rows[there], slots[there], positions[there])
        self._newest[slots[there]] = ON_DEVICE
        self._is_current[slots[there]] = True
        if len(there) < len(on_device):
            here = np.flatnonzero(~on_device).tolist()
            draws.known.put(here, self._draw_here(logits, readout, here))
        return draws

    def rewound(self, slot: int) -> None:
        """The slot's sequence was rewound: the device has another length and newest token."""
        self._is_current[slot] = False

    def appended(self, slot: int) -> None:
        """The host appended tokens to the slot's sequence: the device has not counted them."""
        self._is_current[slot] = self._knows_history[slot] = False

    def draws_drafts(self, slots: Sequences[int] | np.ndarray) -> bool:
        """Whether the device draws drafts of these slots: it has no edits that read tokens in between."""
        return self.device is not None and bool(self._on_device[slots].all() and not self.table.is_edited[slots].any())

    def _verify(self, logits: Array, readout: Readout) -> Draws | None:
        """Draw at several positions of each slot on the device; None where the host does, since edits read drafts."""
        slots = np.asarray(readout.sample_slots, dtype=np.int32)
        if self.device is None or not self.draws_drafts(slots):
            return None
        rows, positions = np.asarray(readout.sample_rows), np.asarray(readout.positions)
        pending = self.device.draw_drafts(logits, rows, slots, positions)
        if pending is None:
            return None
        self._is_current[slots] = False  # the host decides which of the tokens are kept
        unknown, excluding = SampledTokens.unknown(len(slots)), self.table.is_edited[slots]
        return Draws(unknown, np.arange(len(slots)), self.table.num_logprobs[slots], excluding, pending)

    def _send_edits(self, device: DeviceSlots, slots: np.ndarray) -> None:
        """Send histories that the device does not have, and the masks of the next tokens.

        Both need all tokens of their slots. A history is sent before the first draw of its slot, or after a draw of the
        host: no step in flight draws for such a slot, and the device itself counts the tokens of later ones. A mask is
        computed when the tokens before it are collected (`draws_late`).
        """
        for slot in slots[self._counts_tokens[slots] & ~self._knows_history[slots]].tolist():
            state = self.table.states[slot]
            if state is not None:
                device.set_history(slot, state.history.prompt, state.output_token_ids)
                self._knows_history[slot] = True
        masked = slots[self._has_mask[slots] & ~self.unmasked.is_on[slots]]
        if len(masked):
            states = [self.table.states[slot] for slot in masked.tolist()]
            masks = [state.mask for state in states if state is not None and state.mask is not None]
            self._masks.fill(masks, device.mask_rows(masked))

    def _draw_here(self, logits: Array, readout: Readout, draws: Sequences[int]) -> SampledTokens:
        rows = [readout.sample_rows[draw] for draw in draws]
        slots = [readout.sample_slots[draw] for draw in draws]
        if rows != list(range(logits.shape[0])):
            logits = self._kernels.take(logits, np.asarray(rows, dtype=np.int32))
        pending = [readout.pending[draw] for draw in draws]
        sampled = self.sampler.sample(
            logits, slots, [readout.positions[draw] for draw in draws], pending if any(pending) else None
        )
        self._newest[slots] = sampled.token_ids
        self._is_current[slots] = self._knows_history[slots] = False
        return sampled


def _any_in_flight(plan: StepPlan, masked: np.ndarray) -> bool:
    """Whether a decode of one of the `masked` slots follows a token in flight."""
    return bool(masked.any()) and any(item.sequence.num_expected and masked[item.slot] for item in plan.decodes)


def _lengths(plan: StepPlan) -> np.ndarray:
    """i64[n]: cached tokens of each decode."""
    return np.fromiter((item.start for item in plan.decodes), np.int64, len(plan.decodes))


def _awaits_one_token(item: ScheduledSequence) -> bool:
    """Whether the sequence of a decode has one token, of known value, that is not computed, besides drafts."""
    sequence = item.sequence
    return sequence.group is None and sequence.num_tokens == item.start + 1 and not wants_prompt_logits(item)
