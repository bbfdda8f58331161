"""The native kernels on every instruction set of this machine: one command on any host with a C++ compiler.

    python benchmarks/instruction_sets.py --threads 2,8 --json found.json
    python benchmarks/instruction_sets.py --isas avx2 --llama avx2=/path/to/llama.cpp/build-avx2/bin

Compiles the kernels in place (cmake, ninja and nanobind; `--no-build` skips it). Random models in the shapes of
SmolLM2-135M (S) and Llama-3.2-1B (M) run in one process for each instruction set, which `BIFOLIO_ISA` selects: an
AVX-512 machine with `BIFOLIO_ISA=avx2` runs as an AVX2 machine does. The processes take turns, workload by workload,
and the table shows the median of the rounds in tokens per second, with the ratio to the best instruction set.

`--llama NAME=FOLDER` adds llama.cpp with the shared libraries of FOLDER, a build for the instruction set NAME (it needs
the Python package llama_cpp, of which only the bindings are used). For AVX2 alone: cmake -DGGML_NATIVE=OFF
-DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=OFF -DBUILD_SHARED_LIBS=ON; for AMX: -DGGML_NATIVE=ON on a
machine that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FORMATS = {"S": ("q8_0", "q4_0"), "M": ("q8_0", "q4_0", "q4_k", "q6_k")}  # rows of S are no multiple of 256
WORKLOADS = ("prefill 512", "decode 1", "decode 16")


def build() -> None:
    """Compile the kernels into src/bifolio/kernels."""
    folder = Path(tempfile.gettempdir()) / f"bifolio-native-{os.getuid()}"
    environment = {**os.environ, "PYTHON": sys.executable, "BUILD_DIR": str(folder)}
    subprocess.run([str(ROOT / "scripts" / "build-native")], env=environment, check=True, stdout=sys.stderr)


def environment_of(engine: str) -> dict[str, str]:
    """Of a process: `isa NAME`, or `llama FOLDER`."""
    kind, _, value = engine.partition(" ")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    name = "BIFOLIO_ISA" if kind == "isa" else "LLAMA_CPP_LIB_PATH"
    return {**os.environ, "PYTHONPATH": paths, name: value}


def available_isas() -> list[str]:
    code = "from bifolio.kernels.native import available_isas; print(' '.join(available_isas()))"
    found = subprocess.run([sys.executable, "-c", code], env=environment_of("isa "), check=True, capture_output=True)
    return [name for name in found.stdout.decode().split() if name != "generic"]


def work(options: argparse.Namespace) -> None:
    """Main function of a process: a workload per input line, its seconds per output line."""
    from native_models import model_config, write_gguf
    from native_workloads import WORKLOADS as ALL
    from native_workloads import LlamaCppModel, NativeModel

    from bifolio.quant.formats import QuantFormat

    config, format = model_config(options.models), QuantFormat.parse(options.format)
    model: Any
    if options.work.startswith("isa "):
        model = NativeModel(config, format, "f16", int(options.threads))
    else:
        path = Path(tempfile.mkdtemp()) / "model.gguf"
        write_gguf(config, format, path)
        model = LlamaCppModel(path, int(options.threads), flash_attention=False)
    workloads = {workload.name: workload for workload in ALL}
    print("ready", flush=True)
    for line in sys.stdin:
        workload = workloads[line.strip()]
        print(workload.num_tokens / model.seconds(workload), flush=True)


class Worker:
    """A process with one engine that waits for workloads."""

    def __init__(self, engine: str, model: str, format: str, threads: str) -> None:
        command = [
            sys.executable,
            __file__,
            "--work",
            engine,
            "--models",
            model,
            "--format",
            format,
            "--threads",
            threads,
        ]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment_of(engine), stdin=pipe, stdout=pipe, text=True)
        self._answer()

    def speed(self, workload: str) -> float:
        assert self._process.stdin
        self._process.stdin.write(workload + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine process ended: see its error above")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def turns(engines: dict[str, str], model: str, format: str, threads: str, rounds: int) -> dict[str, dict[str, float]]:
    """Name -> workload -> tokens per second."""
    workers = {name: Worker(engine, model, format, threads) for name, engine in engines.items()}
    found: dict[str, dict[str, list[float]]] = {name: {w: [] for w in WORKLOADS} for name in workers}
    try:
        for _ in range(rounds):
            for workload in WORKLOADS:
                for name, worker in workers.items():
                    found[name][workload].append(worker.speed(workload))
    finally:
        for worker in workers.values():
            worker.close()
    return {name: {w: statistics.median(values) for w, values in each.items()} for name, each in found.items()}


def table(records: list[dict[str, Any]]) -> str:
    names = list(records[0]["speeds"])
    lines = ["| model | format | threads | workload | " + " | ".join(names) + " |", "|---" * (4 + len(names)) + "|"]
    for record in records:
        for workload in WORKLOADS:
            speeds = [record["speeds"][name][workload] for name in names]
            cells = [f"{speed:.1f} ({speed / speeds[0]:.2f})" for speed in speeds]
            head = (record["model"], record["format"], record["threads"], workload)
            lines.append("| " + " | ".join([*head, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isas", default="", help="names, best first; by default all that this machine has")
    parser.add_argument("--llama", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--models", default="S,M")
    parser.add_argument("--threads", default="2,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--no-build", action="store_true", help="use the kernels that are there")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--format", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options)
    if not options.no_build:
        build()
    isas = options.isas.split(",") if options.isas else available_isas()
    engines = {isa: f"isa {isa}" for isa in isas}
    for entry in options.llama:
        name, _, folder = entry.partition("=")
        engines[f"llama.cpp {name}"] = f"llama {Path(folder).resolve()}"
    records: list[dict[str, Any]] = []
    for model in options.models.split(","):
        for format in FORMATS[model]:
            for threads in options.threads.split(","):
                speeds = turns(engines, model, format, threads, options.rounds)
                records.append({"model": model, "format": format, "threads": threads, "speeds": speeds})
                print(json.dumps(records[-1]), file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(records, indent=1))
    print(table(records))
    return None


if __name__ == "__main__":
    main()
