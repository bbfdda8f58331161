"""The GPU benchmark: correctness first, then every row with its limit. numpy, torch and triton are all it needs.

    python -m bifolio.measure.gpu --out results [--only checks,models,rows,tuning,start] [--shapes llama-1b] [--quick]

Sections are independent: one that fails is reported and the rest goes on. Results are written after each of them.
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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError
from bifolio.kernels.select import require_gpu

SECTIONS = ("checks", "models", "rows", "profile", "tuning", "start")
SHAPES = ("llama-1b", "qwen3-0.6b", "llama-8b")
PEER = {  # measured on the same kind of machine: vLLM 0.26
    "single": (2.35, 1.98, 4.93),
    "crowd": (21793, 22062, 9656),
    "first_token": (43.5, 34.9, 215),
    "prompts": (258307, 296173, 42393),
    "decode": (18959, 11768, 6509),
    "common_prefix": (13355, 8411, 5004),
    "beams": (5.09, 6.63, 7.09),
}


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


def run_checks(report: Report, options: argparse.Namespace) -> None:
    """Every check in one of several processes: they compile in parallel, and a crash takes only its own share along."""
    found = run_workers(report, [f"checks:{dtype}:{i}/4" for dtype in ("bf16", "f32") for i in range(4)], options)
    for dtype in ("bf16", "f32"):
        entries = [entry for entry in found if entry.get("dtype") == dtype]
        wrong = [entry for entry in entries if not entry["ok"]]
        for entry in wrong:
            report.say(f"  WRONG {entry['check']}: {entry['error']} (allowed {entry['tolerance']}) {entry['reason']}")
            report.add("wrong", entry)
        right = [entry for entry in entries if entry["ok"]]
        worst = max(((entry["error"], entry["check"]) for entry in right), default=(0.0, ""))
        report.say(f"kernels {dtype}: {len(right)} right, {len(wrong)} wrong; worst of the right {worst}")
        report.add("checks", {"dtype": dtype, "passed": len(right), "failed": len(wrong), "worst": worst})


def check_share(dtype: str, index: int, count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One process's part of the kernel checks."""
    from bifolio.kernels.triton import TritonKernels
    from bifolio.measure.kernel_checks import all_checks

    kernels = TritonKernels(options.device, dtype)
    found = []
    for number, check in enumerate(all_checks(kernels, large=not options.quick, seed=index)):
        if number % count != index:
            continue
        error, reason = float("inf"), ""
        try:
            error = check.error()
        except Exception as problem:
            reason = f"{type(problem).__name__}: {str(problem)[-500:]}"
        ok = error < check.tolerance
        entry = {"dtype": dtype, "check": check.name, "error": error, "tolerance": check.tolerance, "ok": ok}
        found.append({**entry, "reason": reason})
    return found


def run_workers(report: Report, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Other processes of this program, all at once; the lists they found, joined."""
    passed_on = ["--device", options.device]
    passed_on += ["--quick"] * options.quick + ["--deterministic"] * options.deterministic
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "bifolio.measure.gpu", "--worker", name, *passed_on],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in names
    ]  # fmt: skip
    found: list[dict[str, Any]] = []
    for name, process in zip(names, running, strict=True):
        output, problems = process.communicate()
        try:
            found += json.loads(output.strip().splitlines()[-1])
        except (IndexError, ValueError):
            report.say(f"FAILED worker {name}: {problems[-600:]}")
            report.add("errors", {"part": name, "error": problems[-4000:] or "no output"})
    return found


def run_worker(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a process that was started by another does; its last line of output is the result."""
    kind, subject, *rest = name.split(":")
    if kind == "checks":
        index, count = (int(number) for number in rest[0].split("/"))
        return check_share(subject, index, count, options)
    if kind == "rows":
        return warm_shape(subject, options)
    from bifolio.measure.gpu_tuning import compile_all

    compile_all(subject, int(rest[0]))
    return []


def warm_shape(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile what the rows of a shape need, with two of its layers, so that the kernels are on disk for the rest."""
    from bifolio.kernels.triton import TritonKernels
    from bifolio.measure.gpu_limits import Limits
    from bifolio.measure.gpu_models import new_engine, random_weights
    from bifolio.measure.gpu_rows import Rows

    kernels = TritonKernels(options.device, "bf16", deterministic=options.deterministic)
    model = random_weights(shape, options.device, num_layers=2)
    engine = new_engine(model, kernels, num_blocks=1200)
    start = time.perf_counter()
    Rows(engine, Limits("", 1.0, 1.0, 1.0)).warm_up()
    return [{"warm": shape, "seconds": time.perf_counter() - start}]


def prepare(report: Report, options: argparse.Namespace) -> None:
    """Compile everything that is timed later, in as many processes as there are parts."""
    names = [f"rows:{shape}" for shape in options.shapes] if "rows" in options.only else []
    if "tuning" in options.only:
        names += [f"tuning:{shape}:{rows}" for shape in options.shapes for rows in (1, 32, 64)]
    if names:
        found = run_workers(report, names, options)
        report.say(f"compiled: {found}")


def run_models(report: Report, options: argparse.Namespace) -> None:
    from bifolio.measure.gpu_models_check import check_model

    for shape in options.shapes:
        for dtype in ("f32", "bf16"):
            layers = 4 if options.quick else None
            found = report.attempt(f"model {shape} {dtype}", partial(check_model, shape, dtype, num_layers=layers))
            if found is not None:
                verdict = "right" if found.passed else "WRONG"
                report.say(
                    f"{shape} {dtype} against transformers: {verdict}; logits {found.prefill_error:.1e}, in chunks "
                    f"{found.chunked_error:.1e}; against its f32 {found.exact_error:.1e} (its own in {dtype}: "
                    f"{found.peer_error:.1e}); {found.equal_tokens} of {found.num_tokens} greedy tokens"
                )
                report.add("models", {**asdict(found), "passed": found.passed})
            _forget()


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
    from bifolio.kernels.triton import TritonKernels
    from bifolio.measure.gpu_models import new_engine, random_weights
    from bifolio.measure.gpu_rows import Rows

    start = time.perf_counter()
    kernels = TritonKernels(options.device, "bf16", deterministic=options.deterministic)
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
        report.say(f"{shape} {_line(name, shape, figure.as_dict())}")
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


def run_tuning(report: Report, options: argparse.Namespace) -> None:
    from bifolio.measure import gpu_tuning

    for shape in options.shapes:
        for rows in (1, 64, 32):
            for entry in (
                report.attempt(f"tuning {shape} {rows}", partial(_listed, gpu_tuning.tune_products, shape, rows)) or []
            ):
                report.add("tuning", entry)
                report.say(_tuning_line(entry))
        for sequences, length in ((64, 2048), (1, 384), (200, 900)):
            for entry in (
                report.attempt(
                    f"tuning attention {shape}",
                    partial(_listed, gpu_tuning.tune_decode, shape, sequences, length),
                )
                or []
            ):
                report.add("tuning", entry)
                report.say(_tuning_line(entry))
        _forget()
    for heads, dim, sequences, length in ((32, 128, 1, 8192), (32, 64, 1, 8192), (32, 128, 16, 560), (32, 64, 4, 2048)):
        entry = report.attempt("tuning prefill", partial(gpu_tuning.tune_prefill, heads, 8, dim, sequences, length))
        if entry is not None:
            report.add("tuning", entry)
            report.say(f"prefill {entry}")


def _listed(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return list(function(*arguments))


def _tuning_line(entry: dict[str, Any]) -> str:
    known = {"shape", "product", "rows", "bytes", "sequences", "length", "block_size"}
    head = " ".join(
        str(entry[key]) for key in ("shape", "product", "rows", "sequences", "length", "block_size") if key in entry
    )
    times = {key: value for key, value in entry.items() if key not in known}
    ordered = sorted(times.items(), key=lambda item: item[1] if item[1] == item[1] else 1e9)
    rate = entry["bytes"] / ordered[0][1] / 1e6 if ordered else 0.0
    return (
        f"{head}: {rate:.2f} TB/s; "
        + "; ".join(f"{key} {value:.1f}" for key, value in ordered[:5])
        + (f"; library {times['library']:.1f}" if "library" in times else "")
    )


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
    from bifolio.kernels.triton import TritonKernels
    from bifolio.measure.gpu_models import new_engine, random_weights
    from bifolio.measure.gpu_rows import greedy

    imported = time.perf_counter() - start
    engine = new_engine(random_weights(shape, device), TritonKernels(device, "bf16"))
    ready = time.perf_counter() - start
    request = engine.add_request("first", list(range(100, 228)), greedy(8))
    while not request.sequences[0].output_token_ids:
        engine.step()
    first = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    done = time.perf_counter() - start
    print(f"imported {imported:.1f}, ready {ready:.1f}, first token {first:.1f}, eight tokens {done:.1f}")


def _line(name: str, shape: str, figure: dict[str, Any]) -> str:
    peer = PEER.get(name, (None,) * 3)[SHAPES.index(shape)] if shape in SHAPES else None
    fraction = f"{figure['fraction']:.0%} of the limit" if figure.get("fraction") else ""
    versus = ""
    if peer:
        factor = peer / figure["value"] if figure["smaller_is_better"] else figure["value"] / peer
        versus = f", {factor:.2f}x vLLM's {peer}"
    return f"{figure['row']}: {figure['value']:.5g} {figure['unit']} ({fraction}{versus}) {figure['note']}"


def _forget() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_table(report: Report) -> None:
    print("\n== summary ==")
    for entry in report.found.get("checks", []):
        print(f"kernels {entry['dtype']}: {entry['passed']} right, {entry['failed']} wrong, worst {entry['worst']}")
    for entry in report.found.get("models", []):
        print(
            f"{entry['shape']} {entry['dtype']}: {'right' if entry['passed'] else 'WRONG'} "
            f"{entry['prefill_error']:.1e} {entry['chunked_error']:.1e} {entry['equal_tokens']}/{entry['num_tokens']}"
        )
    for entry in report.found.get("rows", []):
        print(f"{entry['shape']:11s} {_line(entry['name'], entry['shape'], entry)}")
    for entry in report.found.get("start", []):
        print(f"{entry['shape']:11s} start {entry['kind']}: {entry['seconds']:.1f} s ({entry['detail']})")
    for entry in report.found["errors"]:
        print(f"ERROR in {entry['part']}: {entry['error'].strip().splitlines()[-1][:300]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for gpu.json")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="", help="rows, separated by commas; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="smaller loads and four layers in the model checks")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.only, options.shapes = options.only.split(","), options.shapes.split(",")
    options.rows = [row for row in options.rows.split(",") if row]
    if options.worker:
        print(json.dumps(run_worker(options.worker, options)))
        return 0
    try:
        if options.device.startswith("cuda"):
            require_gpu(options.device)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = Report(options.out)
    runs = {"checks": run_checks, "rows": run_rows, "models": run_models, "tuning": run_tuning, "start": run_start}
    report.attempt("prepare", partial(prepare, report, options))
    for name, run in runs.items():
        if name in options.only:
            report.attempt(name, partial(run, report, options))
    print_table(report)
    failed = bool(report.found["errors"]) or any(entry["failed"] for entry in report.found.get("checks", []))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
