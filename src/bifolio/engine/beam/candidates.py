"""Reads of the scores that beam searches rank: queued with the launch of a step, done when it is collected."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bifolio.kernels.interface import Array, KernelSet
from bifolio.schedule.plan import StepPlan
from bifolio.sequence import Request

Candidates = tuple[np.ndarray, np.ndarray | None]  # logits f32[b, vocab], or (logprobs f32[b, k], ids i64[b, k])


def queue_reads(
    plan: StepPlan,
    logits: Array,  # f32[r, vocab]
    rows_of: dict[int, int],  # sequence id of a beam -> its row
    kernels: KernelSet,
    needs_all_logits: Callable[[Request], bool],
) -> dict[str, Callable[[], Candidates]]:
    """Queue the reads of a step, by request id: the top logprobs where they suffice, else all logits."""
    items = [item for item in plan.scheduled if item.sequence.group is not None and item.sample_slots]
    requests = list(dict.fromkeys(item.sequence.request for item in items))
    short = [request for request in requests if not needs_all_logits(request)]
    rows = {r.request_id: [rows_of[beam.id] for beam in r.search.live()] for r in requests}
    read = None
    if short:
        count = max(request.search.num_candidates for request in short)
        wanted = np.concatenate([rows[request.request_id] for request in short]).astype(np.int32)
        read = kernels.top_logprobs(logits, wanted, count)
    reads: dict[str, Callable[[], Candidates]] = {}
    first = 0
    for request in requests:
        own = rows[request.request_id]
        if read is not None and request in short:
            reads[request.request_id] = _part(read, first, first + len(own))
            first += len(own)
        else:
            fetched = kernels.fetch(kernels.take(logits, np.array(own, dtype=np.int32)))
            reads[request.request_id] = _whole(fetched)
    return reads


def _part(read: Callable[[], tuple[np.ndarray, np.ndarray]], first: int, last: int) -> Callable[[], Candidates]:
    def candidates() -> Candidates:
        ids, logprobs = read()
        return logprobs[first:last], ids[first:last]

    return candidates


def _whole(fetched: Callable[[], np.ndarray]) -> Callable[[], Candidates]:
    return lambda: (fetched(), None)
