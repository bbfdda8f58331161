"""Gain of reading a shared prefix once for all sequences: alternating decode steps with and without sharing.

    python benchmarks/shared_prefix.py [--model MODEL] [--sequences 16] [--prefix 2048] [--own 32] [--steps 64]

All sequences begin with the same `prefix` tokens, followed by `own` distinct ones. Every other decode step shares the
reads of the prefix in attention; the results are bit-identical. Times are medians over the steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from bifolio import LLM, SamplingParams
from bifolio.kernels.native import NativeKernels


def step_times(llm: LLM, kernels: NativeKernels, prompts: list[list[int]], steps: int) -> dict[bool, list[float]]:
    """Seconds of the decode steps with and without sharing."""
    params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
    requests = [llm.engine.add_request(f"benchmark-{i}", prompt, params) for i, prompt in enumerate(prompts)]
    while any(not request.sequences or not request.sequences[0].output_token_ids for request in requests):
        llm.engine.step()
    times: dict[bool, list[float]] = {True: [], False: []}
    while llm.engine.has_work:
        kernels.share_prefixes = not kernels.share_prefixes
        started = time.perf_counter()
        if llm.engine.step():
            times[kernels.share_prefixes].append(time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--kv-dtype", default="auto", help="type of cached keys and values")
    parser.add_argument("--threads", type=int)
    for name, value in (("sequences", 16), ("prefix", 2048), ("own", 32), ("steps", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    kernels = NativeKernels(arguments.threads)
    length = arguments.prefix + arguments.own + arguments.steps + 2
    llm = LLM(
        arguments.model,
        kernels=kernels,
        dtype=arguments.kv_dtype,
        max_num_seqs=arguments.sequences,
        max_model_len=length,
        num_blocks=arguments.sequences * (length // 16 + 2),
    )
    rng, vocab = np.random.default_rng(0), llm.model.config.vocab_size
    common = rng.integers(3, vocab, arguments.prefix).tolist()
    prompts = [common + rng.integers(3, vocab, arguments.own).tolist() for _ in range(arguments.sequences)]
    times = step_times(llm, kernels, prompts, arguments.steps)
    apart, together = (1000 * statistics.median(times[share]) for share in (False, True))
    print(
        f"{arguments.sequences} sequences, {arguments.prefix} tokens in common, {llm.engine.config.cache.dtype} cache: "
        f"{apart:.1f} ms per step apart, {together:.1f} ms together: {apart / together:.2f}x"
    )


if __name__ == "__main__":
    main()
