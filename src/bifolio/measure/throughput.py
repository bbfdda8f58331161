"""Tokens per second of each phase, in rows as llama-bench prints them.

pp512           512 prompt tokens of one sequence, processed
tg128           128 tokens generated one after the other
tg128@d1024     the same after 1024 tokens of context
tg128 x8        by 8 sequences together; the value is the total of all
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bifolio.api.llm import LLM
from bifolio.engine.build import SIZES
from bifolio.engine.engine import InferenceEngine
from bifolio.kernels.select import resolve_device
from bifolio.measure.statistics import Distribution
from bifolio.model.loaded import LoadedModel
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Test:
    """One row of the benchmark: prompt processing when `num_generated` is 0, else generation after `depth` tokens."""

    __test__ = False  # not a test case of pytest

    num_prompt: int = 0
    num_generated: int = 0
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        head = f"tg{self.num_generated}" if self.num_generated else f"pp{self.num_prompt}"
        depth = f"@d{self.depth}" if self.depth else ""
        return head + depth + (f" x{self.batch}" if self.batch > 1 else "")

    @property
    def num_tokens(self) -> int:
        """Longest length of a sequence, without tokens sampled while other prompts are processed."""
        return self.depth + self.num_prompt + self.num_generated + 1


@dataclass(slots=True)
class BenchRow:
    """The measurements of one test."""

    test: Test
    speeds: list[float] = field(default_factory=list)  # tokens per second, one for each repetition

    def as_dict(self) -> dict[str, object]:
        summary = Distribution.of(self.speeds)
        return {
            "test": self.test.name,
            "num_prompt": self.test.num_prompt,
            "num_generated": self.test.num_generated,
            "depth": self.test.depth,
            "batch": self.test.batch,
            "tokens_per_second": summary.mean,
            "tokens_per_second_std": summary.std,
            "samples": self.speeds,
        }


def bench_tests(
    prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Test]:
    """All combinations; 0 leaves a kind out. Depths apply to generation only: prompts start without context."""
    tests = [Test(num_prompt=n, batch=b) for b in batches for n in prompts if n]
    return tests + [Test(num_generated=n, depth=d, batch=b) for b in batches for d in depths for n in generated if n]


def bench_llm(
    model: LoadedModel,
    tests: Sequence[Test],
    *,
    chunk_size: int | None = None,
    block_size: int | None = None,
    **options: Any,
) -> LLM:
    """An engine that is large enough for every test, without prefix reuse: every token is computed."""
    batch = max(test.batch for test in tests)
    usual = SIZES[resolve_device(options.get("device", "auto")).split(":")[0]]
    chunk_size, block_size = chunk_size or usual.chunk_size, block_size or usual.block_size
    budget = max(chunk_size, batch)
    slack = max(-(-test.batch * (test.depth + 1) // budget) for test in tests) + WARM_UP_TOKENS + 2
    length = min(max(test.num_tokens for test in tests) + slack, model.config.max_position)
    settings: dict[str, Any] = {
        "max_model_len": length,
        "max_num_seqs": batch,
        "num_blocks": batch * (-(-length // block_size) + 1) + 2,
        "chunk_size": chunk_size,
        "block_size": block_size,
        "token_budget": budget,
        "enable_prefix_caching": False,
        **options,
    }
    return LLM(model, **settings)


def run_tests(
    engine: InferenceEngine,
    tests: Sequence[Test],
    repetitions: int = 5,
    on_progress: Callable[[Test, int], None] | None = None,
) -> list[BenchRow]:
    """Measure every test `repetitions` times, after a warm-up.

    The warm-up is short on a CPU; a GPU runs each test once, which compiles kernels and captures graphs for its sizes.
    """
    measure(engine, Test(num_prompt=WARM_UP_TOKENS))
    measure(engine, Test(num_generated=WARM_UP_TOKENS))
    rows = []
    for test in tests:
        if engine.runner.kernels.launches_ahead:
            measure(engine, test)
        row = BenchRow(test)
        for repetition in range(repetitions):
            if on_progress is not None:
                on_progress(test, repetition)
            row.speeds.append(measure(engine, test, seed=repetition))
        rows.append(row)
    return rows


def measure(engine: InferenceEngine, test: Test, seed: int = 0) -> float:
    """Tokens per second of one run."""
    seconds = time_decode(engine, test, seed) if test.num_generated else time_prefill(engine, test, seed)
    return test.batch * (test.num_generated or test.num_prompt) / seconds


def time_prefill(engine: InferenceEngine, test: Test, seed: int = 0) -> float:
    """Seconds to process the prompts and sample one token after each."""
    requests = add_random(engine, test.batch, test.num_prompt, 1, seed)
    begin = time.perf_counter()
    run_until_done(engine, requests)
    return time.perf_counter() - begin


def time_decode(engine: InferenceEngine, test: Test, seed: int = 0) -> float:
    """Seconds for `num_generated` steps in which every sequence of the batch gets a token."""
    requests = start_decoding(engine, test, seed)
    begin = time.perf_counter()
    for _ in range(test.num_generated):
        engine.step()
    seconds = time.perf_counter() - begin
    stop(engine, requests)
    return seconds


def start_decoding(engine: InferenceEngine, test: Test, seed: int = 0) -> list[Request]:
    """Requests of the batch, all after prefill: every further step is a decode step."""
    room = engine.config.max_model_len - max(test.depth, 1)
    requests = add_random(engine, test.batch, max(test.depth, 1), room, seed)
    while any(not request.sequences[0].output_token_ids for request in requests):
        engine.step()
    return requests


def add_random(engine: InferenceEngine, count: int, num_prompt: int, max_tokens: int, seed: int = 0) -> list[Request]:
    """Add requests with prompts of random tokens; greedy, not ended by stop tokens."""
    generator = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    return [
        engine.add_request(
            f"bench-{index}", generator.integers(0, engine.model.config.vocab_size, num_prompt).tolist(), params
        )
        for index in range(count)
    ]


def run_until_done(engine: InferenceEngine, requests: Sequence[Request]) -> None:
    while any(not request.is_finished for request in requests):
        engine.step()


def stop(engine: InferenceEngine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.abort(request.request_id)
    engine.step()
