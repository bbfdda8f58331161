"""The gain of a decode phase of its own: milliseconds per decode step with its machinery on and off.

    python benchmarks/phases.py                    # CPU: the recorded program of the native kernels
    python benchmarks/phases.py --device cuda      # GPU: CUDA graphs, slots on the device, launching ahead

Off, both phases run the network operation by operation, as a single executor for both would. Both engines run in turns
over the same requests (random weights, greedy), and the median of the rounds is reported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np

from bifolio.api.llm import LLM
from bifolio.engine.engine import InferenceEngine
from bifolio.kernels.interface import KernelSet
from bifolio.sampling_params import SamplingParams

CONTEXT, NEW = 128, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--shapes", default="", help="default: S,M on the CPU, llama-1b,llama-8b on a GPU")
    parser.add_argument("--sequences", default="1,16", help="sequences that run together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    shapes = arguments.shapes or ("S,M" if arguments.device == "cpu" else "llama-1b,llama-8b")
    for shape in shapes.split(","):
        engines = {is_on: new_engine(shape, arguments, is_on) for is_on in (True, False)}
        for count in map(int, arguments.sequences.split(",")):
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(arguments.rounds + 1):
                for is_on, engine in engines.items():
                    times[is_on].append(milliseconds_per_step(engine, count))
            on, off = (statistics.median(times[is_on][1:]) for is_on in (True, False))
            gain = 100 * (1 - on / off)
            print(f"{shape:10} x{count:<3} on {on:8.3f} ms  off {off:8.3f} ms  gain {gain:5.1f} %", flush=True)


def new_engine(shape: str, arguments: argparse.Namespace, is_on: bool) -> InferenceEngine:
    kernels: KernelSet
    if arguments.device == "cpu":
        from bifolio.kernels.native import NativeKernels
        from bifolio.measure.random_models import random_model

        model = random_model(shape, "q8_0")
        kernels = NativeKernels(threads=arguments.threads or None)
        sizes: Any = {"block_size": 16, "num_blocks": 600, "max_num_seqs": 32, "token_budget": 1024, "chunk_size": 512}
        return LLM(model, kernels=_without_machinery(kernels, is_on), max_model_len=512, **sizes).engine
    try:
        from bifolio.kernels.triton import TritonKernels
    except ImportError:
        sys.exit("phases.py: --device cuda needs torch and triton")
    from bifolio.measure import gpu_models

    kernels = TritonKernels(arguments.device, "bf16")
    weights = gpu_models.random_weights(shape, arguments.device)
    return gpu_models.new_engine(weights, _without_machinery(kernels, is_on), max_model_len=512, num_blocks=600)


def _without_machinery(kernels: Any, is_on: bool) -> KernelSet:
    if not is_on:
        kernels.record = lambda network, phase: None
        kernels.device_slots = lambda *arguments: None
        kernels.launches_ahead = False
    result: KernelSet = kernels
    return result


def milliseconds_per_step(engine: InferenceEngine, count: int) -> float:
    """Of decode steps of `count` sequences, behind prompts of CONTEXT tokens."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    for number in range(count):
        engine.add_request(
            f"phases-{number}", rng.integers(0, engine.model.config.vocab_size, CONTEXT).tolist(), params
        )
    engine.step()
    started, steps = time.perf_counter(), 0
    while engine.has_work:
        engine.step()
        steps += 1
    return 1e3 * (time.perf_counter() - started) / steps


if __name__ == "__main__":
    main()
