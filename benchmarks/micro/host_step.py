"""Micro-benchmark: host time of a decode step, microseconds per token of all work of the engine thread for a GPU.

    python -m benchmarks.micro.host_step [--sequences 256] [--steps 200] [--json]

The model is tiny and has the tokenizer of an embedded model. A stand-in for the device draws tokens at random and takes
no time, so the time of a step is that of the host: plan, block tables, launch, collect, stop conditions, results. With
`LLM.generate` the texts are part of the time. Times are CPU time of this thread, which depends less on other load than
wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.micro.null_device import null_kernels
from bifolio import LLM, SamplingParams
from bifolio.model.registry import DEFAULT_MODEL

WARM_UP = 20  # steps
SUBJECTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "logprobs=5": {"temperature": 0.0, "logprobs": 5},
    "penalties, logprobs=5": {"temperature": 0.8, "logprobs": 5, "presence_penalty": 0.1, "repetition_penalty": 1.1},
    "stop string": {"temperature": 0.0, "stop": ["no such text"]},
}


def new_llm(num_sequences: int, num_steps: int) -> LLM:
    """An engine whose passes are those of a small model on the CPU and whose decode steps are free."""
    length = 32 + num_steps + 2 * WARM_UP
    return LLM(
        DEFAULT_MODEL,
        kernels=null_kernels(),
        max_num_seqs=num_sequences,
        max_model_len=length,
        num_blocks=num_sequences * (length // 16 + 2),
        block_size=16,
        token_budget=num_sequences * 8,
        enable_prefix_caching=True,
    )


def requests_of(num_sequences: int, num_tokens: int, options: dict[str, Any]) -> tuple[list[Any], SamplingParams]:
    generator = np.random.default_rng(1)
    prompts = [{"prompt_token_ids": generator.integers(300, 500, 8).tolist()} for _ in range(num_sequences)]
    return prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, **options)


def step_times(llm: LLM, num_sequences: int, num_steps: int, options: dict[str, Any]) -> list[float]:
    """CPU seconds of each step in which all sequences decode."""
    prompts, params = requests_of(num_sequences, num_steps + 2 * WARM_UP, options)
    engine = llm.engine
    for number, prompt in enumerate(prompts):
        engine.add_request(f"step-{number}", prompt["prompt_token_ids"], params)
    times = []
    while engine.has_work:
        before, started = engine.stats().num_prefill_tokens, time.thread_time()
        results = engine.step()
        seconds = time.thread_time() - started
        if len(results) == num_sequences and engine.stats().num_prefill_tokens == before:
            times.append(seconds)
    return times[WARM_UP : WARM_UP + num_steps]


def generate_seconds(llm: LLM, num_sequences: int, num_steps: int, options: dict[str, Any]) -> float:
    """CPU seconds per token of `LLM.generate` with these requests; the passes over the prompts are subtracted."""
    seconds = []
    for num_tokens in (1, num_steps + 1):
        prompts, params = requests_of(num_sequences, num_tokens, options)
        started = time.thread_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if any(not output.outputs[0].text for output in outputs):
            raise SystemExit("an output has no text")
        seconds.append(time.thread_time() - started)
    return (seconds[1] - seconds[0]) / (num_sequences * num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    llm = new_llm(arguments.sequences, arguments.steps)
    report = {}
    for name, options in SUBJECTS.items():
        times = step_times(llm, arguments.sequences, arguments.steps, options)
        whole = generate_seconds(llm, arguments.sequences, arguments.steps, options)
        report[name] = {
            "step_ms_median": round(statistics.median(times) * 1e3, 3),
            "step_ms_mean": round(statistics.mean(times) * 1e3, 3),
            "step_us_per_token": round(statistics.mean(times) / arguments.sequences * 1e6, 2),
            "generate_us_per_token": round(whole * 1e6, 2),
        }
    if arguments.json:
        print(json.dumps({"sequences": arguments.sequences, **report}))
        return
    print(f"{arguments.sequences} sequences {'ms/step: median':>22s} {'mean':>7s}   us/token: step  generate")
    for name, row in report.items():
        print(
            f"{name:26s} {row['step_ms_median']:11.3f} {row['step_ms_mean']:7.3f} "
            f"{row['step_us_per_token']:16.2f} {row['generate_us_per_token']:9.2f}"
        )


if __name__ == "__main__":
    main()
