"""The native kernels on every instruction set of this machine: one command on any host with a C++ compiler.

    python benchmarks/instruction_sets.py --threads 2,8 --json found.json
    python benchmarks/instruction_sets.py --models T --isas avx2 --llama avx2=/path/to/llama.cpp/build-avx2/bin

Compiles the kernels in place (cmake, ninja and nanobind; `--no-build` skips it). Random models in the shapes of
SmolLM2-135M (S), Llama-3.2-1B (M) and TinyLlama-1.1B (T) run in one process for each instruction set, which
`BIFOLIO_ISA` selects: an AVX-512 machine with `BIFOLIO_ISA=avx2` runs as an AVX2 machine does. The processes take
turns, workload by workload, and the table shows the median of the rounds in tokens per second, with the ratio to the
first instruction set. Formats are those of `bifolio quantize`, mixes like q4_k_m included.

`--llama NAME=FOLDER` adds llama.cpp with the shared libraries of FOLDER, a build for the instruction set NAME, and the
ratio to it. It needs the Python package llama_cpp, of which only the bindings are used. For AVX2 alone: cmake
-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF -DBUILD_SHARED_LIBS=ON;
for AMX: -DGGML_NATIVE=ON on a machine that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Rows of S are no multiple of 256.
FORMATS = {
    "S": "q8_0,q4_0",
    "M": "q8_0,q4_0,q4_k_m,q6_k",
    "T": "q8_0,q4_0,q4_k_m,q6_k",
}  # rows of S are no multiple of 256
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
    """Main function of a process: threads and a workload per input line, tokens per second per output line."""
    from native_models import model_config
    from native_workloads import WORKLOADS as ALL
    from native_workloads import LlamaCppModel, NativeModel

    from bifolio.kernels.native import set_num_threads
    from bifolio.model.gguf.mixes import parse_mix

    model: Any
    if options.work.startswith("isa "):
        model = NativeModel(model_config(options.models), parse_mix(options.formats), "f16", None)
    else:
        model = LlamaCppModel(options.file, 1, flash_attention=False)
    workloads = {workload.name: workload for workload in ALL}
    print("ready", flush=True)
    for line in sys.stdin:
        threads, name = json.loads(line)
        workload = workloads[name]
        set_num_threads(threads)
        model.threads = threads  # of llama.cpp's contexts
        if workload.queries > 1:
            workload = workload._replace(repeats=options.prefills)
        print(workload.num_tokens / model.seconds(workload), flush=True)


class Worker:
    """A process with one engine that waits for workloads."""

    def __init__(self, engine: str, model: str, format: str, file: Path, options: argparse.Namespace) -> None:
        arguments = ["--work", engine, "--models", model, "--formats", format, "--file", str(file)]
        command = [sys.executable, __file__, *arguments, "--prefills", str(options.prefills)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment_of(engine), stdin=pipe, stdout=pipe, text=True)
        self.engine, self.ended = engine, False

    def wait(self) -> None:
        """Until the model is loaded."""
        self._answer()

    def speed(self, threads: int, workload: str) -> float | None:
        """None if the process has ended."""
        if self.ended:
            return None
        assert self._process.stdin
        self._process.stdin.write(json.dumps([threads, workload]) + "\n")
        self._process.stdin.flush()
        line = self._answer()
        return float(line) if line else None

    def _answer(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self.ended = True
            print(f"the process of {self.engine} ended with {self._process.wait()}", file=sys.stderr)
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def turns(engines: dict[str, str], model: str, format: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each number of threads: name -> workload -> tokens per second."""
    from native_models import model_config, write_gguf

    from bifolio.model.gguf.mixes import parse_mix

    records = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        if any(engine.startswith("llama ") for engine in engines.values()):
            write_gguf(model_config(model), parse_mix(format), file)
        workers = {name: Worker(engine, model, format, file, options) for name, engine in engines.items()}
        try:
            for worker in workers.values():
                worker.wait()
            for threads in map(int, options.threads.split(",")):
                found: dict[str, dict[str, list[float]]] = {name: {w: [] for w in WORKLOADS} for name in workers}
                chosen = options.workloads.split(",")
                steps = [(w, name) for _ in range(options.rounds) for w in chosen for name in workers]
                for workload, name in steps:
                    if time.monotonic() < options.end and (speed := workers[name].speed(threads, workload)):
                        found[name][workload].append(speed)
                speeds = {n: {w: statistics.median(v) for w, v in each.items() if v} for n, each in found.items()}
                records.append({"model": model, "format": format, "threads": threads, "speeds": speeds})
                print(json.dumps(records[-1]), file=sys.stderr, flush=True)
        finally:
            for worker in workers.values():
                worker.close()
    return records


def table(records: list[dict[str, Any]]) -> str:
    """In Markdown: tokens per second, the ratio to the first column, and of each instruction set to its llama.cpp."""
    names = list(records[0]["speeds"])
    pairs = [(name, f"llama.cpp {name}") for name in names if f"llama.cpp {name}" in names]
    heads = ["model", "format", "threads", "workload", *names, *(f"{a} / {b}" for a, b in pairs)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for record in records:
        for workload in WORKLOADS:
            speeds = {name: each[workload] for name, each in record["speeds"].items() if workload in each}
            if not speeds:
                continue
            first = speeds.get(names[0])
            cells = [record["model"], record["format"], str(record["threads"]), workload]
            for name in names:
                shown = f"{speeds[name]:.1f}" if name in speeds else ""
                cells.append(f"{shown} ({speeds[name] / first:.2f})" if shown and first else shown)
            cells += [f"{speeds[a] / speeds[b]:.2f}" if a in speeds and b in speeds else "" for a, b in pairs]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isas", default="", help="names, best first; by default all that this machine has")
    parser.add_argument("--llama", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--models", default="S,M")
    parser.add_argument("--formats", default="", help="formats or mixes; by default those that suit the model")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--threads", default="2,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefills", type=int, default=3, help="measured prefills, after two others; 0: one after one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no workload after this many seconds")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--no-build", action="store_true", help="use the kernels that are there")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options)
    options.end = time.monotonic() + options.seconds
    if not options.no_build:
        build()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
    isas = options.isas.split(",") if options.isas else available_isas()
    engines = {isa: f"isa {isa}" for isa in isas}
    for entry in options.llama:
        name, _, folder = entry.partition("=")
        engines[f"llama.cpp {name}"] = f"llama {Path(folder).resolve()}"
    records: list[dict[str, Any]] = []
    for model in options.models.split(","):
        for format in (options.formats or FORMATS[model]).split(","):
            if time.monotonic() < options.end:
                records += turns(engines, model, format, options)
            if options.json:
                options.json.write_text(json.dumps(records, indent=1))
    print(table(records))
    return None


if __name__ == "__main__":
    main()
