"""Two models that take turns on one GPU: weights sleep in pinned host memory, and captured graphs stay.

    python -m benchmarks.tools.gpu_sleep llama-8b qwen3-8b --models /dev/shm/models      # rows of JSON
    python -m benchmarks.tools.gpu_sleep llama-8b qwen3-8b --tiny --device torch         # without a GPU

A swap is the sleep of one engine and the waking of the other, which then answers: `swap_s` ends when the memory is
there, `first_token_s` with the first token. The first sleep of each pins memory and copies the weights to it; later
ones copy nothing. Answers are compared with those before the first sleep, and graphs are counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import ModelStore
from bifolio import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
GOAL_SECONDS = 0.5


def new_llm(path: Path | str, options: argparse.Namespace) -> LLM:
    sizes: dict[str, Any] = {"max_model_len": options.tokens + 64, "max_num_seqs": 16, "deterministic": True}
    if options.device != "torch":
        return LLM(path, device=options.device, memory=options.cache, enable_sleep_mode=True, **sizes)
    from bifolio.kernels.arena import Arena
    from bifolio.kernels.host_pages import HostPages
    from bifolio.kernels.torch_reference import TorchKernels

    kernels = TorchKernels("cpu", "f32")
    kernels.arena = Arena(HostPages())
    return LLM(path, kernels=kernels, num_blocks=200, **sizes)


def answers(llm: LLM, length: int) -> list[list[int]]:
    vocabulary = llm.model.config.vocab_size
    prompts: Any = [
        {"prompt_token_ids": [4 + (31 * number + 7 * place) % (vocabulary - 8) for place in range(length)]}
        for number in range(4)
    ]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def first_token(llm: LLM) -> None:
    llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, ONE, use_tqdm=False)  # type: ignore[arg-type]


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def counted_captures() -> list[int]:
    """A list with one number, which counts the captures of graphs from now on."""
    count = [0]
    try:
        from bifolio.kernels.triton.cuda_graphs import GraphRecorder
    except ImportError:
        return count
    record = GraphRecorder.record

    def counting(recorder: GraphRecorder, run: Callable[[], None]) -> Any:
        count[0] += 1
        return record(recorder, run)

    GraphRecorder.record = counting  # type: ignore[method-assign]
    return count


def free_gb(device: str) -> float | None:
    """Free memory of the device."""
    if device == "torch":
        return None
    import torch

    torch.cuda.synchronize()
    return round(torch.cuda.mem_get_info()[0] / 1e9, 2)


def opened(path: Path | str, options: argparse.Namespace, captures: list[int]) -> tuple[LLM, list[list[int]]]:
    """An engine that sleeps, and its answers before."""
    before, started = free_gb(options.device), time.perf_counter()
    llm = new_llm(path, options)
    ready = time.perf_counter() - started
    expected, arena, awake = answers(llm, options.tokens), llm.engine.runner.kernels.arena, free_gb(options.device)
    assert arena is not None, "this driver cannot map memory at given addresses"
    first = timed(llm.sleep)
    asleep = free_gb(options.device)
    again = timed(llm.wake_up)
    equal = answers(llm, options.tokens) == expected
    second = timed(llm.sleep)
    weights, cache = arena.num_bytes("weights"), arena.num_bytes("kv_cache")
    row = {
        "model": str(path), "ready_s": round(ready, 2), "weights_gb": round(weights / 1e9, 3),
        "cache_gb": round(cache / 1e9, 3), "first_sleep_s": round(first, 3), "wake_s": round(again, 3),
        "wake_gb_per_s": round(weights / again / 1e9, 1), "second_sleep_s": round(second, 3), "equal": equal,
        "free_before_gb": before, "free_awake_gb": awake, "free_asleep_gb": asleep, "captures": captures[0],
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return llm, expected


def swaps(engines: list[tuple[LLM, list[list[int]]]], options: argparse.Namespace, captures: list[int]) -> None:
    """All engines sleep but the first, which is awake; then they take turns."""
    before, seconds, tokens, equal = captures[0], list[float](), list[float](), True
    engines[0][0].wake_up()
    for turn in range(options.turns):
        old, (new, expected) = engines[turn % 2][0], engines[(turn + 1) % 2]
        started = time.perf_counter()
        old.sleep()
        new.wake_up()
        seconds.append(time.perf_counter() - started)
        first_token(new)
        tokens.append(time.perf_counter() - started)
        equal = equal and answers(new, options.tokens) == expected
    row = {
        "swaps": options.turns, "swap_s": round(statistics.median(seconds), 4), "worst_swap_s": round(max(seconds), 4),
        "first_token_s": round(statistics.median(tokens), 4), "goal_s": GOAL_SECONDS,
        "is_reached": statistics.median(seconds) <= GOAL_SECONDS, "equal": equal,
        "captured_again": captures[0] - before,
    }  # fmt: skip
    print(json.dumps(row), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs=2, help="two models of the rows, such as llama-8b and qwen3-8b")
    parser.add_argument("--models", type=Path, default=Path("out/models"), help="folder for model files")
    parser.add_argument("--cache", default="8GB", help="memory of each KV cache")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of the prompts that are compared")
    parser.add_argument("--turns", type=int, default=10, help="swaps")
    parser.add_argument("--device", default="cuda", help="cuda, or torch: torch's kernels and memory of the host")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same architectures")
    options = parser.parse_args()
    store, captures = ModelStore(options.models, options.tiny), counted_captures()
    engines = [opened(store.path(name), options, captures) for name in options.model]
    swaps(engines, options, captures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
