"""Prefill and decode of random models on this CPU: bifolio beside its peers, in one interleaved run.

    python benchmarks/peers_cpu.py --models S --formats q8_0,q4_0 --rounds 3

Each engine runs in a process of its own, one after the other, round by round; the median of the rounds is shown with
its ratio to bifolio's and, for bifolio, the fraction of what the machine allows: for decode the bytes of weights and
cache divided by the measured read bandwidth, for prefill the operations divided by the measured rate of products in
registers. Peers (llama.cpp, OpenVINO, transformers) that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
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
LONG_CONTEXT = ("bifolio q8_0 cache", "llama.cpp flash")  # differ where the cache is large
WORKER_SECONDS = 1800


def available(engine: str, format: QuantFormat) -> bool:
    if engine.startswith("llama.cpp"):
        return importlib.util.find_spec("llama_cpp") is not None
    if engine.startswith("openvino"):
        return importlib.util.find_spec("openvino") is not None
    if engine == "transformers":
        installed = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
        return installed and format is QuantFormat.BF16
    return True


def make_engine(name: str, config: ModelConfig, format: QuantFormat, path: Path, threads: int) -> Any:
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
    """In a process of its own: seconds of each workload, as one line of JSON."""
    config, format = model_config(arguments.models), QuantFormat.parse(arguments.formats)
    path = gguf_path(arguments.folder, arguments.models, format)
    engine = make_engine(arguments.worker, config, format, path, arguments.threads)
    chosen = [workload for workload in WORKLOADS if workload.name in arguments.workloads]
    print(json.dumps({workload.name: engine.seconds(workload) for workload in chosen}))


def gguf_path(folder: Path, model: str, format: QuantFormat) -> Path:
    return folder / f"{model}-{format.name.lower()}.gguf"


def measure(engine: str, model: str, format: QuantFormat, arguments: argparse.Namespace) -> dict[str, float]:
    names = [workload.name for workload in WORKLOADS if workload.name in arguments.workloads]
    if engine in LONG_CONTEXT:
        names = [name for name in names if "4096" in name]
    if not names:
        return {}
    command = [sys.executable, __file__, "--worker", engine, "--models", model, "--formats", format.name]
    command += ["--folder", str(arguments.folder), "--threads", str(arguments.threads), "--workloads", ",".join(names)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=WORKER_SECONDS, check=False)
    if result.returncode:
        print(f"  {engine} failed: {result.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    return {str(name): float(seconds) for name, seconds in json.loads(result.stdout.splitlines()[-1]).items()}


def limits(threads: int) -> dict[str, float]:
    from bifolio.kernels import native

    native.set_num_threads(threads)
    return {
        "isa": native.isa(),  # type: ignore[dict-item]
        "read GB/s": native.read_bandwidth() / 1e9,
        "bytes Gop/s": native.product_rate(True) / 1e9,
        "floats Gop/s": native.product_rate(False) / 1e9,
    }


def best_rate(config: ModelConfig, format: QuantFormat, workload: Workload, machine: dict[str, float]) -> float:
    """Tokens per second that the machine allows."""
    layers = config.num_parameters - config.vocab_size * config.hidden_size  # the embedding is the head
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
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for _ in range(arguments.rounds):
        for name in engines:
            if time.monotonic() > arguments.end:
                print("  out of time: the rest is left out", file=sys.stderr)
                break
            for measured, value in measure(name, model, format, arguments).items():
                seconds[name].setdefault(measured, []).append(value)
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
    parser.add_argument("--folder", type=Path, default=Path("out/peers"), help="where the peers' model files go")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after that long")
    parser.add_argument("--json", type=Path, help="also write the rows here")
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
