"""Micro-benchmark: decode steps on the CPU with low-rank adapters (docs/lora.md).

    python -m benchmarks.micro.adapters MODEL [--rank 16] [--rounds 5] [--tokens 24] [--ends head] [--whole]

Random adapters of all attention and MLP matrices, and of the head or the embedding with `--ends`. One engine runs each
workload for a few tokens, in turns, so that a change of the machine's speed meets all of them; a row is the median over
the rounds, and its ratio the median of the ratios of each round to the base in it; the last number is the ratio of the
fastest rounds. `--whole` measures calls of `LLM.generate` in place of steps of the engine. `--cpu-seconds` counts
seconds of the processor on one thread, which other programs change less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_adapters import ENDS, write_adapters
from bifolio import LLM, SamplingParams

Clock = Callable[[], float]
PROMPT = 32  # tokens
WORKLOADS = {  # sequences, different adapters
    "1 sequence, base": (1, 0),
    "1 sequence, 1 adapter": (1, 1),
    "16 sequences, base": (16, 0),
    "16 sequences, 1 adapter": (16, 1),
    "16 sequences, 16 adapters": (16, 16),
}


def step_seconds(llm: LLM, sequences: int, adapters: int, tokens: int, clock: Clock) -> float:
    """Median seconds of a decode step after the prompts."""
    engine, rng = llm.engine, np.random.default_rng(0)
    for number in range(sequences):
        prompt = rng.integers(10, 1000, PROMPT).tolist()
        own = engine.adapters.get(f"a{number % adapters}") if adapters else None
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine.add_request(f"r{number}", prompt, params, adapter=own)
    times = []
    while engine.has_work:
        started = clock()
        results = engine.step()
        if sum(result.token is not None for result in results) == sequences:
            times.append(clock() - started)
    return statistics.median(times[2:])


def call_seconds(llm: LLM, sequences: int, adapters: int, tokens: int, clock: Clock) -> float:
    """Seconds of a call of `LLM.generate`, prompts included, for each of its tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 1000, PROMPT).tolist() for _ in range(sequences)]
    names = [f"a{number % adapters}" if adapters else None for number in range(sequences)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    started = clock()
    llm.generate(prompts, params, lora_request=names, use_tqdm=False)
    return (clock() - started) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ends", nargs="*", default=[], choices=ENDS)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--cpu-seconds", action="store_true")
    args = parser.parse_args()
    clock, threads = (time.process_time, 1) if args.cpu_seconds else (time.perf_counter, args.threads)
    options: dict[str, Any] = {
        "max_model_len": 256,
        "threads": threads,
        "enable_prefix_caching": False,
        "device": "cpu",
    }
    found: dict[str, list[float]] = {name: [] for name in WORKLOADS}
    with LLM(args.model, **options) as llm, tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(write_adapters(Path(folder), llm.model.config, 16, args.rank, args.ends)):
            started = time.perf_counter()
            adapter = llm.engine.adapters.load(f"a{number}", path)
            loading = (time.perf_counter() - started) * 1e3
        size = adapter.weights.nbytes / 1e6
        print(f"an adapter: rank {args.rank}, {size:.1f} MB, loaded in {loading:.0f} ms")
        for _ in range(args.rounds):
            for name, (sequences, adapters) in WORKLOADS.items():
                measured = call_seconds if args.whole else step_seconds
                found[name].append(measured(llm, sequences, adapters, args.tokens, clock))
    for name, times in found.items():
        base = found["1 sequence, base" if name.startswith("1 ") else "16 sequences, base"]
        ratio = statistics.median(one / other for one, other in zip(times, base, strict=True))
        spread = f"{min(times) * 1e3:.2f} to {max(times) * 1e3:.2f}"
        fastest = min(times) / min(base)
        median = statistics.median(times) * 1e3
        print(f"{name:26} {median:7.2f} ms a step ({spread}), {ratio:.3f} of the base, {fastest:.3f}")


if __name__ == "__main__":
    main()
