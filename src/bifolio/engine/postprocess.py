"""After a pass: progress, tokens, forks, verified drafts, beams and finished sequences.

`launched` runs right after the launch and needs only lengths: prompt blocks are committed, sequences count their tokens
in flight, and further completions are forked. `collect` runs when the tokens are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.sharing import SpeculativeDecodingSharing
from bifolio.engine.beam.candidates import Candidates, queue_reads
from bifolio.engine.executor import Launched, ModelRunner
from bifolio.engine.host_batch import Readout
from bifolio.engine.pooling import PooledPass
from bifolio.engine.prompt_scores import score_prompt
from bifolio.engine.slot_state import SlotState
from bifolio.engine.speculative.speculator import Speculator, num_accepted
from bifolio.errors import BifolioError, ModelOutputError, RequestError
from bifolio.sampling.sampler import SampledTokens
from bifolio.schedule.batcher import ContinuousBatcher
from bifolio.schedule.phases import PhaseManager
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.sequence import (
    DraftStep,
    FinishReason,
    Request,
    Sequence,
    StepResult,
    team,
)
from bifolio.text.stopping import StopDecision, TokenEnd

ONLY_PROMPT = TokenEnd("length")  # of a request without output tokens
POOLED = TokenEnd("stop")  # of a request for a vector or scores


@dataclass(slots=True)
class _Drawn:
    """The tokens of a step as Python numbers, and their scores as records."""

    token_ids: list[int]
    errors: dict[int, BifolioError]
    logprobs: list[float]  # empty if no sequence of the step has logprobs
    records: bytes
    record_bytes: int  # of one row; a sequence with fewer alternatives takes the beginning

    @classmethod
    def of(cls, sampled: SampledTokens) -> _Drawn:
        tokens, scores = sampled.token_ids, sampled.scores
        if scores is None:
            return cls(tokens.tolist(), sampled.errors, [], b"", 0)
        words = scores.pack(tokens, max(int(scores.num_top.max()), 0))
        return cls(tokens.tolist(), sampled.errors, scores.logprobs.tolist(), words.tobytes(), 4 * words.shape[1])

    def score(self, row: int, sequence: Sequence) -> None:
        """Append the logprobs of a row to those of its sequence."""
        records, size = sequence.logprobs, self.record_bytes
        start = row * size
        records.add(self.records[start : start + (records.num_bytes if records.num_bytes < size else size)])
        sequence.cumulative_logprob += self.logprobs[row]


@dataclass(slots=True)
class Ticket:
    """A launched step, not yet collected: its plan, its draws, and the inputs of `collect`."""

    plan: StepPlan
    readout: Readout
    launched: Launched
    forked: dict[int, list[Sequence]] = field(default_factory=dict)  # slot of a parent -> its forks
    candidates: dict[str, Callable[[], Candidates]] = field(default_factory=dict)  # of beam searches, by request id
    started: float = 0.0  # `time.perf_counter` of the launch
    vectors: PooledPass | None = None  # of the sequences whose hidden states are pooled


class Postprocessor:
    """Applies the results of launched steps; the only caller of the sequences' progress methods in an engine."""

    def __init__(
        self,
        batcher: ContinuousBatcher,
        phases: PhaseManager,
        blocks: KVCacheBlockManager,
        slots: SlotState,
        runner: ModelRunner,
        speculator: Speculator | None,
        speculation: SpeculativeDecodingSharing | None,
    ) -> None:
        self._batcher = batcher
        self._phases = phases
        self._blocks = blocks
        self._slots, self._sampler, self._forced = slots, slots.sampler, slots.forced
        self._kernels, self._runner = runner.kernels, runner
        self._speculator = speculator
        self._speculation = speculation

    # -- after the launch ----------------------------------------------------------------------------------------------
    def launched(
        self,
        plan: StepPlan,
        readout: Readout,
        launched: Launched,
        started: float,
        vectors: PooledPass | None = None,
    ) -> Ticket:
        """Count the launched tokens; queue the reads of beam search candidates."""
        ticket = Ticket(plan, readout, launched, started=started, vectors=vectors)
        for item in plan.decodes:
            item.sequence.launch(item.num_new, item.sequence.group is None)
        for item in plan.prefills:
            self._launched_prompt(item, ticket)
        if readout.group_rows:
            logits = launched.logits
            ticket.candidates = queue_reads(plan, logits, readout.group_rows, self._kernels, self._needs_all_logits)
        if plan.prefills:
            self._batcher.prompts_advanced()
        return ticket

    def _launched_prompt(self, item: ScheduledSequence, ticket: Ticket) -> None:
        sequence = item.sequence
        sequence.launch(item.num_new, bool(item.sample_slots) and sequence.group is None)
        # Committed before the pass has run: a later step that shares these blocks runs after it on the device.
        self._commit(sequence, sequence.num_scheduled)
        if item.sample_slots:
            children = unforked_children(sequence)
            for child in children:
                self._batcher.fork(sequence, child, item.num_new)
                if self._speculator is not None:
                    self._speculator.drafter.forked(sequence, child)
            if children:
                ticket.forked[item.slot] = children

    # -- when the tokens are known -------------------------------------------------------------------------------------
    def collect(self, ticket: Ticket, results: list[StepResult]) -> None:
        """Apply the result of a step; `results` gets an entry for every added token and every finished sequence."""
        sampled = None if ticket.launched.draws is None else _Drawn.of(ticket.launched.draws.collect())
        decodes, items = ticket.plan.decodes, ticket.plan.prefills
        discarded = self._discarded(ticket, sampled)
        draw = 0
        if sampled is not None and ticket.plan.has_plain_decodes:
            draw = len(decodes)
            self._collect_decodes(decodes, sampled, discarded, results)
            for item in decodes if self._forced.is_on.any() else ():
                self._append_forced(item.sequence, item.slot, results)
        else:
            items = decodes + items
        searches = []
        for item in items:
            sequence = item.sequence
            if item.slot in ticket.readout.prompt_rows:
                error = score_prompt(item, ticket.readout.prompt_rows[item.slot], ticket.launched.logits)
                if error is not None:
                    self._end(sequence, error, results)
            members = [sequence, *ticket.forked.get(item.slot, ())]
            for member in members:
                member.advance(item.num_new)
            if sequence.group is not None or not item.sample_slots:
                if sequence.finish_reason is None and self._blocks.has_table(sequence.id):
                    self._commit(sequence, sequence.num_computed)
                    if item.sample_slots:
                        searches.append(sequence.request)
                continue
            rows = range(draw, draw + len(item.sample_slots) * (1 + len(item.drafts)))
            draw = rows.stop
            if sampled is None:
                raise RequestError("a step sampled no tokens although its plan has sampled slots")
            if rows.start in discarded:
                self._discard(item)
            elif item.drafts:
                self._verify(item, sampled, rows, results)
            else:
                self._add_tokens(members, sampled, rows, results)
            if item.start < sequence.num_prompt or item.num_new > 1 + len(item.drafts):
                self._enter_decode(members)
            for member, slot in zip(members, item.sample_slots, strict=True):
                self._append_forced(member, slot, results)
        for request in dict.fromkeys(searches):
            self._advance_search(request, ticket.candidates[request.request_id], results)
        if ticket.vectors is not None:
            for sequence, error in ticket.vectors.collect(self._runner):
                self._end(sequence, POOLED if error is None else error, results)

    def _discarded(self, ticket: Ticket, drawn: _Drawn | None) -> frozenset[int]:
        """The draws of decodes that ran ahead of their grammars and whose tokens are not used."""
        draws = ticket.launched.draws
        if draws is None or draws.to_check is None or drawn is None:
            return frozenset()
        items = dict(_decode_draws(ticket.plan))
        live = {row: items[row] for row in draws.to_check.tolist() if items[row].sequence.finish_reason is None}
        void = [row for row, item in live.items() if item.sequence.num_void]  # follow a token that is not used
        rows = [row for row, item in live.items() if not item.sequence.num_void and row not in drawn.errors]
        check = self._slots.unmasked.check
        forbidden = [row for row in rows if not check(live[row].slot, drawn.token_ids[row])]
        return frozenset(void + forbidden)

    def _discard(self, item: ScheduledSequence) -> None:
        """Drop a sampled token; when none is in flight behind it, the newest token is computed once more."""
        sequence = item.sequence
        if sequence.finish_reason is not None:  # by the draw of another completion of its request
            return
        sequence.discard_token()
        self._slots.unmasked.discarded(item.slot, sequence.num_void)
        if not sequence.num_expected:
            last = sequence.num_tokens - 1
            self._blocks.truncate(sequence.id, last)
            sequence.rewind(last)
            self._slots.rewound(item.slot)

    def _collect_decodes(
        self,
        decodes: tuple[ScheduledSequence, ...],
        drawn: _Drawn,
        discarded: frozenset[int],
        results: list[StepResult],
    ) -> None:
        """Add one token to each of these sequences: a plain decode step."""
        block_size, has_errors, tokens = self._blocks.block_size, bool(drawn.errors), drawn.token_ids
        for row, item in enumerate(decodes):
            sequence = item.sequence
            if discarded and row in discarded:
                sequence.advance(1)
                self._discard(item)
                continue
            if sequence.finish_reason is not None or sequence.checks_text or has_errors:
                sequence.advance(1)
                if sequence.finish_reason is None:  # else it ended while the step ran
                    if sequence.num_computed % block_size == 0:
                        self._commit(sequence, sequence.num_computed)
                    self._add_token(sequence, drawn, row, results)
                continue
            token, request, stops = tokens[row], sequence.request, sequence.stops
            count = sequence.decode(token)
            if sequence.num_computed % block_size == 0:
                self._commit(sequence, sequence.num_computed)
            if request.wants_logprobs:
                drawn.score(row, sequence)
            if not request.metrics.first_token:  # the request began with this decode, behind given tokens
                request.metrics.first_token = time.perf_counter()
            if token in stops.end_ids or count >= stops.limit:
                end = stops.check(token, count)
                if end is not None:
                    self._end(sequence, end, results)
                    continue
            results.append(StepResult(request.request_id, token, False, None, sequence.index, count, sequence))

    def _enter_decode(self, sequences: list[Sequence]) -> None:
        """Move sequences to decode: the prompt is computed and the first token after it is known."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                self._phases.transition_to_decode(sequence.id)

    def _commit(self, sequence: Sequence, num_computed: int) -> None:
        self._blocks.commit(sequence.id, sequence.tokens_until(num_computed), num_computed)

    def _slots_of(self, request: Request) -> dict[int, int]:
        slots = ((member.id, self._batcher.slot_of(member)) for member in request.search.members)
        return {member: slot for member, slot in slots if slot is not None}

    def _needs_all_logits(self, request: Request) -> bool:
        return bool(request.search.needs_all_logits(self._slots_of(request), self._sampler))

    def _add_tokens(self, members: list[Sequence], drawn: _Drawn, rows: range, results: list[StepResult]) -> None:
        """Add one token to the sequence and one to each of its new forks."""
        sequence = members[0]
        if sequence.finish_reason is None and sequence.num_computed % self._blocks.block_size == 0:
            self._commit(sequence, sequence.num_computed)
        for member, row in zip(members, rows, strict=True):
            if member.finish_reason is None:  # else it ended while the step ran
                self._add_token(member, drawn, row, results)

    def _verify(self, item: ScheduledSequence, drawn: _Drawn, rows: range, results: list[StepResult]) -> None:
        """Keep the drafts that equal the sampled tokens, and the token after them; truncate the rest of the cache."""
        sequence = item.sequence
        if sequence.finish_reason is not None or self._speculation is None:
            return
        drafts = item.drafts if self._speculator is None else self._speculator.known(item)
        accepted = num_accepted(drafts, drawn.token_ids[rows.start : rows.stop])
        sequence.num_drafted += len(drafts)
        sequence.num_accepted += accepted
        if self._speculator is not None:
            self._speculator.observe(sequence, len(drafts), accepted)
        if sequence.request.steps is not None:
            position = len(sequence.output_token_ids)
            sequence.request.steps.append(DraftStep(sequence.index, position, drafts, accepted))
        for row in rows[: accepted + 1]:
            self._add_token(sequence, drawn, row, results)
            if sequence.finish_reason is not None:
                break
        if sequence.finish_reason is FinishReason.ERROR:
            return
        base = item.start + item.num_new - len(item.drafts)
        num_computed = min(base + accepted, sequence.num_tokens - 1)
        self._speculation.verify_speculation(sequence.id, num_computed - base)
        sequence.rewind(num_computed)
        self._commit(sequence, num_computed)

    def _add_token(self, sequence: Sequence, drawn: _Drawn, row: int, results: list[StepResult]) -> None:
        """Add the token of a row to a sequence that has not ended."""
        request = sequence.request
        if row in drawn.errors:
            self._end(sequence, drawn.errors[row], results)
            return
        if not request.metrics.first_token:
            request.metrics.first_token = time.perf_counter()
        if request.max_tokens == 0:  # only the prompt is scored
            self._end(sequence, ONLY_PROMPT, results)
            return
        token = drawn.token_ids[row]
        if request.wants_logprobs:
            drawn.score(row, sequence)
        self._append(sequence, token, results)

    def _append_forced(self, sequence: Sequence, slot: int, results: list[StepResult]) -> None:
        """Append the tokens that the grammar leaves no choice for; the next pass computes them with the newest one."""
        tokens = self._forced.after(slot, sequence) if self._forced.is_on[slot] else []
        for token in tokens:
            self._append(sequence, token, results)
            self._forced.appended(sequence)
            if sequence.finish_reason is not None:
                return
        if tokens:
            self._slots.appended(slot)

    def _append(self, sequence: Sequence, token: int, results: list[StepResult]) -> None:
        """Append a token; end the sequence where it is the last one."""
        request = sequence.request
        sequence.append_token(token)
        count = len(sequence.output_token_ids)
        if sequence.checks_text:
            decision: StopDecision = sequence.reader.check(token)
            end: TokenEnd | StopDecision | None = None if decision.finish_reason is None else decision
        else:
            end = sequence.stops.check(token, count)
        if end is not None:
            self._end(sequence, end, results)
            return
        results.append(StepResult(request.request_id, token, False, None, sequence.index, count, sequence))

    def _end(self, sequence: Sequence, end: TokenEnd | StopDecision | BifolioError, results: list[StepResult]) -> None:
        """End a sequence with its newest token, or its whole request with an error: the only place where steps do.

        No more work of a sequence that has ended is applied; an error also ends completions that wait for their row.
        """
        request = sequence.request
        if isinstance(end, BifolioError):
            request.set_error(end.fault, str(end))
            results.extend(self._batcher.finish(request, FinishReason.ERROR))
            return
        reason, number = FinishReason(end.finish_reason), len(sequence.output_token_ids)
        sequence.stop_reason = end.stop_reason
        sequence.finish(reason)
        if request.is_finished:
            request.metrics.finished = time.perf_counter()
        token = sequence.output_token_ids[-1] if number else None
        results.append(StepResult(request.request_id, token, True, reason, sequence.index, number, sequence))

    def _advance_search(
        self, request: Request, candidates: Callable[[], Candidates], results: list[StepResult]
    ) -> None:
        """Advance all beams of a request; results follow when the search is done."""
        search = request.search
        if not request.metrics.first_token:
            request.metrics.first_token = time.perf_counter()
        scores, ids = candidates()
        try:
            search.advance(scores, self._slots_of(request), self._sampler, ids)
        except (RequestError, ModelOutputError) as error:
            self._end(request.sequences[0], error, results)
            return
        if not search.is_done:
            self._enter_decode([beam for beam in search.live() if len(beam.output_token_ids) == 1])
            return
        search.close()
        request.metrics.finished = time.perf_counter()
        results.extend(
            StepResult(request.request_id, None, True, m.finish_reason, m.index, 0, m)
            for m in search.members[: len(search.results())]
        )


def _decode_draws(plan: StepPlan) -> Iterator[tuple[int, ScheduledSequence]]:
    """(Number of the draw, its decode), for decodes of one token; beams are not drawn."""
    draw = 0
    for item in plan.decodes:
        if item.sequence.group is None:
            yield draw, item
            draw += 1 + len(item.drafts)


def unforked_children(sequence: Sequence) -> list[Sequence]:
    """Sequences of the same request that are not yet forked from this one."""
    return team(sequence)[1:] if sequence.group is None else []
