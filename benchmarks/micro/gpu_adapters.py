"""Micro-benchmark: decode steps on a GPU with low-rank adapters, on a shape with random weights (docs/lora.md).

    python -m benchmarks.micro.gpu_adapters [--shape llama-8b] [--rank 16] [--rounds 3] [--tokens 64] [--out FILE]
                                            [--sequences 1 8 64] [--kernels] [--cold]

Adapters change all matrices of attention and of the MLPs. One engine runs the workloads in turns; a row is the median
over the rounds, beside the base at the same number of sequences. The last rows are the base before any adapter is
loaded, and the longest step of running requests while an adapter is read from a file and used for the first time.
`--kernels` also prints the time of each kernel in a step, which includes the waits of overlapping kernels. `--cold`
captures only the steps that are measured, and leaves out the last row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_adapters import write_adapters
from benchmarks.shapes import SHAPES, tiny
from bifolio import LLM, SamplingParams
from bifolio.config import ModelConfig
from bifolio.engine.adapters import LoadedAdapter
from bifolio.model.adapters.adapter import AdapterWeights, read_adapter
from bifolio.model.families import family_of
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import assemble

PROMPT = 32  # tokens
WORKLOADS = ((1, 0), (1, 1), (8, 0), (8, 1), (8, 8), (64, 0), (64, 1), (64, 8), (64, 64))  # sequences, adapters
MOST = 64  # adapters


def random_model(config: ModelConfig, device: str) -> LoadedModel:
    """Weights on the device, in the type of its products."""
    import torch

    generator = torch.Generator(device=device).manual_seed(0)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32

    def matrix(name: str, size: tuple[int, ...]) -> Any:
        return torch.empty(size, dtype=dtype, device=device).normal_(0.0, size[-1] ** -0.5, generator=generator)

    def vector(name: str, size: tuple[int, ...]) -> Any:
        return torch.full(size, 0.0 if name.endswith(".bias") else 1.0, dtype=torch.float32, device=device)

    return LoadedModel(Path("random"), config, weights=assemble(config, family_of(config).hf_names, matrix, vector))


def prepared(llm: LLM, weights: AdapterWeights, count: int) -> list[LoadedAdapter]:
    """The same numbers as so many adapters, each with its own place in memory."""
    device = llm.engine.slots.device
    if device is None:
        own = [llm.engine.runner.kernels.prepare_adapter(weights.weights) for _ in range(count)]
    else:  # one array on the host, whose copies on the device have their own places
        first = device.prepare_adapter(weights.weights)
        own = [replace(first, prepared=replace(first.prepared)) for _ in range(count)]
    return [LoadedAdapter(f"a{number}", weights, each) for number, each in enumerate(own)]


def begin(llm: LLM, sequences: int, adapters: list[LoadedAdapter], tokens: int) -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for number in range(sequences):
        own = adapters[number % len(adapters)] if adapters else None
        llm.engine.add_request(f"r{number}", rng.integers(10, 400, PROMPT).tolist(), params, adapter=own)


def step_seconds(llm: LLM, sequences: int, adapters: list[LoadedAdapter], tokens: int) -> float:
    """Seconds of a decode step of all sequences: a mean over the tokens behind the first ones."""
    begin(llm, sequences, adapters, tokens)
    times = []
    while llm.engine.has_work:
        results = llm.engine.step()
        if sum(result.token is not None for result in results) == sequences:
            times.append(time.perf_counter())
    warm = len(times) // 4
    return (times[-1] - times[warm]) / (len(times) - 1 - warm)


def hot_load(llm: LLM, folder: Path) -> tuple[float, float, float]:
    """(seconds of reading an adapter, the longest step of others meanwhile and at its first use, their median)."""
    begin(llm, 8, [], 400)
    for _ in range(20):
        llm.engine.step()
    done: list[float] = []

    def load() -> None:
        started = time.perf_counter()
        llm.engine.adapters.load("hot", folder)
        done.append(time.perf_counter() - started)

    thread = threading.Thread(target=load)
    thread.start()
    steps, is_used = [], False
    while llm.engine.has_work:
        if done and not is_used:
            is_used = True
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
            llm.engine.add_request("hot", [5, 6, 7], params, adapter=llm.engine.adapters.get("hot"))
        started = time.perf_counter()
        llm.engine.step()
        steps.append(time.perf_counter() - started)
    thread.join()
    return done[0], max(steps), statistics.median(steps)


def print_kernels(llm: LLM, sequences: int, adapters: list[LoadedAdapter], steps: int = 16) -> None:
    """Microseconds and launches of each kernel in a decode step, by their times."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    begin(llm, sequences, adapters, 4 * steps)
    for _ in range(2 * steps):
        llm.engine.step()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            llm.engine.step()
        torch.cuda.synchronize()
    while llm.engine.has_work:
        llm.engine.step()
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    print(f"{sequences} sequences, {len(adapters)} adapters")
    for row in rows[:14]:
        total, count = row.device_time_total / steps, row.count / steps
        print(f"    {total:9.1f} us a step  {count:6.1f} launches of {total / count:7.2f} us  {row.key[:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--tiny", action="store_true", help="few small layers, to try the program")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--most", type=int, default=MOST, help="adapters in memory")
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel")
    parser.add_argument("--cold", action="store_true", help="capture only the steps that are measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = SHAPES[args.shape]
    config = tiny(config) if args.tiny else config
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 64, "enable_prefix_caching": False}
    options |= {"device": args.device, "max_loras": args.most, "warm_up": args.device != "cpu" and not args.cold}
    options |= {"num_blocks": 1200, "block_size": 64}
    workloads = [each for count in args.sequences for each in WORKLOADS if each[0] == count and each[1] <= args.most]
    with LLM(random_model(config, args.device), **options) as llm, tempfile.TemporaryDirectory() as temporary:
        bare = {count: step_seconds(llm, count, [], args.tokens) for count in args.sequences}
        (folder,) = write_adapters(Path(temporary), config, 1, args.rank)
        weights = read_adapter(folder, config)
        started = time.perf_counter()
        adapters = prepared(llm, weights, args.most)
        size, seconds = weights.num_parameters / 5e5, time.perf_counter() - started
        print(f"{args.most} adapters of {size:.0f} MB packed in {seconds:.1f} s")
        found: dict[tuple[int, int], list[float]] = {each: [] for each in workloads}
        rows = []
        for turn in range(args.rounds):
            for each in workloads:
                for _ in range(2 if turn == 0 else 1):  # the first time captures
                    seconds = step_seconds(llm, each[0], adapters[: each[1]], args.tokens)
                found[each].append(seconds)
                if turn == args.rounds - 1:
                    rows.append(describe(each, found[each], found[each[0], 0], bare[each[0]]))
        for each in workloads if args.kernels else ():
            print_kernels(llm, each[0], adapters[: each[1]])
        hot = (0.0, 0.0, 0.0)
        for _ in range(0 if args.cold else 2):
            hot = hot_load(llm, folder)
            llm.engine.adapters.unload("hot")
    if not args.cold:
        loading, longest, usual = (1e3 * seconds for seconds in hot)
        print(f"hot load {loading:.0f} ms; the longest step of others {longest:.1f} ms, their median {usual:.2f} ms")
    if args.out is not None:
        args.out.write_text(json.dumps({"rows": rows, "hot_load": hot}, indent=1))


def describe(workload: tuple[int, int], times: list[float], base: list[float], bare: float) -> dict[str, Any]:
    ratio = statistics.median(one / other for one, other in zip(times, base, strict=True))
    row = {"sequences": workload[0], "adapters": workload[1], "ms": [1e3 * n for n in times], "to_base": ratio}
    row["to_engine_without"] = statistics.median(times) / bare
    print(
        f"{workload[0]:3} sequences, {workload[1]:2} adapters {statistics.median(times) * 1e3:8.3f} ms a step "
        f"({min(times) * 1e3:.3f} to {max(times) * 1e3:.3f}), {ratio:.3f} of the base, "
        f"{row['to_engine_without']:.3f} of an engine without adapters",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
