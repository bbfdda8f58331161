"""A load test by several client processes: one process parses events more slowly than a fast server sends them."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from dataclasses import dataclass
from typing import Any

from bifolio.errors import ConfigError
from bifolio.measure.load import LoadReport, Plan, run_load
from bifolio.measure.load_client import LoadClient, Timing

START_SECONDS = 120.0  # for the processes to start
CPU_METRICS = {
    "front_end": "bifolio:front_end_cpu_seconds_total",
    "engine": "bifolio:engine_cpu_seconds_total",
}
BEAT_SECONDS = 0.6  # the engine reports its CPU time twice a second


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test."""

    url: str
    key: str | None = None
    timeout: float = 600.0  # seconds that a request may take

    def client(self) -> LoadClient:
        return LoadClient(self.url, key=self.key, timeout=self.timeout)


def run_clients(
    target: Target, plan: Plan, body: dict[str, Any], name: str, limits: dict[str, float], clients: int = 1
) -> LoadReport:
    """Send all requests from `clients` processes; the timings are in the order of the requests."""
    before = asyncio.run(_cpu_seconds(target))
    if clients == 1:
        report = asyncio.run(run_load(target.client(), plan, body, name, limits))
    else:
        report = _run_processes(target, plan, body, name, limits, clients)
    if before:
        time.sleep(BEAT_SECONDS)
        after = asyncio.run(_cpu_seconds(target))
        report.cpu_seconds = {kind: after[kind] - before[kind] for kind in before if kind in after}
    return report


async def _cpu_seconds(target: Target) -> dict[str, float]:
    """CPU seconds of the server's processes so far; empty for a server that does not report them."""
    samples = await target.client().metrics()
    return {kind: samples[name] for kind, name in CPU_METRICS.items() if name in samples}


def shares(plan: Plan, clients: int) -> list[tuple[list[int], Plan]]:
    """(numbers of its requests, its plan) for each process; requests and concurrency are divided evenly."""
    most = len(plan.requests) if plan.concurrency is None else min(plan.concurrency, len(plan.requests))
    count = max(1, min(clients, most))
    divided = []
    for number in range(count):
        own = list(range(number, len(plan.requests), count))
        extra = 0 if plan.concurrency is None else number < plan.concurrency % count
        concurrency = None if plan.concurrency is None else plan.concurrency // count + extra
        divided.append((own, Plan([plan.requests[index] for index in own], concurrency)))
    return divided


def _run_processes(
    target: Target, plan: Plan, body: dict[str, Any], name: str, limits: dict[str, float], clients: int
) -> LoadReport:
    spawn = multiprocessing.get_context("spawn")
    divided = shares(plan, clients)
    start = spawn.Barrier(len(divided) + 1)
    results: Any = spawn.Queue()
    processes = [
        spawn.Process(target=_client, args=(target, part, body, start, results, number), daemon=True)
        for number, (_, part) in enumerate(divided)
    ]
    for process in processes:
        process.start()
    timings: list[Timing | None] = [None] * len(plan.requests)
    try:
        start.wait(START_SECONDS)
        began, ended = time.perf_counter(), 0.0
        for _ in processes:
            number, part, end = results.get(timeout=target.timeout + START_SECONDS)
            ended = max(ended, end)
            for index, timing in zip(divided[number][0], part, strict=True):
                timings[index] = timing
    except Exception as error:
        raise ConfigError(f"a client process of the load test failed: {error!r}") from error
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
    return LoadReport(name, [timing for timing in timings if timing is not None], ended - began, limits)


def _client(target: Target, plan: Plan, body: dict[str, Any], start: Any, results: Any, number: int) -> None:
    """Main function of a client process. `time.perf_counter` is one clock for all processes of a machine."""
    client = target.client()
    start.wait(START_SECONDS)
    report = asyncio.run(run_load(client, plan, body, "", {}))
    results.put((number, report.timings, time.perf_counter()))
