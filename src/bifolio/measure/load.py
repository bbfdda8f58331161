"""Load on a server: requests by rate (open loop), by concurrency (closed loop), or as a trace recorded them.

Open loop measures the latency that users see: requests arrive independently of earlier ones. Closed loop measures
the capacity of a server: a constant number of requests is in flight.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bifolio.errors import ConfigError
from bifolio.measure.load_client import LoadClient, Timing
from bifolio.measure.statistics import Distribution

LIMIT_NAMES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens: `128`, `64:256` (uniform), or `128~0.5` (lognormal: median and spread)."""

    text: str

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        if match := re.fullmatch(r"(\d+):(\d+)", self.text):
            low, high = int(match[1]), int(match[2])
            if 1 <= low <= high:
                return [int(value) for value in generator.integers(low, high + 1, count)]
        elif match := re.fullmatch(r"(\d+)~(\d+(?:\.\d+)?)", self.text):
            if int(match[1]) > 0:
                values = generator.lognormal(np.log(int(match[1])), float(match[2]), count)
                return [max(1, round(float(value))) for value in values]
        elif self.text.isdigit() and int(self.text) > 0:
            return [int(self.text)] * count
        raise ConfigError(f"{self.text!r} is not a length: write 128, 64:256 (uniform) or 128~0.5 (lognormal)")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request: its due time, prompt and number of tokens."""

    due: float  # seconds after the start; 0 in a closed loop
    prompt: list[int]
    num_output: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests and their pacing."""

    requests: Sequence[LoadRequest]
    concurrency: int | None = None  # None: each at its due time


@dataclass(slots=True)
class LoadReport:
    """Results of a load test. Times are in seconds."""

    plan_name: str
    timings: list[Timing]
    seconds: float
    limits: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # of the server's processes during the test, by kind

    @property
    def good(self) -> list[Timing]:
        return [timing for timing in self.timings if timing.error is None]

    def values(self, name: str) -> list[float]:
        """`ttft`, `tpot`, `itl` (between two events, all requests together) or `e2e`."""
        if name == "ttft":
            return [timing.first_token for timing in self.good if timing.events]
        if name == "tpot":
            return [value for timing in self.good if (value := timing.per_token) is not None]
        if name == "e2e":
            return [timing.whole for timing in self.good]
        return [gap for timing in self.good for gap in np.diff(timing.events).tolist()]

    @property
    def output_tokens(self) -> int:
        return sum(timing.num_output for timing in self.good)

    def cpu_per_token(self, kind: str) -> float:
        """CPU seconds of these processes of the server for each output token."""
        return self.cpu_seconds[kind] / max(self.output_tokens, 1)

    def keeps_limits(self, timing: Timing) -> bool:
        """Whether a request met the latency limits."""
        if timing.error is not None:
            return False
        gaps = np.diff(timing.events)
        found = {
            "ttft": timing.first_token,
            "tpot": timing.per_token or 0.0,
            "itl": float(gaps.max()) if len(gaps) else 0.0,
            "e2e": timing.whole,
        }
        return all(found[name] <= limit for name, limit in self.limits.items())

    def as_dict(self) -> dict[str, Any]:
        kept = sum(self.keeps_limits(timing) for timing in self.timings)
        return {
            "load": self.plan_name,
            "requests": len(self.timings),
            "failed": len(self.timings) - len(self.good),
            "errors": sorted({timing.error for timing in self.timings if timing.error is not None})[:10],
            "seconds": self.seconds,
            "requests_per_second": len(self.good) / self.seconds,
            "prompt_tokens": sum(timing.num_prompt for timing in self.good),
            "output_tokens": self.output_tokens,
            "output_tokens_per_second": self.output_tokens / self.seconds,
            **{name: Distribution.of(self.values(name)).as_dict() for name in LIMIT_NAMES},
            **{f"{kind}_cpu_us_per_token": 1e6 * self.cpu_per_token(kind) for kind in self.cpu_seconds},
            "limits": self.limits,
            "goodput_requests_per_second": kept / self.seconds,
            "goodput_share": kept / max(len(self.timings), 1),
        }


def arrivals(count: int, rate: float, generator: np.random.Generator, burstiness: float = 1.0) -> list[float]:
    """Arrival times; `burstiness` 1 is a Poisson process, smaller values give bursts, larger ones even spacing."""
    if rate == float("inf"):
        return [0.0] * count
    if not rate > 0 or not burstiness > 0:
        raise ConfigError("the rate and the burstiness must be above 0")
    gaps = generator.gamma(burstiness, 1.0 / (rate * burstiness), count)
    return [float(moment) for moment in np.cumsum(gaps) - gaps[0]]


async def run_load(
    client: LoadClient, plan: Plan, body: dict[str, Any], name: str, limits: dict[str, float]
) -> LoadReport:
    """Send all requests; the timings are in the order of the requests."""
    began = time.perf_counter()
    gate = asyncio.Semaphore(plan.concurrency or len(plan.requests) or 1)

    async def one(request: LoadRequest) -> Timing:
        wait = began + request.due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        async with gate:
            asked = {**body, "prompt": request.prompt, "max_tokens": request.num_output, "stream": True}
            timing = await client.complete({**asked, "stream_options": {"include_usage": True}})
            timing.num_prompt = timing.num_prompt or len(request.prompt)
            return timing

    timings = list(await asyncio.gather(*(one(request) for request in plan.requests)))
    return LoadReport(name, timings, time.perf_counter() - began, limits)


def parse_limits(text: str | None) -> dict[str, float]:
    """`ttft:500,tpot:50` in milliseconds → seconds."""
    limits: dict[str, float] = {}
    for part in (text or "").split(","):
        if not part:
            continue
        name, _, value = part.partition(":")
        try:
            limit = float(value) / 1000
        except ValueError:
            limit = -1.0
        if name not in LIMIT_NAMES or not limit > 0:
            raise ConfigError(f"{part!r} is not a limit: write for example ttft:500,tpot:50 (milliseconds)")
        limits[name] = limit
    return limits
