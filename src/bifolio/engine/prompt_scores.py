"""The logprobs of a prompt's own tokens, from the logits of its chunks."""

from __future__ import annotations

import numpy as np

from bifolio.errors import NO_FINITE_LOGIT, ModelOutputError
from bifolio.kernels.interface import Array
from bifolio.sampling.sampler import prompt_logprobs
from bifolio.schedule.plan import ScheduledSequence
from bifolio.sequence import LogprobRecords


def score_prompt(item: ScheduledSequence, first_row: int, logits: Array) -> ModelOutputError | None:
    """Store the logprobs of a chunk: logits at position p score the prompt's token p + 1; the first token has none."""
    request = item.sequence.request
    if item.sequence.finish_reason is not None:
        return None
    prompt = request.prompt_token_ids
    num_pairs = request.params.prompt_logprobs or 0
    if request.prompt_scores is None:
        request.prompt_scores = LogprobRecords(num_pairs)
    first = max(item.start, request.score_from)
    last = min(item.start + item.num_new, len(prompt) - 1)  # the last position followed by a prompt token
    count = last - first
    if count <= 0:
        return None
    following = prompt[first + 1 : last + 1]
    scores = prompt_logprobs(logits[first_row : first_row + count], following, num_pairs)
    if np.isnan(scores.logprobs).any():
        return ModelOutputError(NO_FINITE_LOGIT)
    packed = scores.pack(np.array(following, dtype=np.int32), num_pairs).tobytes()
    request.prompt_scores.put(first - request.score_from, packed)  # without `score_from`, 0 is the second token's
    return None
