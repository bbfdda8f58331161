"""Prefill and decode speed of random models on this CPU: bifolio and other engines in one interleaved run.

    python benchmarks/peers_cpu.py --models S --formats q8_0,q4_0 --rounds 3

Each engine loads its model in a separate process. The engines alternate, workload by workload and round by round, so
that a temporary slowdown of the machine affects all of them. The output is the median of the rounds, its ratio to
bifolio's, and its fraction of the machine's limit: for decode the measured read bandwidth divided by the bytes of
weights and cache, for prefill the measured rate of products in registers divided by the operations. Engines
(llama.cpp, OpenVINO, transformers) that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from native_models import model_config, write_gguf
from native_workloads import WORKLOADS, LlamaCppModel, NativeModel, TransformersModel, Workload
from openvino_models import OpenVINOModel, PagedOpenVINOModel

from bifolio.config import KVDtype, ModelConfig
from bifolio.quant.formats import QuantFormat

ENGINES = (
    "bifolio",
    "bifolio q8_0 cache",
    "bifolio bf16 cache",
    "llama.cpp",
    "llama.cpp flash",
    "llama.cpp bf16 keys",
    "openvino",
    "openvino paged",
    "openvino paged f32",
    "transformers",
)
LONG_CONTEXT = ("bifolio q8_0 cache", "llama.cpp flash")  # differ for large caches only
WORKER_SECONDS = 1800
READY = "ready"

Seconds = dict[str, dict[str, list[float]]]  # engine -> workload -> rounds


def available(engine: str, format: QuantFormat) -> bool:
    if engine.startswith("llama.cpp"):
        return importlib.util.find_spec("llama_cpp") is not None
    if engine.startswith("openvino"):
        return importlib.util.find_spec("openvino") is not None
    if engine == "transformers":
        installed = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
        return installed and format is QuantFormat.BF16
    return True


def make_peer(name: str, config: ModelConfig, format: QuantFormat, path: Path, threads: int) -> Any:
    if name.startswith("llama.cpp"):
        return LlamaCppModel(path, threads, name.endswith("flash"), name.endswith("bf16 keys"))
    if name.startswith("openvino"):
        kind = PagedOpenVINOModel if "paged" in name else OpenVINOModel
        return kind(config, format, threads, "f32" if name.endswith("f32") else None)
    if name == "transformers":
        return TransformersModel(config, threads)
    cache: KVDtype = "q8_0" if "q8_0" in name else "bf16" if "bf16" in name else "f16"
    return NativeModel(config, format, cache, threads)


def work(arguments: argparse.Namespace) -> None:
    """Main function of an engine process: read a workload per input line, print its seconds per output line."""
    config, format = model_config(arguments.models), QuantFormat.parse(arguments.formats)
    path = gguf_path(arguments.folder, arguments.models, format)
    engine = make_peer(arguments.worker, config, format, path, arguments.threads)
    workloads = {workload.name: workload for workload in WORKLOADS}
    print(READY, flush=True)
    for line in sys.stdin:
        print(engine.seconds(workloads[line.strip()]), flush=True)


def gguf_path(folder: Path, model: str, format: QuantFormat) -> Path:
    return folder / f"{model}-{format.name.lower()}.gguf"


class Worker:
    """A process with a loaded engine that waits for workloads."""

    def __init__(self, engine: str, model: str, format: QuantFormat, arguments: argparse.Namespace) -> None:
        self.engine = engine
        command = [sys.executable, __file__, "--worker", engine, "--models", model, "--formats", format.name]
        command += ["--folder", str(arguments.folder), "--threads", str(arguments.threads)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        while (line := self._line()) not in (READY, None):
            pass  # output of libraries
        self.failed = line is None

    def seconds(self, workload: str) -> float | None:
        """Seconds of a workload; None, with a message, if the process has ended."""
        if not self.failed:
            assert self._process.stdin
            self._process.stdin.write(workload + "\n")
            self._process.stdin.flush()
        line = None if self.failed else self._line()
        self.failed = line is None
        return None if line is None else float(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _line(self) -> str | None:
        assert self._process.stdout
        timer = threading.Timer(WORKER_SECONDS, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            self._errors.seek(0)
            print(f"  {self.engine} failed: {self._errors.read().strip().splitlines()[-1:]}", file=sys.stderr)
        return line.strip() or None


def workloads_of(engine: str, arguments: argparse.Namespace) -> list[str]:
    names = [workload.name for workload in WORKLOADS if workload.name in arguments.workloads]
    return [name for name in names if "4096" in name or engine not in LONG_CONTEXT]


def take_turns(engines: list[str], model: str, format: QuantFormat, arguments: argparse.Namespace) -> Seconds:
    """Seconds of each engine and workload, one value per round."""
    found: Seconds = {name: {} for name in engines}
    workers = [Worker(name, model, format, arguments) for name in engines if workloads_of(name, arguments)]
    try:
        for _ in range(arguments.rounds):
            for workload in WORKLOADS:
                for worker in workers:
                    if worker.failed or workload.name not in workloads_of(worker.engine, arguments):
                        continue
                    if time.monotonic() > arguments.end:
                        print("  time limit reached: remaining workloads are skipped", file=sys.stderr)
                        return found
                    seconds = worker.seconds(workload.name)
                    if seconds is not None:
                        found[worker.engine].setdefault(workload.name, []).append(seconds)
    finally:
        for worker in workers:
            worker.close()
    return found


def limits(threads: int) -> dict[str, float]:
    """The best of several measurements, because other load on the machine can only slow it down."""
    from bifolio.kernels import native

    def best(measure: Callable[[], float]) -> float:
        return max(measure() for _ in range(5)) / 1e9

    native.set_num_threads(threads)
    return {
        "isa": native.isa(),  # type: ignore[dict-item]
        "read GB/s": best(native.read_bandwidth),
        "bytes Gop/s": best(lambda: native.product_rate(True)),
        "floats Gop/s": best(lambda: native.product_rate(False)),
    }


def best_rate(config: ModelConfig, format: QuantFormat, workload: Workload, machine: dict[str, float]) -> float:
    """Upper limit of tokens per second on this machine."""
    layers = config.num_parameters - config.vocab_size * config.hidden_size  # embedding and head are tied
    head = config.vocab_size * config.hidden_size
    if workload.queries > 1:
        rate = machine["bytes Gop/s" if format.is_quantized else "floats Gop/s"] * 1e9
        operations = 2 * layers * workload.num_tokens + 2 * head * workload.sequences
        return workload.num_tokens * rate / operations
    weights = (layers + head) * format.bits_per_element / 8
    cached = 2 * config.num_layers * config.kv_size * 2 * (workload.context + 1)  # in f16
    return workload.num_tokens * machine["read GB/s"] * 1e9 / (weights + cached * workload.sequences)


def compare(model: str, format: QuantFormat, arguments: argparse.Namespace, machine: dict[str, float]) -> list[Any]:
    config = model_config(model)
    engines = [name for name in arguments.engines.split(",") if available(name, format)]
    path = gguf_path(arguments.folder, model, format)
    if any(name.startswith("llama.cpp") for name in engines) and not path.exists():
        write_gguf(config, format, path)
    seconds = take_turns(engines, model, format, arguments)
    rows = []
    for workload in WORKLOADS:
        ours = seconds.get("bifolio", {}).get(workload.name)
        for name in engines:
            values = seconds[name].get(workload.name)
            if not values:
                continue
            rate = workload.num_tokens / statistics.median(values)
            rows.append(
                {
                    "model": model,
                    "format": format.name.lower(),
                    "workload": workload.name,
                    "engine": name,
                    "tokens/s": rate,
                    "rounds": [workload.num_tokens / value for value in values],
                    "of the limit": rate / best_rate(config, format, workload, machine),
                    "bifolio is faster by": None if not ours else statistics.median(values) / statistics.median(ours),
                }
            )
            print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    factor = row["bifolio is faster by"]
    shown = "" if factor is None or row["engine"] == "bifolio" else f"{factor:6.2f}x"
    print(
        f"{row['model']} {row['format']:5} {row['workload']:18} {row['engine']:20} {row['tokens/s']:9.1f} tok/s "
        f"{row['of the limit']:6.0%} of the limit {shown}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="S,M", help="S: SmolLM2-135M's shape, M: Llama-3.2-1B's")
    parser.add_argument("--formats", default="f16,bf16,q8_0,q4_0")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--workloads", default=",".join(workload.name for workload in WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--folder", type=Path, default=Path("out/peers"), help="folder for the model files of other engines"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no workload after this many seconds")
    parser.add_argument("--json", type=Path, help="JSON file for the results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.end = time.monotonic() + arguments.seconds
    arguments.workloads = arguments.workloads.split(",")
    if arguments.worker:
        work(arguments)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    machine = limits(arguments.threads)
    print(
        f"{arguments.threads} threads; "
        + ", ".join(f"{k} {v if k == 'isa' else round(v, 1)}" for k, v in machine.items())
    )
    rows = []
    for model in arguments.models.split(","):
        for format in arguments.formats.split(","):
            rows += compare(model, QuantFormat.parse(format), arguments, machine)
            if arguments.json:
                arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
