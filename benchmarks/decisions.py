"""Measurements behind design decisions: block size, weight format, batching, cache type.

    python benchmarks/decisions.py --only blocks
    python benchmarks/decisions.py --only formats --model SmolLM2.f16.gguf --text sample.txt
    python benchmarks/decisions.py --only batching
    python benchmarks/decisions.py --only caches

Compared settings alternate round by round, and the median is reported, so that a temporary slowdown of the machine
affects all of them. Weights are random in the SmolLM2-135M shape; `--model` and `--text` add the perplexity of a real
model. `docs/decisions.md` has the results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from native_workloads import WORKLOADS, NativeModel, Workload

from bifolio import LLM
from bifolio.config import KVDtype
from bifolio.kernels.interface import Array, Batch
from bifolio.measure.perplexity import text_perplexity
from bifolio.measure.random_models import SHAPES, random_model
from bifolio.measure.targets import crowd
from bifolio.measure.throughput import Test, bench_llm, run_until_done
from bifolio.measure.trace import exactly
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat

BLOCK_SIZES = (8, 16, 32, 64, 128)
CACHES: tuple[KVDtype, ...] = ("f32", "f16", "bf16", "q8_0")
FORMATS = ("f16", "q8_0", "q4_1", "q4_0")
GROUPS = (1, 2, 4, 16)  # number of groups of sixteen sequences
MANY = Test(num_generated=16, depth=200, batch=16)
Key = TypeVar("Key")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("blocks", "formats", "batching", "caches"))
    parser.add_argument("--shape", default="S", help="shape of the random weights: tiny, S or M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", help="model in 16 bits or more, for its perplexity in every format")
    parser.add_argument("--text", type=Path, help="text for the perplexity of --model")
    arguments = parser.parse_args()
    for name, answer in (("blocks", blocks), ("formats", formats), ("batching", batching), ("caches", caches)):
        if arguments.only in (None, name):
            answer(arguments)


# -- block size ---------------------------------------------------------------------------------------------------
def blocks(arguments: argparse.Namespace) -> None:
    print(f"block size: shape {arguments.shape} in q4_0, f16 cache, tokens/s")
    config, format = SHAPES[arguments.shape], QuantFormat.parse("q4_0")
    models = {size: NativeModel(config, format, "f16", arguments.threads, size) for size in BLOCK_SIZES}
    rates = measure_rates(models, arguments.rounds)
    print_table(
        ["tokens per block", *(work.name for work in WORKLOADS), "slots filled", "of short texts", "planning a step"],
        [[str(size), *rates[size], *cache_use(size)] for size in BLOCK_SIZES],
    )


def cache_use(block_size: int) -> list[str]:
    """Measure kernel-independent values on a tiny model: share of filled cache positions, time to plan a step."""
    filled = [filled_slots(block_size, longest)[0] for longest in (448, 64)]
    return [*(f"{value:.1%}" for value in filled), f"{filled_slots(block_size, 448)[1] * 1e6:.0f} us"]


def filled_slots(block_size: int, longest: int) -> tuple[float, float]:
    """(filled / allocated cache positions over all steps, median seconds to plan a step of 16 sequences)."""
    llm = LLM(random_model("tiny"), max_model_len=longest, block_size=block_size, enable_prefix_caching=False)
    engine, plan = llm.engine, llm.engine.phases.plan
    seconds: list[float] = []

    def timed_plan(*given: object, **named: object) -> object:
        begin = time.perf_counter()
        result = plan(*given, **named)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - begin)
        return result

    engine.phases.plan = timed_plan  # type: ignore[method-assign,assignment]
    rng = np.random.default_rng(0)
    requests = [
        engine.add_request(str(i), rng.integers(0, 512, r.num_prompt).tolist(), exactly(r.num_output))
        for i, r in enumerate(crowd(48, longest))
    ]
    filled = allocated = 0.0
    while any(not request.is_finished for request in requests):
        engine.step()
        stats = engine.stats()
        filled += stats.utilisation * stats.num_used_blocks
        allocated += stats.num_used_blocks
    return filled / allocated, statistics.median(seconds)


# -- format -------------------------------------------------------------------------------------------------------
def formats(arguments: argparse.Namespace) -> None:
    print(f"format: shape {arguments.shape}, f16 cache, tokens/s")
    config = SHAPES[arguments.shape]
    models = {name: NativeModel(config, QuantFormat.parse(name), "f16", arguments.threads) for name in FORMATS}
    rates = measure_rates(models, arguments.rounds)
    print_table(
        ["format", "bits a weight", "weights, MB", *(work.name for work in WORKLOADS), "perplexity"],
        [
            [
                name,
                f"{QuantFormat.parse(name).bits_per_element:.1f}",
                f"{config.num_parameters * QuantFormat.parse(name).bits_per_element / 8e6:.0f}",
                *rates[name],
                predict(arguments, name),
            ]
            for name in FORMATS
        ],
    )


def predict(arguments: argparse.Namespace, format: str) -> str:
    """The perplexity of `--model` with its matrices in a format, embedding and head in at least 8 bits."""
    if arguments.model is None or arguments.text is None:
        return "-"
    from bifolio.model.gguf.writer import write_gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{format}.gguf"
        write_gguf(path, load_model(arguments.model), QuantFormat.parse(format))
        llm = LLM(path, max_model_len=512, max_num_seqs=4, enable_prefix_caching=False, threads=arguments.threads)
        return f"{text_perplexity(llm, arguments.text.read_text(encoding='utf-8')).value:.2f}"


# -- batching -----------------------------------------------------------------------------------------------------
def _seconds_of_groups(groups: int, run: Callable[[], Any]) -> float:
    return groups * timed(run)


def batching(arguments: argparse.Namespace) -> None:
    """Compare batch sizes: requests that join between layers would run in groups that each read all weights."""
    print(f"batching: 16 sequences at context 200, shape {arguments.shape} in q4_0")
    model = NativeModel(SHAPES[arguments.shape], QuantFormat.parse("q4_0"), "f16", arguments.threads)
    work: dict[tuple[str, int], Callable[[], float]] = {}
    for groups in GROUPS:
        batch = model.batch(Workload("", 16 // groups, 1, 200, 1))
        one_call = partial(model.run, batch)
        calls = partial(model.runner.run, batch)
        work["one call", groups] = partial(_seconds_of_groups, groups, one_call)
        work["a call for each operation", groups] = partial(_seconds_of_groups, groups, calls)
    seconds = in_turn(work, max(arguments.rounds, 5))
    names = ("one call", "a call for each operation")
    print_table(
        ["groups", *(f"{name}, ms" for name in names), "tokens/s of one call", "wait to join, ms at most"],
        [
            [
                f"{groups} x {16 // groups}",
                *(f"{seconds[name, groups] * 1e3:.1f}" for name in names),
                f"{16 / seconds['one call', groups]:.0f}",
                f"{seconds['one call', groups] / groups * 1e3:.1f}",
            ]
            for groups in GROUPS
        ],
    )
    outside, whole = engine_overhead(arguments)
    share = f"{outside * 1e3:.2f} ms of {whole * 1e3:.2f} ms ({outside / whole:.1%})"
    print(f"the engine's own work for a step of 16: {share}")


def engine_overhead(arguments: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of a step of 16 sequences: outside the kernels, and in total."""
    llm = bench_llm(random_model(arguments.shape, "q4_0"), [MANY], kv_cache_dtype="f16", threads=arguments.threads)
    engine = llm.engine
    run = engine.decode_executor.run
    inside: list[float] = []

    def timed_run(batch: Batch) -> Array:
        begin = time.perf_counter()
        result = run(batch)
        inside.append(time.perf_counter() - begin)
        return result

    engine.decode_executor.run = timed_run  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    vocabulary = engine.model.config.vocab_size
    requests = [engine.add_request(str(i), rng.integers(0, vocabulary, 100).tolist(), exactly(24)) for i in range(16)]
    while any(not request.sequences[0].output_token_ids for request in requests):
        engine.step()
    inside.clear()
    whole = [timed(engine.step) for _ in range(12)]
    outside = [step - kernels for step, kernels in zip(whole, inside, strict=True)]
    run_until_done(engine, requests)
    return statistics.median(outside), statistics.median(whole)


# -- cache type ---------------------------------------------------------------------------------------------------
def caches(arguments: argparse.Namespace) -> None:
    print(f"cache: shape {arguments.shape} in q8_0, tokens/s")
    config = SHAPES[arguments.shape]
    names = CACHES if config.head_dim % 32 == 0 else CACHES[:-1]  # q8_0 has blocks of 32
    models = {name: NativeModel(config, QuantFormat.Q8_0, name, arguments.threads) for name in names}
    rates = measure_rates(models, arguments.rounds)
    print_table(["cache", *(work.name for work in WORKLOADS)], [[name, *rates[name]] for name in names])


# -- measuring ----------------------------------------------------------------------------------------------------
def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure_rates(models: dict[Key, NativeModel], rounds: int) -> dict[Key, list[str]]:
    """Tokens per second of each model in each workload, formatted."""
    work = {(key, each): partial(model.seconds, each) for key, model in models.items() for each in WORKLOADS}
    seconds = in_turn(work, rounds)
    return {key: [f"{each.num_tokens / seconds[key, each]:.1f}" for each in WORKLOADS] for key in models}


def in_turn(work: Mapping[Key, Callable[[], float]], rounds: int) -> dict[Key, float]:
    """The median result of each function over alternating rounds; the first round is a warm-up."""
    values: dict[Key, list[float]] = {key: [] for key in work}
    for number in range(rounds + 1):
        for key, piece in work.items():
            value = piece()
            if number:
                values[key].append(value)
    return {key: statistics.median(found) for key, found in values.items()}


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table for docs/decisions.md."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "---:|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


if __name__ == "__main__":
    main()
