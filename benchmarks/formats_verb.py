"""`python -m benchmarks formats`: which format suits a model on this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

from bifolio.cli import commands, measure_options, options
from bifolio.config import NUMERICS

HELP = """Compare formats of one model: size, memory, speed, and perplexity on a text.

Each format is written to a temporary file, opened and measured in turn."""
EPILOG = """Examples:

  python -m benchmarks formats -m ./SmolLM2-135M --formats q4_k_m,q6_k,q8_0 --text wiki.txt --plot formats.png

  python -m benchmarks formats -m stories --formats q8_0,q6_k --json"""
DEFAULT = "q4_k_m,q5_k_m,q6_k,q8_0,f16"


def register(app: commands.App) -> None:
    app.command("formats", help=HELP, epilog=EPILOG)(formats)


def formats(
    model: options.Model = None,
    names: Annotated[str, commands.option("--formats", help="Formats as `bifolio quantize` names them.")] = DEFAULT,
    text: Annotated[Path | None, commands.option("--text", help="A text file to score, plain or .xz.")] = None,
    prompt: Annotated[int, commands.option("--prompt", "-p", min=1, help="Prompt tokens to process.")] = 256,
    generate: Annotated[int, commands.option("--generate", "-n", min=1, help="Tokens to generate.")] = 32,
    tokens: Annotated[int, commands.option("--tokens", min=2, help="The most tokens of the text to score.")] = 2048,
    repetitions: measure_options.Repetitions = 3,
    threads: options.Threads = NUMERICS.threads,
    plot: measure_options.Plot = None,
    as_json: measure_options.AsJson = False,
) -> None:
    from benchmarks.formats import bench_formats, plot_formats
    from bifolio.measure.figures import check_target
    from bifolio.model.gguf.mixes import parse_mix
    from bifolio.model.loader import load_model
    from bifolio.model.registry import DEFAULT_MODEL
    from bifolio.text.utf8 import read_text

    wanted = [parse_mix(name).name for name in names.split(",") if name.strip()]
    check_target(plot)
    content = None if text is None else read_text(text, "--text")
    with tempfile.TemporaryDirectory() as folder:
        rows = bench_formats(
            load_model(model or DEFAULT_MODEL),
            wanted,
            Path(folder),
            text=content,
            num_prompt=prompt,
            num_generated=generate,
            max_tokens=tokens,
            repetitions=repetitions,
            threads=threads,
            on_format=lambda name: commands.echo(f"measuring {name}", err=True),
        )
    if plot is not None:
        plot_formats(rows, plot)
    if as_json:
        commands.echo(json.dumps({"formats": [row.as_dict() for row in rows]}))
    else:
        show([row.as_dict() for row in rows])


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from bifolio.engine.memory import show_bytes

    table = Table("format", "file", "in memory", "prompt tok/s", "one sequence tok/s", "perplexity", box=None)
    for row in rows:
        scored = "" if row["perplexity"] is None else f"{row['perplexity']:.3f}"
        table.add_row(
            row["format"], show_bytes(row["file_bytes"]), show_bytes(row["held_bytes"]), f"{row['prefill']:.1f}",
            f"{row['decode']:.1f}", scored,
        )  # fmt: skip
    Console(width=100).print(table)
