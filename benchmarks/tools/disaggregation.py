"""Prefill and decode on one engine or on two: time between tokens while prompts arrive.

    python -m benchmarks.tools.disaggregation azure_conv.csv --limit 200              # on an idle machine, in real time
    python -m benchmarks.tools.disaggregation azure_conv.csv --limit 200 --cpu-time   # on a busy one

In real time both arrangements get the same threads: one engine with `--threads`, or two processes with half of them
each. With --cpu-time the engines run in one thread, one after the other, and each has a clock that advances by the
processor time of its steps and of its part of the transfers; the clock of the single engine advances half as fast, as
if two cores halved every step. Outputs are compared token by token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bifolio import LLM
from bifolio.config.transfer import Address
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.thread import EngineThread
from bifolio.engine.transfer.blocks import Arrival, Sizes, read_blocks
from bifolio.engine.transfer.decode import BlockFetcher
from bifolio.engine.transfer.prefill import PrefillServer
from bifolio.engine.transfer.wire import checksum
from bifolio.measure.trace import exactly
from bifolio.measure.trace_files import TraceRequest, longest, make_prompts, read_trace, scaled
from bifolio.sequence import Request, StepResult


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path, help="an Azure .csv or a Mooncake .jsonl trace")
    parser.add_argument("--model", default="stories", help="a model folder, a .gguf file, or a model's name")
    parser.add_argument("--limit", type=int, default=200, help="requests from the start of the trace")
    parser.add_argument("--scale", type=float, default=0.25, help="factor of prompt and output lengths")
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as recorded")
    parser.add_argument("--threads", type=int, default=2, help="threads of all engines together")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="sequences that run at the same time")
    parser.add_argument("--cpu-time", action="store_true", help="clocks of processor time instead of real time")
    parser.add_argument("--prefill-role", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    recorded = read_trace(arguments.trace, arguments.limit)
    llm = open_llm(arguments, recorded)
    if arguments.prefill_role:
        serve_blocks(llm)
        return
    length = llm.engine.config.max_model_len
    requests, _ = scaled(recorded, arguments.scale, length)
    prompts = make_prompts(requests, llm.model.config.vocab_size)
    if arguments.cpu_time:
        split = [open_llm(arguments, recorded, split=True) for _ in range(3)]
        arrivals = [request.arrival / arguments.speed for request in requests]
        one = Clocked(split[0], 0.5)
        run_one(one, requests, prompts, arrivals)
        two = Clocked(split[1], 1.0), Clocked(split[2], 1.0)
        run_two(*two, requests, prompts, arrivals)
        show({"one engine": one.report(arrivals), "two engines": two[1].report(arrivals)})
        return
    reports = {"one engine": Replay(llm).run(requests, prompts, arguments.speed)}
    llm.close()
    command = [sys.executable, "-m", "benchmarks.tools.disaggregation", *sys.argv[1:], "--prefill-role"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as prefill:
        assert prefill.stdout is not None
        port = int(prefill.stdout.readline())
        decode = open_llm(arguments, recorded, split=True)
        replay = Replay(decode, Address("127.0.0.1", port))
        reports["two engines"] = replay.run(requests, prompts, arguments.speed)
        prefill.kill()
    show(reports)


def open_llm(arguments: argparse.Namespace, recorded: list[TraceRequest], split: bool = False) -> LLM:
    split = split or arguments.prefill_role
    threads = max(arguments.threads // 2, 1) if split else arguments.threads
    llm = LLM(arguments.model, threads=threads, max_num_seqs=arguments.max_num_seqs)
    length = min(longest(recorded, arguments.scale), llm.engine.config.max_model_len)
    llm.close()
    return LLM(arguments.model, threads=threads, max_num_seqs=arguments.max_num_seqs, max_model_len=length)


def serve_blocks(llm: LLM) -> None:
    thread = EngineThread(llm.engine, lambda results: None)
    thread.start()
    print(PrefillServer(thread, Sizes.of(llm.engine)).port, flush=True)
    sys.stdin.read()


@dataclass
class Replay:
    """Requests of a trace on an engine, with blocks from another one if it has an address."""

    llm: LLM
    prefill: Address | None = None
    times: dict[str, list[float]] = field(default_factory=dict)  # request id -> moments of its tokens
    num_left: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, requests: list[TraceRequest], prompts: list[list[int]], speed: float) -> dict[str, Any]:
        self.times = {str(number): [] for number in range(len(requests))}
        self.num_left = len(requests)
        thread = EngineThread(self.llm.engine, self._results)
        thread.start()
        fetcher = None if self.prefill is None else BlockFetcher(thread, Sizes.of(self.llm.engine))
        made: dict[int, Request] = {}
        begin = time.perf_counter()

        def send(number: int) -> None:
            if fetcher is not None and self.prefill is not None:
                fetcher.fetch(self.prefill, prompts[number])
            params = exactly(requests[number].num_output)
            made[number] = thread.call(lambda engine: engine.add_request(str(number), prompts[number], params)).result()

        arrivals = [begin + request.arrival / speed for request in requests]
        with ThreadPoolExecutor(64) as pool:
            for number, arrival in enumerate(arrivals):
                time.sleep(max(arrival - time.perf_counter(), 0.0))
                pool.submit(send, number)
        self.done.wait()
        seconds = time.perf_counter() - begin
        thread.stop()
        return self._report(made, arrivals, seconds)

    def _results(self, results: list[StepResult]) -> None:
        now = time.perf_counter()
        for result in results:
            if result.token is not None:
                self.times[result.request_id].append(now)
            self.num_left -= result.finished
        if not self.num_left:
            self.done.set()

    def _report(self, made: dict[int, Request], arrivals: list[float], seconds: float) -> dict[str, Any]:
        times = [self.times[str(number)] for number in range(len(arrivals))]
        tokens = [made[number].sequences[0].output_token_ids for number in range(len(arrivals))]
        return summary(self.llm, times, tokens, arrivals, seconds)


# -- clocks of processor time ------------------------------------------------------------------------------------------
class Clocked:
    """An engine with a clock of its own."""

    def __init__(self, llm: LLM, factor: float) -> None:
        self.llm, self.engine, self.factor = llm, llm.engine, factor
        self.now = 0.0
        self.times: dict[str, list[float]] = {}
        self.made: dict[int, Request] = {}

    def timed(self, work: Callable[[], Any]) -> Any:
        """Run work of this engine and let its clock advance."""
        begin = time.thread_time()
        result = work()
        self.now += (time.thread_time() - begin) * self.factor
        return result

    def step(self) -> list[StepResult]:
        results: list[StepResult] = self.timed(self.engine.step)
        for result in results:
            if result.token is not None:
                self.times.setdefault(result.request_id, []).append(self.now)
        return results

    def add(self, number: int, prompt: list[int], num_tokens: int) -> None:
        self.made[number] = self.timed(lambda: self.engine.add_request(str(number), prompt, exactly(num_tokens)))

    def report(self, arrivals: list[float]) -> dict[str, Any]:
        count = range(len(arrivals))
        tokens = [self.made[number].sequences[0].output_token_ids for number in count]
        return summary(self.llm, [self.times[str(number)] for number in count], tokens, arrivals, self.now)


def run_one(one: Clocked, requests: list[TraceRequest], prompts: list[list[int]], arrivals: list[float]) -> None:
    sent = 0
    while sent < len(requests) or one.engine.has_work:
        if not one.engine.has_work:
            one.now = max(one.now, arrivals[sent])
        while sent < len(requests) and arrivals[sent] <= one.now:
            one.add(sent, prompts[sent], requests[sent].num_output)
            sent += 1
        one.step()


def run_two(
    prefill: Clocked,
    decode: Clocked,
    requests: list[TraceRequest],
    prompts: list[list[int]],
    arrivals: list[float],
) -> None:
    """Step the engine whose clock is behind; blocks of a prompt are taken over when all have been computed."""
    sent, moved = 0, 0
    ready: deque[tuple[float, int, list[np.ndarray]]] = deque()  # moment, request, blocks
    while moved < len(requests) or decode.engine.has_work:
        has_prompts = sent < len(requests) or prefill.engine.has_work
        if has_prompts and not (decode.engine.has_work and decode.now < prefill.now):
            if not prefill.engine.has_work:
                prefill.now = max(prefill.now, arrivals[sent])
            while sent < len(requests) and arrivals[sent] <= prefill.now:
                prefill.add(sent, prompts[sent], 1)
                sent += 1
            for number in [int(result.request_id) for result in prefill.step() if result.finished]:
                blocks = prefill.timed(partial(checked_blocks, prefill.engine, prompts[number]))
                ready.append((prefill.now, number, blocks))
            if not decode.engine.has_work and ready:
                decode.now = max(decode.now, ready[0][0])
        while ready and ready[0][0] <= decode.now:
            _, number, blocks = ready.popleft()
            decode.timed(partial(take_over, decode.engine, prompts[number], blocks))
            decode.add(number, prompts[number], requests[number].num_output)
            moved += 1
        if decode.engine.has_work and (decode.now <= prefill.now or not has_prompts):
            decode.step()
        elif ready and not decode.engine.has_work:
            decode.now = max(decode.now, ready[0][0])


def checked_blocks(engine: InferenceEngine, prompt: list[int]) -> list[np.ndarray]:
    blocks = read_blocks(engine, prompt, b"", 0, len(prompt))
    for block in blocks:
        checksum(block)
    return blocks


def take_over(engine: InferenceEngine, prompt: list[int], blocks: list[np.ndarray]) -> None:
    arrival = Arrival(engine, prompt, b"")
    for block in blocks:
        checksum(block)
    arrival.add(blocks[arrival.num_blocks :])
    arrival.close()


def summary(
    llm: LLM, times: list[list[float]], tokens: list[list[int]], arrivals: list[float], seconds: float
) -> dict[str, Any]:
    stats = llm.engine.stats()
    return {
        "seconds": round(seconds, 2),
        "ttft_ms": percentiles([m[0] - arrival for m, arrival in zip(times, arrivals, strict=True)]),
        "tpot_ms": percentiles([(m[-1] - m[0]) / (len(m) - 1) for m in times if len(m) > 1]),
        "gap_ms": percentiles([b - a for moments in times for a, b in pairwise(moments)]),
        "prefill_tokens": stats.num_prefill_tokens,
        "cached_tokens": stats.num_cached_tokens,
        "tokens": tokens,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{level}": round(1e3 * float(np.percentile(values, level)), 2) for level in (50, 90, 99)}


def show(reports: dict[str, dict[str, Any]]) -> None:
    one, two = reports["one engine"].pop("tokens"), reports["two engines"].pop("tokens")
    print(json.dumps(reports, indent=1))
    ratio = {
        name: round(reports["two engines"][name]["p99"] / reports["one engine"][name]["p99"], 3)
        for name in ("ttft_ms", "tpot_ms", "gap_ms")
    }
    print(json.dumps({"p99 of two engines over one": ratio, "same output": one == two}))


if __name__ == "__main__":
    main()
