"""Overhead of HTTP: tokens per second of concurrent streams through the server, relative to `LLM.generate`.

    python benchmarks/serve_overhead.py [--model REF] [--tiny] [--streams 16] [--tokens 200] [--rounds 3]
                                        [--clients 1] [--front-ends 1] [--device cpu] [--null-device] [--json]

Both run the same requests in alternating rounds, so that a slowdown of the machine affects both. The client runs on the
same machine and uses part of its CPU time. With `--tiny` the model has one layer of random weights and the tokenizer of
the embedded model. With `--null-device` decode steps are free (`null_device.py`): the rest is the time of the host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.measure.load import LoadReport, LoadRequest, Plan
from bifolio.measure.load_client import LoadClient
from bifolio.measure.load_processes import Target, run_clients


def requests_of(streams: int, tokens: int, vocab_size: int) -> list[LoadRequest]:
    generator = np.random.default_rng(1)
    return [LoadRequest(0.0, generator.integers(3, vocab_size, 32).tolist(), tokens) for _ in range(streams)]


def write_tiny(folder: Path) -> str:
    """A model folder whose steps cost little."""
    from bifolio.api.language_model import LanguageModel
    from bifolio.measure.random_models import SHAPES
    from bifolio.model.loader import load_model
    from bifolio.model.registry import DEFAULT_MODEL

    tokenizer = load_model(DEFAULT_MODEL).require_tokenizer()
    config = replace(SHAPES["tiny"], vocab_size=tokenizer.vocab_size, num_layers=1)
    LanguageModel(config, seed=0).save_pretrained(folder)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = {"max_num_seqs": arguments.streams, "max_model_len": arguments.tokens + 64, "device": arguments.device}
    return sizes if arguments.device == "cuda" else {**sizes, "memory": "256MB"}


def offline(arguments: argparse.Namespace, connection: Any) -> None:
    """Main function of the offline process: one round per message."""
    from bifolio import LLM, SamplingParams

    options = engine_options(arguments)
    if arguments.null_device:
        from null_device import null_kernels

        options["kernels"] = null_kernels()
    llm = LLM(arguments.model, **options, enable_prefix_caching=False)
    connection.send(llm.model.config.vocab_size)
    while (work := connection.recv()) is not None:
        params = [SamplingParams(temperature=0.0, max_tokens=item.num_output, ignore_eos=True) for item in work]
        began = time.perf_counter()
        outputs = llm.generate([item.prompt for item in work], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        connection.send(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)


def start_server(arguments: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in engine_options(arguments).items()]
    model = ["--model", arguments.model] if arguments.model else []
    options.append(f"--front-ends={arguments.front_ends}")
    program = [str(Path(__file__).parent / "null_device.py")] if arguments.null_device else ["-m", "bifolio.cli.main"]
    command = [sys.executable, *program, "serve", *model, "--port", str(port), *options]
    process = subprocess.Popen([*command, "--log-level", "warning"])
    client = LoadClient(f"127.0.0.1:{port}")
    for _ in range(600):
        try:
            asyncio.run(client.model_name())
            return process, f"127.0.0.1:{port}"
        except Exception:
            time.sleep(0.1)
    raise SystemExit("the server did not start")


def through_http(address: str, work: list[LoadRequest], salt: int, clients: int) -> LoadReport:
    """Run a round with a new cache salt, so that the prefix cache has no hits, as in the offline rounds."""
    body = {"temperature": 0.0, "ignore_eos": True, "cache_salt": str(salt)}
    report = run_clients(Target(address), Plan(work), body, "overhead", {}, clients)
    failed = [timing.error for timing in report.timings if timing.error]
    if failed:
        raise SystemExit(f"requests failed: {failed[:3]}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--null-device", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.tiny:
            arguments.model = write_tiny(Path(folder))
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=offline, args=(arguments, theirs))
    worker.start()
    work = requests_of(arguments.streams, arguments.tokens, min(ours.recv(), 4000))
    server, address = start_server(arguments)
    try:
        plain, reports = [], []
        for number in range(arguments.rounds + 1):  # the first is a warm-up
            ours.send(work)
            plain.append(ours.recv())
            reports.append(through_http(address, work, number, arguments.clients))
    finally:
        ours.send(None)
        server.terminate()
        server.wait(60)
        worker.join()
    served = [report.output_tokens / report.seconds for report in reports]
    report = {
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "offline_tokens_per_second": [round(value, 1) for value in plain[1:]],
        "http_tokens_per_second": [round(value, 1) for value in served[1:]],
        "ratio_of_rounds": [round(b / a, 3) for a, b in zip(plain[1:], served[1:], strict=True)],
        "ratio": round(statistics.median(b / a for a, b in zip(plain[1:], served[1:], strict=True)), 3),
    }
    for kind in reports[-1].cpu_seconds:
        report[f"{kind}_cpu_us_per_token"] = [round(1e6 * one.cpu_per_token(kind), 1) for one in reports[1:]]
    if arguments.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:28s} {value}")


if __name__ == "__main__":
    main()
