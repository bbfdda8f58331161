"""Static batching of a trace, for comparison: the next batch starts when the longest request of the last one ends.

Two variants, on the same kernels, engine and requests, both with a cache that is large enough for any batch:

    padded   a rectangular batch: prompts are padded to the longest one, and finished sequences keep decoding until
             the last one ends; the extra tokens are computed and not counted
    packed   the upper limit of static batching: no padding; finished sequences cost no time, their slots stay empty
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bifolio.engine.engine import InferenceEngine
from bifolio.measure.trace import Progress, Recording, TraceReport, exactly
from bifolio.measure.trace_files import TraceRequest


def run_static(
    engine: InferenceEngine,
    requests: Sequence[TraceRequest],
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    padded: bool,
    speed: float = 1.0,
    on_progress: Progress | None = None,
) -> TraceReport:
    """Batches of up to `batch_size` requests that have arrived, in order, one batch after the other."""
    arrivals = [request.arrival / speed if speed > 0 else 0.0 for request in requests]
    recording = Recording(engine, on_progress)
    first = 0
    while first < len(requests):
        time.sleep(max(arrivals[first] - recording.now(), 0.0))
        now, last = recording.now(), first + 1
        while last < len(requests) and last - first < batch_size and arrivals[last] <= now:
            last += 1
        _add_batch(engine, requests, prompts, range(first, last), padded)
        while engine.has_work:
            recording.step()
        first = last
    return recording.report("static, padded" if padded else "static, packed", requests, arrivals)


def _add_batch(
    engine: InferenceEngine,
    requests: Sequence[TraceRequest],
    prompts: Sequence[list[int]],
    members: range,
    padded: bool,
) -> None:
    width = max(len(prompts[index]) for index in members)
    length = max(requests[index].num_output for index in members)
    for index in members:
        prompt, num_output = prompts[index], requests[index].num_output
        if padded:
            prompt, num_output = [0] * (width - len(prompt)) + prompt, length
        engine.add_request(str(index), prompt, exactly(num_output))


def static_model_len(requests: Sequence[TraceRequest]) -> int:
    """The longest padded sequence: the longest prompt may share a batch with the longest output."""
    return max(request.num_prompt for request in requests) + max(request.num_output for request in requests)
