"""Chat and embeddings of one server: each kind alone, then both at once.

    python -m benchmarks.tools.mixed_kinds -m smollm2 --requests 1000 [--concurrency 16]

Half of the requests are chats, half ask for a vector; each kind keeps `--concurrency` of them in flight. The two kinds
share the cores, so both at once take as long as one after the other where neither disturbs the other: `shared` is the
sum of the two times alone divided by the time of both at once, 1.0 or above where nothing is lost. While both kinds
run, `progress` is the rate of each divided by its rate alone; the two add up to `shared`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from benchmarks.tools.restart import question, serving

KINDS = ("chat", "embeddings")


@dataclass
class Run:
    """Requests of one kind."""

    began: float
    ends: list[float] = field(default_factory=list)  # of each answer
    latencies: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(self.ends) - self.began

    def rate_until(self, end: float) -> float:
        """Answers a second up to this time."""
        return sum(one <= end for one in self.ends) / (end - self.began)


def requests_of(kind: str, count: int, num_tokens: int, offset: int) -> list[tuple[str, dict[str, object]]]:
    texts = [question(offset + number, 4) for number in range(count)]
    if kind == "embeddings":
        return [("/v1/embeddings", {"input": text}) for text in texts]
    asked = {"max_tokens": num_tokens, "ignore_eos": True}
    return [("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **asked}) for text in texts]


def run(address: str, requests: list[tuple[str, dict[str, object]]], concurrency: int) -> Run:
    """Send the requests, so many at once."""
    found, lock = Run(time.perf_counter()), threading.Lock()
    with httpx.Client(base_url=address, timeout=600, limits=httpx.Limits(max_connections=concurrency)) as http:

        def send(request: tuple[str, dict[str, object]]) -> None:
            began = time.perf_counter()
            http.post(request[0], json=request[1]).raise_for_status()
            end = time.perf_counter()
            with lock:
                found.ends.append(end)
                found.latencies.append(end - began)

        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(send, requests))
    return found


def summary(name: str, kind: str, found: Run) -> dict[str, object]:
    ordered = sorted(found.latencies)
    return {
        "run": name,
        "kind": kind,
        "seconds": round(found.seconds, 2),
        "requests_per_s": round(len(ordered) / found.seconds, 2),
        "p50_ms": round(1e3 * statistics.median(ordered)),
        "p99_ms": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16, help="of each kind")
    parser.add_argument("--tokens", type=int, default=16, help="of each chat's answer")
    arguments = parser.parse_args()
    half, tokens = arguments.requests // 2, arguments.tokens
    with serving(arguments.model, "--max-queue", str(2 * arguments.requests)) as server:
        alone: dict[str, Run] = {}
        for kind in KINDS:
            run(server.url, requests_of(kind, 8, tokens, 10**6), 4)  # the first requests of a start do not count
        for kind in KINDS:
            alone[kind] = run(server.url, requests_of(kind, half, tokens, 0), arguments.concurrency)
            print(json.dumps(summary("alone", kind, alone[kind])), flush=True)
        with ThreadPoolExecutor(len(KINDS)) as pool:
            lists = [requests_of(kind, half, tokens, 10**5) for kind in KINDS]
            found = dict(
                zip(KINDS, pool.map(lambda each: run(server.url, each, arguments.concurrency), lists), strict=True)
            )
    for kind, one in found.items():
        print(json.dumps(summary("together", kind, one)), flush=True)
    end = min(max(one.ends) for one in found.values())
    progress = {kind: found[kind].rate_until(end) / alone[kind].rate_until(max(alone[kind].ends)) for kind in KINDS}
    whole = max(max(one.ends) for one in found.values()) - min(one.began for one in found.values())
    record = {
        "shared": round(sum(one.seconds for one in alone.values()) / whole, 3),
        "progress": {kind: round(value, 3) for kind, value in progress.items()},
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
