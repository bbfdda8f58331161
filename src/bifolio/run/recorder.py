"""After the forward pass: the only place where progress is counted."""

from __future__ import annotations

import time

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.kernels.interface import Array
from bifolio.run.device_rows import StagedStep
from bifolio.run.sampler import SampledTokens, prompt_logprobs
from bifolio.schedule.batcher import ContinuousBatcher, unforked_children
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.sequence import FinishReason, Request, Sequence, StepResult, TokenLogprob


class Recorder:
    """Counts computed tokens, appends drawn ones, forks, and decides who has ended."""

    def __init__(self, batcher: ContinuousBatcher, blocks: KVCacheBlockManager) -> None:
        self._batcher = batcher
        self._blocks = blocks

    def record(
        self, plan: StepPlan, staged: StagedStep, logits: Array, sampled: SampledTokens | None
    ) -> list[StepResult]:
        """Take over the outcome of a step; one result for every sequence that got a token or ended."""
        results: list[StepResult] = []
        draw = 0
        for item in plan.scheduled:
            sequence, request = item.sequence, item.sequence.request
            sequence.num_computed += item.num_new
            self._blocks.commit(sequence.id, sequence.token_ids, sequence.num_computed)
            if item.slot in staged.prompt_rows:
                self._score_prompt(item, staged.prompt_rows[item.slot], logits)
            if not item.sample_slots:
                continue
            rows = range(draw, draw + len(item.sample_slots))
            draw += len(item.sample_slots)
            if sequence.finish_reason is not None:  # aborted while the step ran
                continue
            assert sampled is not None
            members = [sequence, *unforked_children(sequence)]
            for child in members[1:]:
                self._batcher.fork(sequence, child)
            for member, row in zip(members, rows, strict=True):
                results.extend(self._add_token(request, member, sampled, row))
        return results

    def _add_token(self, request: Request, sequence: Sequence, sampled: SampledTokens, row: int) -> list[StepResult]:
        if row in sampled.errors:
            request.error = str(sampled.errors[row])
            return self._batcher.finish(request, FinishReason.ERROR)
        if sequence.finish_reason is not None:  # a sibling's failure ended the request
            return []
        now = time.perf_counter()
        if not request.metrics.first_token:
            request.metrics.first_token = now
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
            return [
                StepResult(request.request_id, token, False, None, sequence.index, decision.text, logprob, sequence)
            ]
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

    def _score_prompt(self, item: ScheduledSequence, rows: tuple[int, int], logits: Array) -> None:
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
        scores = prompt_logprobs(logits[rows[0] : rows[0] + count], following, request.params.prompt_logprobs or 0)
        for offset, token in enumerate(following):
            request.prompt_logprobs[item.start + 1 + offset] = TokenLogprob(
                token, float(scores.logprobs[offset]), int(scores.ranks[offset]), tuple(scores.top[offset])
            )


def _logprob(sampled: SampledTokens, row: int, token: int) -> TokenLogprob:
    return TokenLogprob(token, float(sampled.logprobs[row]), int(sampled.ranks[row]), tuple(sampled.top[row] or ()))
