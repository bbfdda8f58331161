"""Tokens of a warm model while other models of the same server start, and the memory of all processes meanwhile.

    python -m benchmarks.tools.model_starts -m SmolLM2-135M-Instruct.Q4_1.gguf --models 20 --budget 3

The server has many models in one folder, all of them links to one file, and a budget of bytes for a few. One model
streams all the time. In turns, for some seconds each, it is alone, and another client asks further models, each of
which must start and evict another. Times between two events of the stream are told for both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.tools.restart import serving
from bifolio.serve.several.settings import PROCESS_BYTES

PROMPT = "Once upon a time there was a little fox"


class Stream(threading.Thread):
    """The warm model: one text after the other, and the time of each event."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(daemon=True)
        self._url, self._model, self._ends = url, model, threading.Event()
        self.times: list[float] = []

    def run(self) -> None:
        body = {"model": self._model, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self._url, timeout=600) as http:
            while not self._ends.is_set():
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            self.times.append(time.perf_counter())
                        if self._ends.is_set():
                            break
                self.times.append(float("nan"))  # no gap between two texts

    def end(self) -> None:
        self._ends.set()
        self.join()


def gaps(times: list[float], spans: list[tuple[float, float]]) -> list[float]:
    """Milliseconds between events of one text that lie in one of the spans."""
    pairs = itertools.pairwise(times)
    return [1e3 * (b - a) for a, b in pairs if any(begin <= a and b <= end for begin, end in spans)]


def memory_below(process: psutil.Process) -> int:
    """Bytes of the processes that a server has started, shared pages counted by their shares."""
    total = 0
    for child in process.children(recursive=True):
        try:
            total += child.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def summary(name: str, found: list[float]) -> dict[str, object]:
    quantiles = statistics.quantiles(found, n=100)
    return {
        "stream": name,
        "events": len(found),
        "p50_ms": round(quantiles[49], 2),
        "p90_ms": round(quantiles[89], 2),
        "p99_ms": round(quantiles[98], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--budget", type=int, default=3, help="models that fit")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each turn")
    arguments = parser.parse_args()
    cache = 64 << 20
    names = [f"model-{number:02}" for number in range(arguments.models)]
    budget = arguments.budget * (arguments.model.stat().st_size + cache + PROCESS_BYTES) + 1000
    with tempfile.TemporaryDirectory(prefix="bifolio-models-") as folder:
        for name in names:
            (Path(folder) / f"{name}.gguf").symlink_to(arguments.model.resolve())
        options = ["--models-dir", folder, "--models-memory", str(budget), "--memory", str(cache)]
        options += ["--keep", names[0], "--max-model-len", "1024"]
        with serving(None, *options) as server, httpx.Client(base_url=server.url, timeout=600) as http:
            process, most = psutil.Process(server.pid), 0
            stream = Stream(server.url, names[0])
            stream.start()
            time.sleep(3.0)
            alone: list[tuple[float, float]] = []
            beside: list[tuple[float, float]] = []
            starts: list[float] = []
            texts: set[str] = set()
            for _ in range(arguments.turns):
                began = time.perf_counter()
                time.sleep(arguments.seconds)
                alone.append((began, time.perf_counter()))
                began = time.perf_counter()
                while time.perf_counter() < began + arguments.seconds:
                    name, asked = names[1 + len(starts) % (len(names) - 1)], time.perf_counter()
                    body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
                    answer = http.post("/v1/completions", json=body).raise_for_status().json()
                    texts.add(answer["choices"][0]["text"])
                    starts.append(time.perf_counter() - asked)
                    most = max(most, memory_below(process))
                beside.append((began, time.perf_counter()))
            stream.end()
            print(json.dumps(summary("alone", gaps(stream.times, alone))))
            print(json.dumps(summary("while others start", gaps(stream.times, beside))))
            told = {"starts": len(starts), "start_and_answer_p50_s": round(statistics.median(starts), 2),
                    "answers": len(texts), "most_mb": most // 10**6, "budget_mb": budget // 10**6}  # fmt: skip
            print(json.dumps(told))


if __name__ == "__main__":
    main()
