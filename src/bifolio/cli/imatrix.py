"""`bifolio imatrix`: which columns of the matrices matter most, for `bifolio quantize --imatrix`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from bifolio.cli import commands, measure_options, options
from bifolio.config import NUMERICS

HELP = """Run a model over a text and write an importance matrix.

For every column of every matrix the file holds the mean square of the numbers that it is multiplied by. `bifolio
quantize --imatrix` and llama.cpp's quantize spend their precision where these are large."""
EPILOG = """Examples:

  bifolio imatrix ./SmolLM2-135M wiki.txt smol.imatrix.gguf

  bifolio quantize ./SmolLM2-135M smol.gguf --format q4_k_m --imatrix smol.imatrix.gguf"""


def register(app: commands.App) -> None:
    app.command("imatrix", help=HELP, epilog=EPILOG)(imatrix)


def imatrix(
    model: Annotated[str, commands.argument(help="The model to run, best in 16 bits or more.")],
    text: Annotated[
        Path, commands.argument(help="A text file, plain or .xz, like the texts the model will be used for.")
    ],
    target: Annotated[Path, commands.argument(help="The file to write: NAME.gguf.")],
    window: Annotated[int, commands.option("--window", help="Tokens that the model reads at a time.", min=2)] = 512,
    windows: Annotated[
        int | None, commands.option("--windows", help="The most windows of the text to read.", min=1)
    ] = None,
    force: Annotated[bool, commands.option("--force", help="Replace the target if it exists.")] = False,
    threads: options.Threads = NUMERICS.threads,
    as_json: measure_options.AsJson = False,
) -> None:
    from bifolio.cli.progress import steps_bar
    from bifolio.kernels.select import select_kernels
    from bifolio.measure.importance import column_sums
    from bifolio.model.file_access import check_target
    from bifolio.model.gguf.imatrix import write_importance
    from bifolio.model.loader import load_model
    from bifolio.text.utf8 import read_text

    check_target(target, overwrite=force)
    content = read_text(text)
    loaded = load_model(model)
    kernels = select_kernels("cpu", threads=threads)
    with steps_bar("measuring") as progress:
        columns, count = column_sums(loaded, kernels, content, window=window, max_windows=windows, progress=progress)
    write_importance(
        target, columns.sums, columns.counts, dataset=text.name, chunks=count, chunk_size=window, overwrite=force
    )
    if as_json:
        commands.echo(
            json.dumps({"file": str(target), "matrices": len(columns.sums), "windows": count, "tokens": window})
        )
    else:
        commands.echo(f"wrote {target}: {len(columns.sums)} matrices, {count} windows of {window} tokens")
