"""The GPU benchmark: every row with its limit, profiles and starts. It needs numpy, torch and triton.

    python -m bifolio.measure.gpu --out results [--only rows,profile,start] [--shapes llama-1b] [--quick]

Sections are independent: one that fails is reported and the rest goes on. Results are written after each of them.
Correctness is tested in tests/gpu; benchmarks/gpu_tuning.py times the settings of single kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError
from bifolio.kernels.select import require_gpu, select_kernels

SECTIONS = ("rows", "profile", "start")
SHAPES = ("llama-1b", "qwen3-0.6b", "llama-8b")


class Report:
    """The results, written to a file with every new entry."""

    def __init__(self, folder: Path | None) -> None:
        self.found: dict[str, Any] = {"errors": []}
        self._folder = folder
        self._start = time.perf_counter()

    def add(self, section: str, entry: Any) -> None:
        self.found.setdefault(section, []).append(entry)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "gpu.json").write_text(json.dumps(self.found, indent=1, default=str))

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", flush=True)

    def attempt(self, name: str, function: Callable[[], Any]) -> Any:
        """Run one part; a failure is recorded and the benchmark continues."""
        try:
            return function()
        except Exception as error:
            self.say(f"FAILED {name}: {type(error).__name__}: {str(error)[:600]}")
            self.add("errors", {"part": name, "error": traceback.format_exc()[-4000:]})
            return None


def prepare(report: Report, options: argparse.Namespace) -> None:
    """Compile the kernels that are timed later, one process for each shape."""
    if "rows" not in options.only:
        return
    passed_on = ["--device", options.device, *["--deterministic"] * options.deterministic]
    running = {
        shape: subprocess.Popen(
            [sys.executable, "-m", "bifolio.measure.gpu", "--warm", shape, *passed_on],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for shape in options.shapes
    }  # fmt: skip
    for shape, process in running.items():
        output, problems = process.communicate()
        if process.returncode == 0:
            report.say(f"{shape}: kernels compiled in {output.strip().splitlines()[-1]} s")
        else:
            report.say(f"FAILED compilation for {shape}: {problems[-600:]}")
            report.add("errors", {"part": f"compilation for {shape}", "error": problems[-4000:] or "no output"})


def warm_shape(shape: str, options: argparse.Namespace) -> float:
    """Compile the kernels of a shape's rows with two of its layers, into Triton's cache on disk; return the seconds."""
    from bifolio.measure.gpu_limits import Limits
    from bifolio.measure.gpu_models import new_engine, random_weights
    from bifolio.measure.gpu_rows import Rows

    kernels = select_kernels(options.device, name="triton", deterministic=options.deterministic)
    model = random_weights(shape, options.device, num_layers=2)
    engine = new_engine(model, kernels, num_blocks=1200)
    start = time.perf_counter()
    Rows(engine, Limits("", 1.0, 1.0, 1.0)).warm_up()
    return time.perf_counter() - start


def run_rows(report: Report, options: argparse.Namespace) -> None:
    from bifolio.measure.gpu_limits import measure_limits

    limits = measure_limits(options.device)
    report.say(
        f"{limits.name}: reads {limits.bytes_per_second / 1e12:.2f} TB/s, "
        f"{limits.operations_per_second / 1e12:.0f} TFLOP/s, a kernel in a graph {limits.kernel_seconds * 1e6:.2f} us"
    )
    report.add("limits", limits.as_dict())
    for shape in options.shapes:
        report.attempt(f"rows {shape}", partial(_measure_shape, report, options, shape, limits))
        _forget()


def _measure_shape(report: Report, options: argparse.Namespace, shape: str, limits: Any) -> None:
    from bifolio.measure.gpu_models import new_engine, random_weights
    from bifolio.measure.gpu_rows import Rows

    start = time.perf_counter()
    kernels = select_kernels(options.device, name="triton", deterministic=options.deterministic)
    engine = new_engine(random_weights(shape, options.device), kernels, deterministic=options.deterministic)
    rows = Rows(engine, limits, 0.25 if options.quick else 1.0)
    made = time.perf_counter() - start
    rows.warm_up()
    report.say(f"{shape}: engine made in {made:.1f} s, warm in {time.perf_counter() - start:.1f} s")
    for name, measure in rows.all().items():
        if options.rows and name not in options.rows:
            continue
        figure = report.attempt(f"{shape} {name}", measure)
        if figure is None:
            engine.abort_all()
            report.attempt("recovery", rows.drain)
            continue
        report.add("rows", {"shape": shape, "name": name, "deterministic": options.deterministic, **figure.as_dict()})
        report.say(f"{shape} {_line(figure.as_dict())}")
    if "profile" in options.only:
        report.attempt(f"profile {shape}", partial(_profile, report, shape, engine, rows))


def _profile(report: Report, shape: str, engine: Any, rows: Any) -> None:
    """Time per kernel of decode steps in CUDA graphs."""
    from bifolio.measure.gpu_profile import profile_steps
    from bifolio.measure.gpu_rows import greedy

    for sequences, length in ((1, 300), (64, 2048), (200, 800)):
        for _ in range(sequences):
            rows.add(rows.prompt(length), greedy(60))
        found = profile_steps(engine, sequences)
        report.add("profile", {"shape": shape, "sequences": sequences, "length": length, **found})
        kernels = ", ".join(f"{name} {time_us:.0f}x{count}" for name, time_us, count in found["kernels"][:9])
        report.say(
            f"{shape} {sequences} at {length}: {found['step_us']:.0f} us/step, device {found['busy_us']:.0f}: {kernels}"
        )
        engine.abort_all()
        rows.drain()


def run_start(report: Report, options: argparse.Namespace) -> None:
    """Import to first token in a fresh process, with cold and then with warm caches."""
    import tempfile

    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "second"):
                code = f"from bifolio.measure.gpu import first_token; first_token({shape!r}, {options.device!r})"
                environment = {**os.environ, "TRITON_CACHE_DIR": folder}
                start = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
                )
                seconds = time.perf_counter() - start
                detail = (
                    done.stdout.strip().splitlines()[-1]
                    if done.returncode == 0 and done.stdout.strip()
                    else done.stderr[-800:]
                )
                report.say(f"{shape} start, {kind} caches: {seconds:.1f} s ({detail})")
                report.add("start", {"shape": shape, "kind": kind, "seconds": seconds, "detail": detail})


def first_token(shape: str, device: str) -> None:
    """Create an engine, generate a few tokens and print the elapsed times."""
    start = time.perf_counter()
    from bifolio.measure.gpu_models import new_engine, random_weights
    from bifolio.measure.gpu_rows import greedy

    kernels = select_kernels(device, name="triton")
    imported = time.perf_counter() - start
    engine = new_engine(random_weights(shape, device), kernels)
    ready = time.perf_counter() - start
    request = engine.add_request("first", list(range(100, 228)), greedy(8))
    while not request.sequences[0].output_token_ids:
        engine.step()
    first = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    done = time.perf_counter() - start
    print(f"imported {imported:.1f}, ready {ready:.1f}, first token {first:.1f}, eight tokens {done:.1f}")


def _line(figure: dict[str, Any]) -> str:
    fraction = f" ({figure['fraction']:.0%} of the limit)" if figure.get("fraction") else ""
    return f"{figure['row']}: {figure['value']:.5g} {figure['unit']}{fraction} {figure['note']}"


def _forget() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_table(report: Report) -> None:
    print("\n== summary ==")
    for entry in report.found.get("rows", []):
        print(f"{entry['shape']:11s} {_line(entry)}")
    for entry in report.found.get("start", []):
        print(f"{entry['shape']:11s} start {entry['kind']}: {entry['seconds']:.1f} s ({entry['detail']})")
    for entry in report.found["errors"]:
        print(f"ERROR in {entry['part']}: {entry['error'].strip().splitlines()[-1][:300]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for gpu.json")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections: rows, profile (with rows), start")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="", help="rows, separated by commas; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="smaller loads")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--warm", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.only, options.shapes = options.only.split(","), options.shapes.split(",")
    options.rows = [row for row in options.rows.split(",") if row]
    unknown = [section for section in options.only if section not in SECTIONS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: the sections are {', '.join(SECTIONS)}; profile needs rows")
    if options.warm:
        print(f"{warm_shape(options.warm, options):.1f}")
        return 0
    try:
        if options.device.startswith("cuda"):
            require_gpu(options.device)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = Report(options.out)
    runs = {"rows": run_rows, "start": run_start}
    report.attempt("prepare", partial(prepare, report, options))
    for name, run in runs.items():
        if name in options.only:
            report.attempt(name, partial(run, report, options))
    print_table(report)
    return int(bool(report.found["errors"]))


if __name__ == "__main__":
    sys.exit(main())
