"""The verbs of `python -m benchmarks`: list, run, table, plot."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from benchmarks.processes import ROOT, Setting
from bifolio.cli import commands
from bifolio.errors import ConfigError

RUN_HELP = """Run rows on this machine, engines in turns, and print the table.

ROWS are suites, rows, patterns or any MODEL/WORKLOAD: `cpu`, `S-q4_0/decode1`, `S-*/decode1`, `my-model.gguf/decode16`
is a file in the folder of models. A column is an engine with settings: bifolio[kv_cache_dtype=q8_0],
bifolio[BIFOLIO_ISA=avx2], bifolio-http, llama.cpp, vllm, transformers, openvino."""
RUN_EPILOG = """Examples:

  python -m benchmarks run cpu --threads 2 --json found.json

  python -m benchmarks run 'S-q4_0/*' --engines bifolio,llama.cpp,llama.cpp[flash_attn=true]

  python -m benchmarks run gpu --peer-env peer-env.sh --models /dev/shm/models --json h200.json

  python -m benchmarks run gpu gpu-long gpu-exact --device cpu --tiny --engines bifolio"""
Device = Annotated[str, commands.option("--device", help="cpu or cuda; auto: cuda for rows of GPU suites.")]
Models = Annotated[Path, commands.option("--models", help="Folder for model files.")]
Threads = Annotated[int | None, commands.option("--threads", min=1, help="Threads of engines on a CPU.")]
Clock = Annotated[
    str, commands.option("--clock", help="wall, or cpu: processor time, for machines that other programs use.")
]
Tiny = Annotated[bool, commands.option("--tiny", help="Tiny models and loads: runs the code, measures nothing.")]


def register(app: commands.App) -> None:
    app.command("list", help="List the suites and their rows.")(list_rows)
    app.command("run", help=RUN_HELP, epilog=RUN_EPILOG)(run)
    app.command("table", help="Print the table of results.")(show_table)
    app.verbs["compare"] = PlainVerb(compare, "Run two checkouts of bifolio in turns and print ratios.", "")
    app.command("docs", help="Write docs/performance.md and the figures of README.md from benchmarks/results.")(docs)
    app.command("gpu", help="Rows of a GPU, by the options of `bifolio bench gpu`; use `run gpu` instead.")(gpu)
    app.command("plot", help="Draw results: the share of the limit, or the speed relative to bifolio.")(draw)


class PlainVerb(commands.Command):
    """A verb that reads its arguments by itself."""

    def run(self, program: str, arguments: Sequence[str]) -> None:
        self.function(arguments)


def compare(arguments: Sequence[str]) -> None:
    from benchmarks.compare import main

    raise commands.Exit(main(arguments))


def list_rows(
    suites: Annotated[list[str] | None, commands.argument(help="Suites; default: all.")] = None,
) -> None:
    from benchmarks.rows import SUITES

    for name in suites or SUITES:
        if name not in SUITES:
            raise ConfigError(f"there is no suite {name!r}: use one of {', '.join(SUITES)}")
        print(name)
        for row in SUITES[name]:
            print(f"  {row.name:32} {row.workload.title}, {row.workload.unit}; {row.columns}")


def run(
    rows: Annotated[list[str], commands.argument(help="Suites, rows or patterns.")],
    engines: Annotated[str, commands.option("--engines", help="Columns; default: those of each row.")] = "",
    rounds: Annotated[int, commands.option("--rounds", min=1, help="Turns of each engine.")] = 2,
    passes: Annotated[
        int | None, commands.option("--passes", min=1, help="Passes of a row in a turn; default: 1, on a GPU 2.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    clock: Clock = "wall",
    models: Models = Path("out/models"),
    peer_env: Annotated[
        Path | None, commands.option("--peer-env", help="Shell file that makes `import vllm` work.")
    ] = None,
    machine: Annotated[str, commands.option("--machine", help="Name of the machine in tables.")] = "",
    note: Annotated[str, commands.option("--note", help="A sentence about the conditions of the run.")] = "",
    tiny: Tiny = False,
    timeout: Annotated[float, commands.option("--timeout", help="Seconds that one figure may take.")] = 1800.0,
    limits: Annotated[bool, commands.option(help="Measure the limits of the machine.")] = True,
    json: Annotated[Path | None, commands.option("--json", help="File for the results.")] = None,
) -> None:
    from benchmarks.columns import parse_columns
    from benchmarks.limits import measure_limits
    from benchmarks.machine import describe, versions
    from benchmarks.models import ModelStore
    from benchmarks.rows import select
    from benchmarks.runner import Plan, Runner, failures, new_results
    from benchmarks.table import table
    from benchmarks.workloads import CLOCKS

    if clock not in CLOCKS:
        raise commands.BadParameter(f"--clock {clock}: use one of {', '.join(CLOCKS)}")
    chosen = select(rows)
    device = device_of(rows) if device == "auto" else device
    if device.startswith("cuda"):
        from bifolio.kernels.select import require_gpu

        require_gpu(device)
    is_gpu = device.startswith("cuda")
    setting = Setting(device, threads, clock, tiny, peer_env, timeout)
    plan = Plan(rounds, passes or (2 if is_gpu else 1), is_gpu, parse_columns(engines))
    about = describe(device, threads)
    results = new_results(machine or about.get("gpu", about["cpu"]), about, versions(ROOT), shlex.join(sys.argv[1:]))
    results.command = "python -m benchmarks " + results.command
    results.note, results.setting = note, {"clock": clock, "device": device, **({"tiny": True} if tiny else {})}
    measured = measure_limits(device, threads) if limits and not tiny else None
    results.limits = {} if measured is None else measured.as_dict()
    runner = Runner(results, setting, plan, ModelStore(models, tiny), measured)
    runner.run(chosen, lambda: None if json is None else results.write(json))
    if json is not None:
        results.write(json)
    print(table(results))
    missing = list(failures(results))
    for text in missing:
        print(f"missing: {text}", file=sys.stderr)
    raise commands.Exit(1 if missing or not results.rows else 0)


def device_of(names: list[str]) -> str:
    """cuda where a suite or model of GPUs is named."""
    from benchmarks.rows import SUITES, select

    gpu = {row.model for suite, rows in SUITES.items() if suite.startswith("gpu") for row in rows}
    return "cuda" if all(row.model in gpu for row in select(names)) else "cpu"


def show_table(
    files: Annotated[list[Path], commands.argument(help="JSON files of `run`.")],
    columns: Annotated[str, commands.option("--columns", help="Columns to show; default: all.")] = "",
) -> None:
    from benchmarks.columns import parse_columns
    from benchmarks.results import Results
    from benchmarks.table import heading, table

    for path in files:
        results = Results.read(path)
        print("\n".join(heading(results)), end="\n\n")
        print(table(results, [column.name for column in parse_columns(columns)]), end="\n\n")


def draw(
    files: Annotated[list[Path], commands.argument(help="JSON files of `run`.")],
    out: Annotated[Path, commands.option("--out", "-o", help="The .png, .svg or .pdf file to write.")],
) -> None:
    from benchmarks.plot import plot
    from benchmarks.results import Results
    from bifolio.measure.figures import check_target

    check_target(out)
    plot([Results.read(path) for path in files], out)
    print(f"picture: {os.fspath(out)}")


def docs(
    check: Annotated[bool, commands.option("--check", help="Write nothing; exit code 1 if a file differs.")] = False,
    pictures: Annotated[bool, commands.option("--pictures", help="Draw the pictures again, too.")] = False,
) -> None:
    from benchmarks.docs import outdated, write_pictures

    found = outdated()
    for path, text in found:
        print(f"{path.relative_to(ROOT)} {'differs from the results' if check else 'is written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    if pictures:
        write_pictures()
    raise commands.Exit(1 if check and found else 0)


OLD_ROWS = {"single": "single", "decode": "decode64", "crowd": "greedy256", "first_token": "prompt8k",
            "prompts": "prompts16", "common_prefix": "prefix64", "beams": "beams8"}  # fmt: skip


def gpu(
    shapes: Annotated[str, commands.option("--shapes", help="Shapes of models.")] = "llama-1b,qwen3-0.6b,llama-8b",
    rows: Annotated[str, commands.option("--rows", help="Rows by their old names; default: all.")] = ",".join(OLD_ROWS),
    only: Annotated[str, commands.option("--only", help="Parts: rows, start.")] = "rows,start",
    out: Annotated[Path | None, commands.option("--out", help="Folder for gpu.json.")] = None,
    models: Models = Path("out/models"),
    device: Annotated[str, commands.option("--device", help="cuda, or one of several: cuda:1.")] = "cuda",
    quick: Annotated[bool, commands.option("--quick", help="Tiny models and loads.")] = False,
    deterministic: Annotated[
        bool, commands.option("--deterministic", help="Output depends on the request alone.")
    ] = False,
    as_json: Annotated[bool, commands.option("--json", help="Has no effect: --out writes JSON.")] = False,
) -> None:
    workloads = [OLD_ROWS.get(name, name) for name in rows.split(",") if name] if "rows" in only else []
    workloads += ["start"] if "start" in only else []
    names = [f"{shape}/{workload}" for shape in shapes.split(",") for workload in workloads]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    run(
        names,
        engines="bifolio[deterministic=true]" if deterministic else "bifolio",
        device=device,
        models=models,
        tiny=quick,
        json=None if out is None else out / "gpu.json",
    )
