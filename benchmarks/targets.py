"""Performance targets of the engine with a small quantised model, and the measured values.

generation          tokens per second of one sequence
resident memory     peak memory of this process over the required bytes: weights, KV cache, and 60 MB for the
                    interpreter and its libraries
sequences at once   of many simultaneous requests with mixed lengths
KV slots filled     of the blocks that these requests hold, averaged over time
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.api.llm import LLM
from bifolio.engine.memory import show_bytes, weight_bytes
from bifolio.measure.statistics import Distribution
from bifolio.measure.throughput import Test, run_tests
from bifolio.measure.trace import TraceReport, replay
from bifolio.measure.trace_files import TraceRequest, make_prompts
from bifolio.model.loaded import LoadedModel

INTERPRETER_BYTES = 60_000_000  # Python, numpy, a tokenizer
GENERATION_TARGET = 70.0  # tokens per second
MEMORY_TARGET = 1.15
SEQUENCES_TARGET = 16
FILLED_TARGET = 0.9
MAX_LENGTH = 448  # tokens of the longest simultaneous request


@dataclass(frozen=True, slots=True)
class TargetRow:
    """One measured value. `target` is None for values without a target."""

    name: str
    value: float
    shown: str  # the formatted value
    target: float | None = None
    shown_target: str = ""
    lower_is_better: bool = False
    reaching_is_enough: bool = False  # otherwise the target must be exceeded

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        if self.value == self.target:
            return self.reaching_is_enough
        return (self.value < self.target) == self.lower_is_better

    def as_dict(self) -> dict[str, object]:
        return {"name": self.name, "value": self.value, "target": self.target, "met": self.met}


def targets_llm(model: LoadedModel, *, block_size: int = 16, **options: Any) -> LLM:
    """An engine with a cache just large enough for all requests: unused cache would lower the memory ratio."""
    length = min(MAX_LENGTH, model.config.max_position)
    return LLM(
        model,
        max_model_len=length,
        max_num_seqs=SEQUENCES_TARGET,
        block_size=block_size,
        num_blocks=SEQUENCES_TARGET * -(-length // block_size) + 1,
        enable_prefix_caching=False,
        **options,
    )


def crowd(count: int, max_length: int, seed: int = 0) -> list[TraceRequest]:
    """Simultaneous requests; prompt and output are each 1/8 to 1/2 of the longest length."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(max_length // 8, max_length // 2 + 1, (count, 2))
    return [TraceRequest(0.0, int(prompt), int(output)) for prompt, output in lengths]


def measure_targets(
    llm: LLM,
    *,
    num_generated: int = 128,
    repetitions: int = 5,
    num_requests: int = 32,
    note: Callable[[str], None] = lambda text: None,
) -> list[TargetRow]:
    """Run all measurements; the peak memory is read last, so that it covers all of them."""
    num_generated = min(num_generated, llm.engine.config.max_model_len - 8)
    test = Test(num_generated=num_generated)
    (row,) = run_tests(llm.engine, [test], repetitions, lambda test, number: note(f"{test.name}, run {number + 1}"))
    requests = crowd(num_requests, llm.engine.config.max_model_len)
    report = replay(
        llm.engine,
        requests,
        make_prompts(requests, llm.model.config.vocab_size),
        speed=0,
        on_progress=lambda done: note(f"{done} of {num_requests} requests"),
    )
    return target_rows(Distribution.of(row.speeds).p50, report, peak_memory(), required_memory(llm))


def target_rows(generation: float, crowd: TraceReport, peak: int, required: int) -> list[TargetRow]:
    memory = f"{peak / required:.2f} ({show_bytes(peak)} for {show_bytes(required)})"
    return [
        TargetRow(
            "generation, tokens/s", generation, f"{generation:.1f}", GENERATION_TARGET, f"> {GENERATION_TARGET:g}"
        ),
        TargetRow("resident memory over need", peak / required, memory, MEMORY_TARGET, f"< {MEMORY_TARGET}", True),
        TargetRow(
            "sequences at once",
            crowd.peak_running,
            str(crowd.peak_running),
            SEQUENCES_TARGET,
            str(SEQUENCES_TARGET),
            reaching_is_enough=True,
        ),
        TargetRow(
            "KV slots filled", crowd.utilisation, f"{crowd.utilisation:.1%}", FILLED_TARGET, f"> {FILLED_TARGET:.0%}"
        ),
        TargetRow("all sequences together, tokens/s", crowd.output_speed, f"{crowd.output_speed:.1f}"),
    ]


def required_memory(llm: LLM) -> int:
    """Required bytes: the weights in the file's formats, the allocated cache, the interpreter."""
    return weight_bytes(llm.model.weights) + llm.plan.cache_bytes + INTERPRETER_BYTES


def peak_memory() -> int:
    """Peak resident bytes of this process, shared libraries and mapped files included."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import psutil

        return int(psutil.Process().memory_info().rss)
