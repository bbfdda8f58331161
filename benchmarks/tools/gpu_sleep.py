"""Two models that take turns on one GPU: weights sleep in pinned host memory, and captured graphs stay.

    python -m benchmarks.tools.gpu_sleep llama-8b qwen3-8b --models /dev/shm/models      # rows of JSON
    python -m benchmarks.tools.gpu_sleep llama-8b qwen3-8b --tiny --device torch         # without a GPU

A swap is the sleep of one engine and the waking of the other, which then answers: `swap_s` ends when the memory is
there, `first_token_s` with the first token. The first sleep of each pins memory and copies the weights to it; later
ones copy nothing. Answers are compared with those before the first sleep, and graphs are counted. The second part asks
both models of one `bifolio serve` in turns, whose budget has room for one that is awake.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
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
    llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, ONE, use_tqdm=False)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def counted_captures() -> list[int]:
    """A list with one number, which counts the captures of graphs from now on."""
    count = [0]
    try:
        from bifolio.kernels.triton.graphs.graph_cache import GraphCache
    except ImportError:
        return count
    record = GraphCache.record

    def counting(cache: GraphCache, run: Callable[[], None], pool: str) -> Any:
        count[0] += 1
        return record(cache, run, pool)

    setattr(GraphCache, "record", counting)  # noqa: B010
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


def through_a_server(paths: list[Path], options: argparse.Namespace) -> None:
    """Seconds of a request for one token: to a model that sleeps, and to the one that is awake then."""
    import httpx

    from benchmarks.tools.page import free_port
    from bifolio.engine.memory import parse_bytes
    from bifolio.serve.several.settings import model_source

    cache, on_device = parse_bytes(options.cache), options.device != "torch"
    sources = [model_source(path.name, str(path), cache, on_device=on_device) for path in paths]
    budget = max(source.num_bytes for source in sources) + max(source.asleep_bytes for source in sources)
    url = f"http://127.0.0.1:{free_port()}"
    device = [] if options.device == "torch" else ["--device", options.device, "--deterministic"]
    command = [sys.executable, "-m", "bifolio", "serve", "-m", str(paths[0]), "-m", str(paths[1]), *device,
               "--port", url.rpartition(":")[2], "--memory", options.cache, "--max-model-len", str(options.tokens + 64),
               "--max-num-seqs", "16", "--models-memory", str(budget + (1 << 20)), "--models-sleep", "200GB",
               "--models-wait", "900", "--log-level", "error"]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=url, timeout=900) as client:
            wait_until_ready(process, client)
            print(json.dumps(asked_in_turns(client, [path.name for path in paths], options.turns)), flush=True)
    finally:
        process.terminate()
        process.wait(120)


def wait_until_ready(process: subprocess.Popen[bytes], client: Any) -> None:
    while process.poll() is None:
        with contextlib.suppress(Exception):  # of the connection
            if client.get("/ready").status_code == 200:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the server ended with {process.returncode}")


def asked_in_turns(client: Any, names: list[str], turns: int) -> dict[str, Any]:
    asleep, awake, first, texts = list[float](), list[float](), list[float](), dict[str, set[str]]()
    for turn in range(turns + 4):
        name = names[turn % 2]
        for seconds in (asleep if turn >= 4 else first, awake):
            started = time.perf_counter()
            answer = client.post("/v1/completions", json={"model": name, "prompt": "fox", "max_tokens": 1})
            seconds.append(time.perf_counter() - started)
            answer.raise_for_status()
        body = {"model": name, "prompt": "the fox", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        texts.setdefault(name, set()).add(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
    states = {entry["id"]: entry["status"]["value"] for entry in client.get("/v1/models").json()["data"]}
    return {
        "server_swaps": turns, "request_with_swap_s": round(statistics.median(asleep), 4),
        "worst_s": round(max(asleep), 4), "request_awake_s": round(statistics.median(awake), 4),
        "starts_and_first_sleeps_s": [round(each, 2) for each in first], "states": states,
        "equal": all(len(found) == 1 for found in texts.values()),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs=2, help="two models of the rows, such as llama-8b and qwen3-8b")
    parser.add_argument("--models", type=Path, default=Path("out/models"), help="folder for model files")
    parser.add_argument("--cache", default="8GB", help="memory of each KV cache")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of the prompts that are compared")
    parser.add_argument("--turns", type=int, default=10, help="swaps")
    parser.add_argument("--device", default="cuda", help="cuda, or torch: torch's kernels and memory of the host")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same architectures")
    parser.add_argument("--parts", default="engines,server")
    options = parser.parse_args()
    store, captures = ModelStore(options.models, options.tiny), counted_captures()
    paths = [Path(store.path(name)) for name in options.model]
    if "engines" in options.parts:
        engines = [opened(path, options, captures) for path in paths]
        swaps(engines, options, captures)
        for llm, _ in engines:
            llm.close()
    if "server" in options.parts:
        through_a_server(paths, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
