"""`python -m benchmarks targets`: target figures, and whether this machine reaches them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bifolio.cli import commands, measure_options, options
from bifolio.config import NUMERICS

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.targets import TargetRow

HELP = """Compare this machine with the target figures for a small model in 4 bits.

Speed of one sequence, memory of the whole process, sequences at once and use of the cache. Without a model, a file with
random weights of a shape is made and measured."""
EPILOG = """Examples:

  bifolio quantize SmolLM2-135M-Instruct.gguf smollm2.q4_0.gguf --format q4_0

  python -m benchmarks targets -m smollm2.q4_0.gguf --threads 2"""


def register(app: commands.App) -> None:
    app.command("targets", help=HELP, epilog=EPILOG)(targets)


def targets(
    model: options.Model = None,
    shape: measure_options.Shape = None,
    format: measure_options.Format = "q4_0",
    generate: Annotated[
        int, commands.option("--generate", "-n", min=1, help="Tokens that one sequence generates.")
    ] = 128,
    requests: Annotated[int, commands.option("--requests", min=16, help="Requests of the concurrent load.")] = 32,
    repetitions: measure_options.Repetitions = 5,
    block_size: options.BlockSize = 16,
    kv_dtype: options.KvDtype = "f16",
    kernels: measure_options.Kernels = None,
    activations: options.Activations = NUMERICS.activations,
    threads: options.Threads = 2,
    as_json: measure_options.AsJson = False,
) -> None:
    if model is not None and shape is not None:
        raise commands.BadParameter("pass --model or --shape, not both: a shape is a model made of random weights")
    engine_options = {
        "block_size": block_size,
        "kv_cache_dtype": kv_dtype,
        "activations": activations,
        "kernels": kernels,
        "threads": threads,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = model or str(make_file(shape or "S", format, Path(folder)))
        measure(path, generate, requests, repetitions, engine_options, as_json)


def measure(
    path: str, generate: int, requests: int, repetitions: int, engine_options: dict[str, Any], as_json: bool
) -> None:
    from benchmarks.targets import measure_targets, targets_llm
    from bifolio.cli.bench_output import describe, progress, show, title
    from bifolio.model.loader import load_model

    llm = targets_llm(load_model(path), **engine_options)
    with progress(as_json) as note:
        rows = measure_targets(llm, num_generated=generate, repetitions=repetitions, num_requests=requests, note=note)
    setting = describe(llm, engine_options["threads"])
    if as_json:
        commands.echo(json.dumps({**setting, "rows": [row.as_dict() for row in rows]}))
        return
    show(targets_table(f"{title(setting)}, {setting['kv_dtype']} cache", rows))


def make_file(shape: str, format: str, folder: Path) -> Path:
    """Random weights in a file, written by another process: making them takes memory that is not to be measured."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    path = folder / f"random-{shape}-{format}.gguf"
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(write_random, shape, format, path).result()
    return path


def write_random(shape: str, format: str, path: Path) -> None:
    from bifolio.measure.random_models import random_model
    from bifolio.model.gguf.writer import write_gguf
    from bifolio.quant.formats import QuantFormat

    write_gguf(path, random_model(shape, format), QuantFormat.parse(format))


def targets_table(title: str, rows: Sequence[TargetRow]) -> Table:
    from bifolio.measure.tables import new_table

    table = new_table(title, "", "value", "target", "met")
    words = {True: "yes", False: "no", None: ""}
    for row in rows:
        table.add_row(row.name, row.shown, row.shown_target, words[row.met])
    return table
