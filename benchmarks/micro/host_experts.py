"""Micro-benchmark: a mixture beside a GPU with all, half and no experts in the memory of the host (docs/gpu.md).

    python -m benchmarks.micro.host_experts [--format q4_0] [--placements all,half,none] [--folder FOLDER]
    python -m benchmarks.micro.host_experts --large 50 [--gpu-memory 16]
    python -m benchmarks.micro.host_experts --tiny --device torch [--large 3]        # without a GPU

The first form writes a file of the Qwen3-30B-A3B shape with random weights. Each placement prints the tokens a second
of one sequence, and those of a prompt; the limit of the host is its measured bandwidth divided by the bytes of the
experts that a token reads there. `--large N` gives `LLM` a mixture of N layers of the Qwen3-235B-A22B shape (50: 70 GB
in Q4_0) with `cpu_experts="auto"`, and takes all memory of the GPU but `--gpu-memory` GB beforehand. Its matrices are
views of one run of random blocks, so that no disk has to hold them; every layer has a packed copy of its own in memory.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.random_files import RandomWeights, mix_of, vector, write_model
from benchmarks.shapes import QWEN3, SHAPES, decoder, tiny
from bifolio import LLM, SamplingParams
from bifolio.config import ModelConfig, MoeConfig, RopeConfig
from bifolio.kernels import native
from bifolio.model.families import family_of
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import assemble

LARGE_EXPERTS = MoeConfig(128, 8, 1536, renormalise=True)  # of Qwen3-235B-A22B
BANDWIDTH_BYTES, BANDWIDTH_RUNS = 4 << 30, 5
CONTEXT = 128  # tokens before those that are counted
PASSES = 3  # the best counts
SHARES = {"all": 1.0, "half": 0.5, "none": 0.0}  # of the layers


@dataclass(frozen=True, slots=True)
class Settings:
    """Of all engines of a run."""

    device: str
    prompt: int  # tokens
    tokens: int  # generated for one sequence
    threads: int | None

    def engine_options(self) -> dict[str, Any]:
        own: dict[str, Any] = {"device": "cpu", "kernels": "torch"} if self.device == "torch" else {"device": "cuda"}
        length = max(self.prompt, CONTEXT + self.tokens) + 64
        return own | {
            "threads": self.threads, "max_num_seqs": 4, "max_model_len": length, "token_budget": self.prompt,
            "chunk_size": self.prompt, "enable_prefix_caching": False,
        }  # fmt: skip


def large_config(layers: int) -> ModelConfig:
    return decoder(
        "qwen3moe", 151936, 4096, layers, 64, 4, 128, 12288, RopeConfig(1e6, 128), **QWEN3, moe=LARGE_EXPERTS
    )


def mapped_model(config: ModelConfig, format: str) -> LoadedModel:
    """A model without a file: its matrices share blocks."""
    names, weights = family_of(config).hf_names, RandomWeights(config, mix_of(format).format)
    return LoadedModel(Path(config.architecture), config, weights=assemble(config, names, weights.matrix, vector))


def host_bandwidth(is_tiny: bool, threads: int | None) -> float:
    """Bytes a second that all threads read from memory."""
    native.set_num_threads(threads or 0)
    size = 64 << 20 if is_tiny else BANDWIDTH_BYTES
    return max(native.read_bandwidth(size) for _ in range(BANDWIDTH_RUNS))


def report(name: str, llm: LLM, settings: Settings, bandwidth: float) -> None:
    """Print a line of figures."""
    moe = llm.model.config.moe
    assert moe is not None
    line = f"{name}: {llm.plan.host_layers} layers on the host, {llm.plan.host_bytes / 1e9:.1f} GB"
    rate = settings.tokens / decode_seconds(llm, settings)
    line += f"; one sequence {rate:.1f} tokens/s"
    if read := llm.plan.host_bytes * moe.top_k / moe.num_experts:
        line += f", {read / 1e9:.2f} GB read a token, {rate * read / bandwidth:.0%} of the limit {bandwidth / read:.1f}"
    seconds = best(lambda: generate(llm, settings.prompt, 1))
    print(f"{line}; prompt of {settings.prompt}: {seconds:.2f} s, {settings.prompt / seconds:.0f} tokens/s", flush=True)


def decode_seconds(llm: LLM, settings: Settings) -> float:
    """Seconds of the tokens behind the first one."""
    whole = best(lambda: generate(llm, CONTEXT, settings.tokens + 1))
    return whole - best(lambda: generate(llm, CONTEXT, 1))


def best(work: Callable[[], None]) -> float:
    found = []
    for _ in range(PASSES):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def generate(llm: LLM, length: int, tokens: int) -> None:
    prompt: Any = np.random.default_rng(length).integers(10, llm.model.config.vocab_size, length).tolist()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)


def started(model: Path | LoadedModel, settings: Settings, cpu_experts: str | int | None) -> LLM:
    begun = time.perf_counter()
    llm = LLM(model, cpu_experts=cpu_experts, **settings.engine_options())
    print(f"started in {time.perf_counter() - begun:.0f} s", flush=True)
    return llm


def run_placements(options: argparse.Namespace, settings: Settings, bandwidth: float) -> None:
    config = SHAPES["qwen3-30b-a3b"]
    config = tiny(config) if options.tiny else config
    with tempfile.TemporaryDirectory() as folder:
        path = (options.folder or Path(folder)) / f"qwen3-30b-a3b{'-tiny' * options.tiny}.{options.format}.gguf"
        if not path.exists():
            begun = time.perf_counter()
            write_model(path, config, options.format)
            print(f"{path.stat().st_size / 1e9:.1f} GB written in {time.perf_counter() - begun:.0f} s", flush=True)
        for name in options.placements.split(","):
            llm = started(path, settings, int(SHARES[name] * config.num_layers))
            report(name, llm, settings, bandwidth)
            llm.close()
            del llm
            gc.collect()


def run_large(options: argparse.Namespace, settings: Settings, bandwidth: float) -> None:
    config = large_config(options.large)
    if options.tiny:
        config = replace(tiny(config), num_layers=options.large, layers=())
    cuda: Any = torch.cuda
    taken, has_gpu = None, settings.device == "cuda"
    if has_gpu:
        free = int(cuda.mem_get_info()[0])
        taken = torch.empty(max(free - int(options.gpu_memory * 1e9), 0), dtype=torch.uint8, device="cuda")
        print(f"{cuda.mem_get_info()[0] / 1e9:.1f} GB of the GPU are free", flush=True)
    llm = started(mapped_model(config, options.format), settings, "auto" if has_gpu else options.large - 1)
    print(f"{llm.plan.weight_bytes / 1e9:.1f} GB of weights on the GPU, {llm.plan.host_bytes / 1e9:.1f} on the host")
    report("large", llm, settings, bandwidth)
    if taken is not None:
        used = cuda.max_memory_allocated() - len(taken)
        print(f"peak of the GPU's memory: {used / 1e9:.1f} GB")
    llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="q4_0", help="format of the weights")
    parser.add_argument("--placements", default="all,half,none")
    parser.add_argument("--folder", type=Path, help="where the file is kept; a temporary folder if left out")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--large", type=int, metavar="LAYERS", help="a mixture that exceeds the GPU, alone")
    parser.add_argument("--gpu-memory", type=float, default=16.0, help="GB that the large mixture may use")
    parser.add_argument("--device", default="cuda", choices=("cuda", "torch"))
    parser.add_argument("--tiny", action="store_true", help="a small shape: its figures mean nothing")
    options = parser.parse_args()
    if options.tiny:
        options.prompt, options.tokens = min(options.prompt, 64), min(options.tokens, 4)
    settings = Settings(options.device, options.prompt, options.tokens, options.threads)
    bandwidth = host_bandwidth(options.tiny, options.threads)
    print(f"{native.isa()}: the host reads {bandwidth / 1e9:.1f} GB/s", flush=True)
    (run_placements if options.large is None else run_large)(options, settings, bandwidth)


if __name__ == "__main__":
    main()
