"""Vectors of texts by a BERT of 109 million parameters with random weights, through `LLM.embed` and over HTTP.

    python -m benchmarks.tools.gpu_vectors [--device cuda] [--tiny] [--profile]      # rows of JSON

Texts are lists of tokens, so that the rows show the engine and not the tokenizer; `served_ms` is one text of 12 tokens
over HTTP, the median of 200 calls in turn.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bifolio import LLM

WORKLOADS = ((512, 1024), (512, 64), (50, 4096), (50, 256), (12, 1))  # tokens of a text, texts
PORT = 8471


def write_bert(folder: Path, tiny: bool) -> None:
    """A random BERT of the usual size as transformers writes it, with a tokenizer of numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4} if tiny else {}
    torch.manual_seed(0)
    model = BertModel(BertConfig(**sizes), add_pooling_layer=False)
    model.save_pretrained(folder)
    words = {str(number): number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def seconds_of(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def embedded(folder: Path, options: dict[str, Any], repeats: int, profile: bool) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    with LLM(str(folder), **options) as llm:
        for length, count in WORKLOADS:
            texts = rng.integers(1000, 20000, (count, length)).tolist()
            call = partial(llm.embed, texts, use_tqdm=False)
            call()
            seconds = seconds_of(call, repeats)
            yield {"row": f"{count} texts of {length} tokens", "ms": round(1e3 * seconds, 3),
                   "tokens_per_s": round(count * length / seconds)}  # fmt: skip
            if profile:
                print_profile(call)


def print_profile(call: Callable[[], Any]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        call()
    print(record.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60), flush=True)


@contextmanager
def served(folder: Path, options: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    command = [sys.executable, "-m", "bifolio", "serve", "-m", str(folder), "--port", str(PORT)]
    command += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
            try:
                connection.request("GET", "/ready")
                if connection.getresponse().read() is not None:
                    break
            except OSError:
                time.sleep(0.2)
        yield connection
    finally:
        process.terminate()
        process.wait(30)


def served_row(folder: Path, options: dict[str, Any], calls: int) -> dict[str, Any]:
    body = json.dumps({"model": folder.name, "input": [list(range(2000, 2012))], "encoding_format": "base64"})
    with served(folder, options) as connection:

        def call() -> None:
            connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise RuntimeError(text.decode())

        seconds_of(call, calls // 4)
        return {"row": "one text of 12 tokens over HTTP", "served_ms": round(1e3 * seconds_of(call, calls), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that the script works")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each workload")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bert"
        write_bert(folder, chosen.tiny)
        for row in embedded(folder, {"device": chosen.device}, chosen.repeats, chosen.profile):
            print(json.dumps(row), flush=True)
        print(json.dumps(served_row(folder, {"device": chosen.device}, 200)), flush=True)


if __name__ == "__main__":
    main()
