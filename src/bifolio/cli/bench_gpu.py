"""`bifolio bench gpu`: every row with its limit."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from bifolio.cli import commands, measure_options


def register_gpu(app: commands.App) -> None:
    @app.command("gpu")
    def gpu(
        out: Annotated[Path | None, commands.option("--out", help="Folder for gpu.json.")] = None,
        only: Annotated[str, commands.option("--only", help="Parts: rows, profile (with rows), start.")] = "rows,start",
        shapes: Annotated[str, commands.option("--shapes", help="Shapes of models.")] = "llama-1b,qwen3-0.6b,llama-8b",
        rows: Annotated[str, commands.option("--rows", help="Rows to measure; default: all.")] = "",
        device: Annotated[str, commands.option("--device", help="cuda, or one of several: cuda:1.")] = "cuda",
        quick: Annotated[bool, commands.option("--quick", help="Smaller loads.")] = False,
        deterministic: Annotated[
            bool,
            commands.option("--deterministic", help="Output that depends on the request alone, bit for bit; slower."),
        ] = False,
        as_json: measure_options.AsJson = False,
    ) -> None:
        """Measure the GPU kernels in models of random weights: value, limit, and fraction reached."""
        from bifolio.measure.gpu import main

        arguments = ["--only", only, "--shapes", shapes, "--rows", rows, "--device", device]
        arguments += ["--quick"] * quick + ["--deterministic"] * deterministic
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) if out is None and as_json else out
            arguments += ["--out", str(target)] if target is not None else []
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                code = main(arguments)
            if as_json and target is not None and (target / "gpu.json").is_file():
                commands.echo((target / "gpu.json").read_text(encoding="utf-8"))
        raise commands.Exit(code)
