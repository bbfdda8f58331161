"""A trace of conversations on a cache of a tenth of its blocks: with tiers, without, and beside llama.cpp.

    python -m benchmarks.tools.tier_trace mooncake_conversation.jsonl -m smollm2 [--peer-python PYTHON]

Some conversations of the trace are chosen, with all their requests, in the order of the trace and one at a time. Every
request runs on each engine in turn, in an order that changes, so other programs on the machine slow all of them alike.
Blocks of a request are written before the next one runs. An engine "unlimited" has room for all blocks. llama.cpp (a
Python with xllamacpp) has one slot with as many tokens as the small cache: alone, with its cache in host memory, and
with slot files, which are restored before each turn of a conversation and saved after it.

The rows "arriving" are of requests that come at the times of the trace, all stretched alike, to a server that answers
one after the other in the measured times: the time to the first token includes the wait for those before. `load` is the
part of the time in which the server without a tier, the first of the engines, is busy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from bifolio import LLM
from bifolio.measure.trace import exactly
from bifolio.measure.trace_files import TraceRequest, longest, make_prompts, read_trace, scaled

BLOCK = 16
ROWS_EVERY = 10  # requests
SERVER = Path(__file__).with_name("llama_server.py")


@dataclass(slots=True)
class Figures:
    """The requests of one engine."""

    first: list[float] = field(default_factory=list)  # seconds to the first token
    cached: list[int] = field(default_factory=list)  # prompt tokens
    whole: list[float] = field(
        default_factory=list
    )  # seconds of each request, with the files that are written after it
    cpu: float = 0.0  # seconds of all threads of this process meanwhile
    lookup: float = 0.0  # seconds of looking prompts up in the tiers, included in `first`


class Engine(Protocol):
    def run(self, prompt: list[int], num_output: int, conversation: int, figures: Figures) -> None: ...

    def close(self) -> None: ...


class Bifolio:
    """An LLM; the blocks of a request are in its tiers when `run` returns."""

    def __init__(self, model: str, **options: Any) -> None:
        self._llm = LLM(model, max_num_seqs=1, block_size=BLOCK, **options)
        self._count = 0
        self._lookup = 0.0
        tiers = self._llm.engine.tiers
        if tiers is not None:
            must_wait = tiers.must_wait

            def timed(sequence: Any) -> bool:
                began = time.perf_counter()
                found = must_wait(sequence)
                self._lookup += time.perf_counter() - began
                return found

            tiers.must_wait = timed  # type: ignore[method-assign]

    def run(self, prompt: list[int], num_output: int, conversation: int, figures: Figures) -> None:
        engine = self._llm.engine
        began, self._count = time.perf_counter(), self._count + 1
        cpu = time.process_time()
        request = engine.add_request(str(self._count), prompt, exactly(num_output))
        while engine.has_work:
            engine.step()
        if engine.tiers is not None:
            engine.tiers.copies.flush(60.0)
        figures.whole.append(time.perf_counter() - began)
        figures.cpu += time.process_time() - cpu
        figures.first.append(request.metrics.time_to_first_token or 0.0)
        figures.cached.append(request.metrics.num_cached_tokens)
        figures.lookup, self._lookup = figures.lookup + self._lookup, 0.0

    def close(self) -> None:
        self._llm.close()


class LlamaCpp:
    """A server of llama.cpp with one slot."""

    def __init__(self, python: str, folder: str | None, **options: Any) -> None:
        self._has_files, self._saved = folder is not None, set[int]()
        options["slot_save_path"] = f"{folder}/" if folder is not None else ""
        self._process = subprocess.Popen(
            [python, str(SERVER), json.dumps({**options, "n_parallel": 1, "port": 0})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        address = next(line for line in self._process.stdout if line.startswith("http")).strip()
        limits = httpx.Limits(max_keepalive_connections=0)  # the server ends connections while others have their turn
        self._http = httpx.Client(base_url=address, timeout=600, limits=limits)

    def run(self, prompt: list[int], num_output: int, conversation: int, figures: Figures) -> None:
        began, first, cached = time.perf_counter(), 0.0, 0
        if conversation in self._saved:
            self._slot("restore", conversation)
        body = {"prompt": prompt, "n_predict": num_output, "temperature": 0, "ignore_eos": True, "stream": True,
                "cache_prompt": True, "id_slot": 0}  # fmt: skip
        with self._http.stream("POST", "/completion", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - began
                    event = json.loads(line[6:])
                    cached = event.get("timings", {}).get("cache_n", cached)
        if self._has_files:
            self._slot("save", conversation)
            self._saved.add(conversation)
        figures.whole.append(time.perf_counter() - began)
        figures.first.append(first)
        figures.cached.append(cached)

    def _slot(self, action: str, conversation: int) -> None:
        answer = self._http.post(f"/slots/0?action={action}", json={"filename": f"{conversation}.bin"})
        answer.raise_for_status()

    def close(self) -> None:
        self._http.close()
        self._process.communicate("")


def chosen(requests: Sequence[TraceRequest], conversations: int, turns: int, seed: int) -> list[tuple[int, int]]:
    """(Number of the request, conversation): all requests of some conversations with at least that many turns.

    Requests with equal first and second parts belong to one conversation; the first part is common to all.
    """
    found = defaultdict(list)
    for number, request in enumerate(requests):
        found[request.hash_ids[:2]].append(number)
    long = [numbers for numbers in found.values() if len(numbers) >= turns]
    taken = random.Random(seed).sample(long, min(conversations, len(long)))
    return sorted((number, place) for place, numbers in enumerate(taken) for number in numbers)


def count_blocks(requests: Sequence[TraceRequest], prompts: Sequence[list[int]]) -> int:
    """Different blocks of all prompts, and those of the outputs."""
    prefixes = {
        hash(tuple(prompt[:end])) for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)
    }  # fmt: skip
    return len(prefixes) + sum(request.num_output // BLOCK + 1 for request in requests)


def median(seconds: Sequence[float]) -> float | None:
    """In milliseconds."""
    return round(1e3 * statistics.median(seconds), 1) if seconds else None


def row(
    name: str, figures: Figures, prompts: Sequence[list[int]], is_first: Sequence[bool], is_gained: Sequence[bool]
) -> dict[str, Any]:
    """`is_gained`: requests of which the tiers have more tokens than the small cache."""
    later = [seconds for seconds, first in zip(figures.first, is_first, strict=True) if not first]
    new = [seconds for seconds, first in zip(figures.first, is_first, strict=True) if first]
    gained = [seconds for seconds, gains in zip(figures.first, is_gained, strict=True) if gains]
    total = sum(map(len, prompts))
    return {
        "engine": name,
        "ttft_p50_ms": median(figures.first),
        "ttft_p90_ms": round(1e3 * statistics.quantiles(figures.first, n=10)[-1], 1),
        "later_turns_p50_ms": median(later),
        "first_turns_p50_ms": median(new),
        "restored": len(gained),
        "restored_p50_ms": median(gained),
        "hit_rate": round(sum(figures.cached) / total, 4),
        "seconds": round(sum(figures.whole), 1),
        "cpu_seconds": round(figures.cpu, 1),
        "lookup_share_of_ttft": round(figures.lookup / sum(figures.first), 6),
    }


def arriving(figures: Figures, arrivals: Sequence[float], stretch: float) -> list[float]:
    """Seconds to the first tokens of requests that arrive at these times and wait for those before."""
    found, free = [], 0.0
    for arrival, first, whole in zip(arrivals, figures.first, figures.whole, strict=True):
        came = arrival * stretch
        began = max(came, free)
        found.append(began + first - came)
        free = began + whole
    return found


def arriving_row(name: str, figures: Figures, base: Figures, arrivals: Sequence[float], load: float) -> dict[str, Any]:
    stretch = sum(base.whole) / (load * max(arrivals[-1], 1e-9))
    seconds = arriving(figures, arrivals, stretch)
    return {
        "arriving": name,
        "load": load,
        "own_load": round(sum(figures.whole) / (arrivals[-1] * stretch), 2),
        "ttft_p50_ms": median(seconds),
        "ttft_p90_ms": round(1e3 * statistics.quantiles(seconds, n=10)[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3, help="the least requests of a conversation")
    parser.add_argument("--scale", type=float, default=1 / 32, help="of all lengths")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", help="a Python with xllamacpp; the model is a GGUF file then")
    parser.add_argument("--engines", help="names of engines, with semicolons; default: all")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="of the rows `arriving`")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model, recorded = arguments.model, read_trace(arguments.trace)
    numbers = chosen(recorded, arguments.conversations, arguments.turns, arguments.seed)
    wanted = [recorded[number] for number, _ in numbers]
    length = longest(wanted, arguments.scale) + BLOCK
    requests, _ = scaled(wanted, arguments.scale, length)
    prompts = make_prompts(requests, 40_000, arguments.seed)
    blocks = count_blocks(requests, prompts)
    small = max(blocks // 10, length // BLOCK + 2)
    seen: set[int] = set()
    is_first = [place not in seen and not seen.add(place) for _, place in numbers]  # type: ignore[func-returns-value]
    arrivals = [request.arrival - wanted[0].arrival for request in wanted]
    setting = {"requests": len(requests), "conversations": len(seen), "prompt_tokens": sum(map(len, prompts)),
               "blocks": blocks, "small_cache_blocks": small, "max_model_len": length}  # fmt: skip
    print(json.dumps(setting), flush=True)
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="bifolio-tiers-")) for _ in range(2)]
        common = {"max_model_len": length, "threads": arguments.threads}
        make: dict[str, Callable[[], Engine]] = {
            "without a tier": lambda: Bifolio(model, num_blocks=small, **common),
            "files": lambda: Bifolio(model, num_blocks=small, kv_offload_dir=folders[0], **common),
            "memory": lambda: Bifolio(model, num_blocks=small, kv_offload="4GB", **common),
            "unlimited": lambda: Bifolio(model, num_blocks=blocks + 64, **common),
        }
        if (python := arguments.peer_python) is not None:
            peer = {"model": model, "threads": arguments.threads, "n_ctx": max(small * BLOCK, length)}
            make["llama.cpp"] = lambda: LlamaCpp(python, None, cache_ram_mib=0, **peer)
            make["llama.cpp, host cache"] = lambda: LlamaCpp(python, None, cache_ram_mib=4096, **peer)
            make["llama.cpp, slot files"] = lambda: LlamaCpp(python, folders[1], cache_ram_mib=0, **peer)
        names = list(make) if arguments.engines is None else arguments.engines.split(";")
        engines = {name: make[name]() for name in names}
        for engine in engines.values():
            stack.callback(engine.close)
        found = {name: Figures() for name in engines}
        order = random.Random(arguments.seed)
        for count, (request, prompt, (_, place)) in enumerate(zip(requests, prompts, numbers, strict=True), 1):
            for name in order.sample(sorted(engines), len(engines)):
                engines[name].run(prompt, request.num_output, place, found[name])
            if count % ROWS_EVERY == 0 or count == len(requests):
                print(f"after {count} requests")
                each = zip(*[figures.cached for figures in found.values()], strict=True)
                is_gained = [max(cached) - min(cached) >= BLOCK for cached in each]
                for name, figures in found.items():
                    print(json.dumps(row(name, figures, prompts[:count], is_first[:count], is_gained)), flush=True)
                base = next(iter(found.values()))
                for load in arguments.loads:
                    for name, figures in found.items():
                        print(json.dumps(arriving_row(name, figures, base, arrivals[:count], load)), flush=True)


if __name__ == "__main__":
    main()
