"""`bifolio bench gpu`: correctness first, then every row with its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bifolio.cli import commands


def register_gpu(app: commands.App) -> None:
    @app.command("gpu")
    def gpu(
        out: Annotated[Path | None, commands.option("--out", help="Folder for gpu.json.")] = None,
        only: Annotated[str, commands.option("--only", help="Parts: checks, rows, profile, models, tuning, start.")] = (
            "checks,models,rows,start"
        ),
        shapes: Annotated[str, commands.option("--shapes", help="Shapes of models.")] = "llama-1b,qwen3-0.6b,llama-8b",
        rows: Annotated[str, commands.option("--rows", help="Rows to measure; default: all.")] = "",
        device: Annotated[str, commands.option("--device", help="cuda, or one of several: cuda:1.")] = "cuda",
        quick: Annotated[bool, commands.option("--quick", help="Smaller loads.")] = False,
        deterministic: Annotated[
            bool,
            commands.option("--deterministic", help="Output that depends on the request alone, bit for bit; slower."),
        ] = False,
    ) -> None:
        """Check the GPU kernels, then measure them with random weights: value, limit, and fraction reached."""
        from bifolio.measure.gpu import main

        arguments = ["--only", only, "--shapes", shapes, "--rows", rows, "--device", device]
        arguments += ["--out", str(out)] if out is not None else []
        arguments += ["--quick"] * quick + ["--deterministic"] * deterministic
        raise commands.Exit(main(arguments))
