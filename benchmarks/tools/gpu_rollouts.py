"""An engine beside a trainer on a GPU: the pause of new weights, equal logprobs, structured requests.

    python -m benchmarks.tools.gpu_rollouts --models /dev/shm/models              # rows of JSON
    python -m benchmarks.tools.gpu_rollouts --parts exact --tiny --device torch   # without a GPU: no pauses

pause    requests stream from `LLM` in one thread, and another one loads the weights of a folder, then named tensors;
         `gap_ms` is the longest time between two tokens of a request, before and during the update
server   the same over HTTP: `POST /update_weights` while requests stream
exact    the largest difference between the logprobs of rollouts and those of `LanguageModel`, dense and with experts
grammar  256 requests that follow a JSON schema, and the same numbers of tokens as free text, twice each
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.models import ModelStore
from benchmarks.random_files import write_model
from benchmarks.shapes import SHAPES, tiny
from benchmarks.workloads import SCHEMA
from bifolio import LLM, Grammar, LanguageModel, SamplingParams

PARTS = ("pause", "server", "exact", "grammar")
STREAMS, LONGEST = 32, 4000  # requests that stream, and tokens of each at most
START_SECONDS = 90.0
MEMORY = "8GB"  # of the cache, of engines that others may run beside
Times = dict[Any, list[float]]  # of the tokens of each request


def prompts_of(count: int, least: int, most: int, seed: int) -> list[Any]:
    draws = random.Random(seed)
    return [
        {"prompt_token_ids": [draws.randint(4, 500) for _ in range(draws.randint(least, most))]} for _ in range(count)
    ]


def largest_gap(times: Times, start: float, end: float) -> float:
    """Milliseconds between two tokens of a request, one of which came between these times."""
    gaps = [
        later - earlier
        for own in times.values()
        for earlier, later in pairwise(own)
        if later >= start and earlier <= end
    ]
    return round(1e3 * max(gaps, default=0.0), 1)


def timed_update(times: Times, update: Callable[[], Any]) -> dict[str, Any]:
    """The longest gaps of a second without an update, and of one; the update's seconds."""
    time.sleep(1.5)
    began = time.perf_counter()
    time.sleep(1.0)
    before = largest_gap(times, began, time.perf_counter())
    began = time.perf_counter()
    update()
    ended = time.perf_counter()
    time.sleep(1.0)
    count = sum(len(own) for own in times.values())
    gap = largest_gap(times, began, ended + 0.5)
    return {"gap_before_ms": before, "gap_ms": gap, "update_s": round(ended - began, 2), "tokens": count}


# -- the engine in this process ----------------------------------------------------------------------------------------
@contextmanager
def streaming(llm: LLM, count: int, most: int) -> Iterator[Times]:
    """The times of tokens of requests that stream in another thread."""
    times: Times = {str(number): [] for number in range(count)}
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
    stream = llm.stream(prompts_of(count, 64, 64, 1), params)
    ended = threading.Event()

    def read() -> None:
        for result in stream:
            if result.token is not None:
                times[result.request_id].append(time.perf_counter())
            if ended.is_set():
                break
        stream.close()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield times
    finally:
        ended.set()
        reader.join()


def pauses(store: ModelStore, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from safetensors.torch import load_file

    folder, other = folders(store)
    with LLM(folder, enable_sleep_mode=True, max_model_len=LONGEST + 200, memory=MEMORY, **options) as llm:
        for number, next_folder in enumerate((other, folder)):
            with streaming(llm, STREAMS, LONGEST) as times:
                found = timed_update(times, lambda own=next_folder: llm.load_weights(own))  # type: ignore[misc]
            yield {"row": "pause, folder", "update": number + 1, **found}
        for place in ("cpu", options.get("device", "cpu")):
            tensors: dict[str, Any] = {}
            for file in sorted(other.glob("*.safetensors")):
                tensors |= load_file(str(file), device=place)
            with streaming(llm, STREAMS, LONGEST) as times:
                found = timed_update(times, lambda named=tensors: llm.load_weights(iter(named.items())))  # type: ignore[misc]
            yield {"row": "pause, tensors", "on": place, **found}


def folders(store: ModelStore) -> tuple[Path, Path]:
    """A model and a copy of it, of which the one replaces the other."""
    folder = Path(store.path("llama-1b"))
    other = folder.with_name(f"{folder.name}-next")
    if not other.exists():
        shutil.copytree(folder, other)
    return folder, other


# -- the server --------------------------------------------------------------------------------------------------------
def served(store: ModelStore, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    folder, other = folders(store)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bifolio", "serve", "--model", str(folder), "--port", str(port), "--device",
               options["device"], "--max-model-len", str(LONGEST + 200), "--enable-sleep-mode",
               "--allow-updates"]  # fmt: skip
    with (store.folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(port, process)
        times: Times = {number: [] for number in range(STREAMS)}
        ended = threading.Event()
        readers = [threading.Thread(target=read_stream, args=(port, own, ended)) for own in times.values()]
        for reader in readers:
            reader.start()
        time.sleep(1.0)
        yield {"row": "pause, server", **timed_update(times, lambda: post(port, "/update_weights", other))}
        ended.set()
        for reader in readers:
            reader.join()
    finally:
        process.terminate()
        process.wait(30)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    began = time.perf_counter()
    while time.perf_counter() - began < START_SECONDS and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.3)
    raise RuntimeError("the server did not start: run it by hand to see its messages, or read server.log")


def post(port: int, path: str, folder: Path) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps({"weight_dir": str(folder)}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path} was refused: {text[:300]!r}")


def read_stream(port: int, times: list[float], ended: threading.Event) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"prompt": [5 + number for number in range(64)], "max_tokens": LONGEST, "stream": True,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"a stream was refused: {answer.read()[:300]!r}")
    while not ended.is_set() and (line := answer.readline()):
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    connection.close()


# -- a trainer's logprobs ----------------------------------------------------------------------------------------------
def exact(store: ModelStore, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import torch

    small = tiny if store.tiny else (lambda config: config)
    experts = small(replace(SHAPES["experts"], num_layers=2, vocab_size=32768))
    for name, config in (("qwen3-0.6b", small(SHAPES["qwen3-0.6b"])), ("experts-2", experts)):
        folder = store.folder / f"exact-{name}"
        if not folder.exists():
            write_model(folder, config, "bf16")
        began, model = time.perf_counter(), LanguageModel.from_pretrained(folder)
        on_gpu = options.get("device", "").startswith("cuda")
        model = model.to(options["device"], torch.bfloat16) if on_gpu else model
        own = {**options, "deterministic": True} if on_gpu else {"kernels": "native", "kv_cache_dtype": "f32"}
        worst, count = 0.0, 0
        with LLM(folder, max_model_len=512, memory=MEMORY, **{**own, "warm_up": False}) as llm:
            params = SamplingParams(temperature=1.0, seed=3, max_tokens=64, ignore_eos=True, logprobs=0)
            prompts = prompts_of(4 if store.tiny else 32, 20, 200, 5)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                ids, answer = prompt["prompt_token_ids"], output.outputs[0].token_ids
                entries = output.outputs[0].logprobs or []
                scored = [entry[token].logprob for entry, token in zip(entries, answer, strict=True)]
                tokens = torch.tensor([[*ids, *answer]], device=model.device)
                found = model.token_logprobs(tokens, exact=True)[0, len(ids) - 1 :].tolist()
                worst = max(worst, *(abs(one - other) for one, other in zip(found, scored, strict=True)))
                count += len(answer)
        yield {"row": "exact", "model": name, "logprobs": count, "largest_difference": worst,
               "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip


# -- structured requests -----------------------------------------------------------------------------------------------
def grammars(store: ModelStore, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    count = 8 if store.tiny else 256
    most = 40 if store.tiny else 512
    with LLM(store.path("llama-1b"), max_model_len=2048, **options) as llm:
        for number, (requests, kind) in enumerate([(8, "warm-up"), (count, "first"), (count, "second")]):
            prompts = prompts_of(requests, most // 8, most, number)
            shared: dict[str, Any] = {"temperature": 1.0, "detokenize": False}
            structured = [
                SamplingParams(max_tokens=most, seed=seed, grammar=Grammar.json_schema(SCHEMA), **shared)
                for seed in range(requests)
            ]
            own, lengths, wall = timed_tokens(llm, prompts, structured)
            free = [
                SamplingParams(max_tokens=length, seed=seed, ignore_eos=True, **shared)
                for seed, length in enumerate(lengths)
            ]
            llm.reset_prefix_cache()
            rate, others, other_wall = timed_tokens(llm, prompts, free)
            assert others == lengths
            yield {"row": "grammar", "pass": kind, "requests": requests, "tokens": sum(lengths),
                   "structured_tok_s": round(own), "free_tok_s": round(rate), "loss": round(1 - own / rate, 4),
                   "structured_s": round(wall, 3), "free_s": round(other_wall, 3)}  # fmt: skip


def timed_tokens(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> tuple[float, list[int], float]:
    """Tokens per second, tokens of each answer, seconds."""
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall = time.perf_counter() - began
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    return sum(lengths) / wall, lengths, wall


RUN = {"pause": pauses, "server": served, "exact": exact, "grammar": grammars}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("out/models"), help="folder for the models")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or torch: torch's kernels on the CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same architectures")
    parser.add_argument("--no-warm-up", action="store_true", help="capture steps when they come first")
    options = parser.parse_args()
    own: dict[str, Any] = {"kernels": "torch"} if options.device == "torch" else {"device": options.device}
    own["warm_up"] = not options.no_warm_up
    for part in options.parts.split(","):
        for row in RUN[part](ModelStore(options.models, options.tiny), own):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
