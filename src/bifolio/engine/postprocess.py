"""After the forward pass: the only place where progress is counted."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.engine.host_batch import Readout
from bifolio.engine.speculative.speculator import Speculator, num_accepted
from bifolio.errors import RequestError
from bifolio.kernels.interface import Array, KernelSet
from bifolio.sampling.sampler import SampledTokens, Sampler, prompt_logprobs
from bifolio.schedule.batcher import ContinuousBatcher, unforked_children
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.sequence import FinishReason, Request, Sequence, StepResult, TokenLogprob


class Recorder:
    """Counts computed tokens, appends drawn ones, forks, and decides who has ended."""

    def __init__(
        self,
        batcher: ContinuousBatcher,
        blocks: KVCacheBlockManager,
        sampler: Sampler,
        kernels: KernelSet,
        speculator: Speculator | None,
    ) -> None:
        self._batcher = batcher
        self._blocks = blocks
        self._sampler = sampler
        self._kernels = kernels
        self._speculator = speculator

    def publish_prompts(self, plan: StepPlan) -> None:
        """Make what a step reads of prompts findable as soon as it is launched.

        A GPU is busy with the step meanwhile, and whoever finds the blocks uses them in a later one.
        """
        for item in plan.prefills:
            if not item.drafts and item.sequence.finish_reason is None:
                self._commit(item.sequence, item.start + item.num_new)

    def _commit(self, sequence: Sequence, num_computed: int) -> None:
        self._blocks.commit(sequence.id, sequence.tokens_until(num_computed), num_computed)

    def record(
        self,
        plan: StepPlan,
        readout: Readout,
        logits: Array,
        sampled: SampledTokens | None,
        results: list[StepResult],
    ) -> None:
        """Take over the outcome of a step; `results` gets one for every token that was added and every end."""
        searches = []
        draw = 0
        for item in plan.scheduled:
            sequence = item.sequence
            if item.slot in readout.prompt_rows:
                self._score_prompt(item, readout.prompt_rows[item.slot], logits)
            sequence.num_computed += item.num_new
            if sequence.group is not None or not item.sample_slots:
                self._commit(sequence, sequence.num_computed)
                if item.sample_slots and sequence.finish_reason is None:
                    searches.append(sequence.request)
                continue
            rows = range(draw, draw + len(item.sample_slots) * (1 + len(item.drafts)))
            draw = rows.stop
            if sequence.finish_reason is not None:  # aborted while the step ran
                continue
            assert sampled is not None
            if item.drafts:
                results.extend(self._verify(item, sampled, rows))
            else:
                results.extend(self._add_tokens(item, sampled, rows))
        unique = list(dict.fromkeys(searches))
        shortlists = self._shortlists(unique, readout, logits)
        for request in unique:
            results.extend(self._advance_search(request, readout, logits, shortlists.get(request.request_id)))

    def _shortlists(
        self, requests: list[Request], readout: Readout, logits: Array
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """(ids, logprobs) of the likeliest tokens of every beam, by request; what a GPU sends instead of all logits."""
        find_best: Any = getattr(self._kernels, "top_logprobs", None)
        plain = [r for r in requests if not r.search.needs_all_logits(self._slots_of(r), self._sampler)]
        if find_best is None or not plain:
            return {}
        rows = [[readout.group_rows[sequence.id] for sequence in request.search.live()] for request in plain]
        count = max(request.search.num_candidates for request in plain)
        ids, logprobs = find_best(logits, np.concatenate(rows).astype(np.int32), count)
        ends = np.cumsum([len(part) for part in rows])
        return {
            request.request_id: (ids[end - len(part) : end], logprobs[end - len(part) : end])
            for request, part, end in zip(plain, rows, ends, strict=True)
        }

    def _slots_of(self, request: Request) -> dict[int, int]:
        slots = ((member.id, self._batcher.slot_of(member)) for member in request.search.members)
        return {member: slot for member, slot in slots if slot is not None}

    def _add_tokens(self, item: ScheduledSequence, sampled: SampledTokens, rows: range) -> list[StepResult]:
        """One token for the sequence, and one for each that is forked from it at this moment."""
        sequence = item.sequence
        members = [sequence, *unforked_children(sequence)]
        self._commit(sequence, sequence.num_computed)
        for child in members[1:]:
            self._batcher.fork(sequence, child)
        results: list[StepResult] = []
        for member, row in zip(members, rows, strict=True):
            results.extend(self.add_token(sequence.request, member, sampled, row))
        return results

    def _verify(self, item: ScheduledSequence, sampled: SampledTokens, rows: range) -> list[StepResult]:
        """Keep the guesses that equal what was drawn, and the draw after them; cut the cache behind."""
        sequence = item.sequence
        drawn = sampled.token_ids[rows.start : rows.stop].tolist()
        accepted = num_accepted(item.drafts, drawn)
        sequence.num_drafted += len(item.drafts)
        sequence.num_accepted += accepted
        if self._speculator is not None:
            self._speculator.observe(sequence, len(item.drafts), accepted)
        results: list[StepResult] = []
        for row in rows[: accepted + 1]:
            results.extend(self.add_token(sequence.request, sequence, sampled, row))
            if sequence.finish_reason is not None:
                break
        sequence.num_computed = min(item.start + item.num_new - len(item.drafts) + accepted, sequence.num_tokens - 1)
        sequence.num_draft_computed = min(sequence.num_draft_computed, sequence.num_computed)
        self._blocks.truncate(sequence.id, sequence.num_computed)
        self._commit(sequence, sequence.num_computed)
        return results

    def add_token(self, request: Request, sequence: Sequence, sampled: SampledTokens, row: int) -> list[StepResult]:
        if row in sampled.errors:
            request.error = str(sampled.errors[row])
            return self._batcher.finish(request, FinishReason.ERROR)
        if sequence.finish_reason is not None:  # a sibling's failure ended the request
            return []
        if not request.metrics.first_token:
            request.metrics.first_token = time.perf_counter()
        if request.max_tokens == 0:  # only the prompt was wanted
            return [self._end(request, sequence, FinishReason.LENGTH, None, "", None)]
        token = int(sampled.token_ids[row])
        logprob = _logprob(sampled, row, token) if request.params.needs_logprobs else None
        if logprob is not None:
            sequence.cumulative_logprob += logprob.logprob
            sequence.logprobs.append(logprob)
        sequence.append_token(token)
        decision = sequence.stopper.check(token)
        sequence.text += decision.text
        if decision.finish_reason is None:
            index, text = sequence.index, decision.text
            return [StepResult(request.request_id, token, False, None, index, text, logprob, sequence)]
        sequence.stop_reason = decision.stop_reason
        return [self._end(request, sequence, FinishReason(decision.finish_reason), token, decision.text, logprob)]

    def _end(
        self,
        request: Request,
        sequence: Sequence,
        reason: FinishReason,
        token: int | None,
        text: str,
        logprob: TokenLogprob | None,
    ) -> StepResult:
        sequence.finish_reason = reason
        if request.is_finished:
            request.metrics.finished = time.perf_counter()
        return StepResult(request.request_id, token, True, reason, sequence.index, text, logprob, sequence)

    def _advance_search(
        self, request: Request, readout: Readout, logits: Array, shortlist: tuple[np.ndarray, np.ndarray] | None
    ) -> list[StepResult]:
        """All beams of a request at once; results come when the search is done."""
        search = request.search
        if not request.metrics.first_token:
            request.metrics.first_token = time.perf_counter()
        slots = self._slots_of(request)
        try:
            if shortlist is None:
                rows = np.array([readout.group_rows[sequence.id] for sequence in search.live()], dtype=np.int32)
                scores = self._kernels.to_host(self._kernels.take(logits, rows))
                search.advance(scores, slots, self._sampler, self._blocks)
            else:
                search.advance(shortlist[1], slots, self._sampler, self._blocks, shortlist[0])
        except RequestError as error:
            request.error = str(error)
            return self._batcher.finish(request, FinishReason.ERROR)
        if not search.is_done:
            return []
        search.close()
        request.metrics.finished = time.perf_counter()
        return [
            StepResult(request.request_id, None, True, m.finish_reason, m.index, m.text, None, m)
            for m in search.members[: len(search.results())]
        ]

    def _score_prompt(self, item: ScheduledSequence, first_row: int, logits: Array) -> None:
        """Logits at position p score the prompt's token p + 1; the first token has none."""
        request = item.sequence.request
        prompt = request.prompt_token_ids
        if request.prompt_logprobs is None:
            request.prompt_logprobs = [None] * len(prompt)
        last = min(item.start + item.num_new, len(prompt) - 1)  # the last position with a token of the prompt after it
        count = last - item.start
        if count <= 0:
            return
        following = prompt[item.start + 1 : last + 1]
        scores = prompt_logprobs(logits[first_row : first_row + count], following, request.params.prompt_logprobs or 0)
        for offset, token in enumerate(following):
            request.prompt_logprobs[item.start + 1 + offset] = TokenLogprob(
                token, float(scores.logprobs[offset]), int(scores.ranks[offset]), tuple(scores.top[offset])
            )


def _logprob(sampled: SampledTokens, row: int, token: int) -> TokenLogprob:
    return TokenLogprob(token, float(sampled.logprobs[row]), int(sampled.ranks[row]), tuple(sampled.top[row] or ()))
