"""Replay of a trace on the engine in real time, and its report: latencies, speed, and cache utilisation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bifolio.engine.engine import InferenceEngine
from bifolio.measure.statistics import Distribution
from bifolio.measure.trace_files import TraceRequest
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request, StepResult

Progress = Callable[[int], None]  # called with the number of finished requests


@dataclass(frozen=True, slots=True)
class Moment:
    """The engine after one step."""

    at: float  # seconds after the start
    seconds: float  # duration of the step
    num_running: int
    num_waiting: int
    num_used_blocks: int
    utilisation: float  # reserved tokens over the capacity of all blocks in use
    num_output_tokens: int  # so far


@dataclass(slots=True)
class TraceReport:
    """One run over a trace."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int  # as requested; padding is not counted
    seconds: float
    cpu_seconds: float  # of this process, all threads; less sensitive to other programs than `seconds`
    num_blocks: int
    block_size: int
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_computed_prompt_tokens: int = 0  # preempted requests are counted again
    first_token: Distribution = field(default_factory=Distribution)  # seconds from arrival
    between_tokens: Distribution = field(default_factory=Distribution)  # seconds
    latency: Distribution = field(default_factory=Distribution)  # seconds from arrival to the last token
    moments: list[Moment] = field(default_factory=list, repr=False)

    @property
    def output_speed(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def total_speed(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds

    @property
    def utilisation(self) -> float:
        """Reserved tokens over the capacity of allocated blocks, both summed over time."""
        filled = sum(m.seconds * m.num_used_blocks * m.utilisation for m in self.moments)
        return filled / max(sum(m.seconds * m.num_used_blocks for m in self.moments), 1e-12)

    @property
    def occupancy(self) -> float:
        """Allocated blocks over all blocks, summed over time."""
        return self._average(lambda m: m.num_used_blocks) / max(self.num_blocks, 1)

    @property
    def mean_running(self) -> float:
        return self._average(lambda m: m.num_running)

    @property
    def peak_running(self) -> int:
        return max((moment.num_running for moment in self.moments), default=0)

    def _average(self, value: Callable[[Moment], float]) -> float:
        total = sum(moment.seconds for moment in self.moments)
        return sum(m.seconds * value(m) for m in self.moments) / total if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_requests": self.num_requests,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "output_tokens_per_second": self.output_speed,
            "total_tokens_per_second": self.total_speed,
            "requests_per_second": self.num_requests / self.seconds,
            "time_to_first_token": self.first_token.as_dict(),
            "inter_token_latency": self.between_tokens.as_dict(),
            "latency": self.latency.as_dict(),
            "kv_utilisation": self.utilisation,
            "kv_waste": 1.0 - self.utilisation,
            "kv_occupancy": self.occupancy,
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_preemptions": self.num_preemptions,
            "num_cached_tokens": self.num_cached_tokens,
            "num_computed_prompt_tokens": self.num_computed_prompt_tokens,
            "mean_running": self.mean_running,
            "peak_running": self.peak_running,
            "num_steps": len(self.moments),
        }


class Recording:
    """Records a run, step by step."""

    def __init__(self, engine: InferenceEngine, on_progress: Progress | None = None) -> None:
        self.engine = engine
        self.begin = time.perf_counter()
        self._begin_cpu = time.process_time()
        self.moments: list[Moment] = []
        self.token_times: dict[str, list[float]] = defaultdict(list)  # request id -> seconds after the start
        self._before = engine.stats().num_preemptions, engine.stats().num_prefill_tokens
        self._num_output = self._num_ended = 0
        self._on_progress = on_progress

    def now(self) -> float:
        return time.perf_counter() - self.begin

    def step(self) -> list[StepResult]:
        """Run and record one step of the engine."""
        start = self.now()
        results = self.engine.step()
        end = self.now()
        for result in results:
            if result.token is not None:
                self.token_times[result.request_id].append(end)
                self._num_output += 1
            self._num_ended += result.finished
        stats = self.engine.stats()
        self.moments.append(
            Moment(
                end,
                end - start,
                stats.num_running,
                stats.num_waiting,
                stats.num_used_blocks,
                stats.utilisation,
                self._num_output,
            )
        )
        if self._on_progress is not None:
            self._on_progress(self._num_ended)
        return results

    def report(self, name: str, requests: Sequence[TraceRequest], arrivals: Sequence[float]) -> TraceReport:
        """Summarise the run; only requested tokens are counted."""
        times = [self.token_times[str(i)][: request.num_output] for i, request in enumerate(requests)]
        stats, cache = self.engine.stats(), self.engine.config.cache
        return TraceReport(
            name=name,
            num_requests=len(requests),
            num_prompt_tokens=sum(request.num_prompt for request in requests),
            num_output_tokens=sum(len(moments) for moments in times),
            seconds=self.moments[-1].at,
            cpu_seconds=time.process_time() - self._begin_cpu,
            num_blocks=cache.num_blocks - 1,
            block_size=cache.block_size,
            num_preemptions=stats.num_preemptions - self._before[0],
            num_computed_prompt_tokens=stats.num_prefill_tokens - self._before[1],
            first_token=Distribution.of([t[0] - begin for t, begin in zip(times, arrivals, strict=True) if t]),
            between_tokens=Distribution.of([b - a for t in times for a, b in pairwise(t)]),
            latency=Distribution.of([t[-1] - begin for t, begin in zip(times, arrivals, strict=True) if t]),
            moments=self.moments,
        )


def replay(
    engine: InferenceEngine,
    requests: Sequence[TraceRequest],
    prompts: Sequence[list[int]],
    *,
    speed: float = 1.0,
    on_progress: Progress | None = None,
    name: str = "continuous",
) -> TraceReport:
    """Send each request at its arrival time, `speed` times as fast as in the trace; 0: all at once.

    Latency counts from the arrival time in the trace, even if a long step was running then.
    """
    arrivals = [request.arrival / speed if speed > 0 else 0.0 for request in requests]
    recording = Recording(engine, on_progress)
    sent: list[Request] = []
    while len(sent) < len(requests) or engine.has_work:
        while len(sent) < len(requests) and arrivals[len(sent)] <= recording.now():
            number = len(sent)
            sent.append(engine.add_request(str(number), prompts[number], exactly(requests[number].num_output)))
        if engine.has_work:
            recording.step()
        else:
            time.sleep(max(arrivals[len(sent)] - recording.now(), 0.0))
    report = recording.report(name, requests, arrivals)
    report.num_cached_tokens = sum(request.metrics.num_cached_tokens for request in sent)
    return report


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy parameters for exactly this many tokens."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
