"""Prefill and decode on one engine or on two: time between tokens while prompts arrive.

    python benchmarks/disaggregation.py azure_conv.csv --limit 200

Both arrangements get the same threads: one engine with `--threads`, or two processes with half of them each. Outputs
are compared token by token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bifolio import LLM
from bifolio.engine.thread import EngineThread
from bifolio.engine.transfer.decode import Address, BlockFetcher
from bifolio.engine.transfer.prefill import PrefillServer
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
    reports = {"one engine": Replay(llm).run(requests, prompts, arguments.speed)}
    llm.close()
    command = [sys.executable, *sys.argv, "--prefill-role"]
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
    print(PrefillServer(thread).port, flush=True)
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
        fetcher = None if self.prefill is None else BlockFetcher(thread)
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
        gaps = [b - a for moments in times for a, b in pairwise(moments)]
        per_request = [(m[-1] - m[0]) / (len(m) - 1) for m in times if len(m) > 1]
        first = [m[0] - arrival for m, arrival in zip(times, arrivals, strict=True)]
        stats = self.llm.engine.stats()
        return {
            "seconds": seconds,
            "ttft_ms": percentiles(first),
            "tpot_ms": percentiles(per_request),
            "gap_ms": percentiles(gaps),
            "prefill_tokens": stats.num_prefill_tokens,
            "cached_tokens": stats.num_cached_tokens,
            "tokens": [made[number].sequences[0].output_token_ids for number in range(len(arrivals))],
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
