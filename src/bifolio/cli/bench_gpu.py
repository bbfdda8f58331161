"""`bifolio bench gpu`: correctness first, then every row with its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register_gpu(app: typer.Typer) -> None:
    @app.command("gpu")
    def gpu(
        out: Annotated[Path | None, typer.Option("--out", help="Folder for gpu.json.")] = None,
        only: Annotated[str, typer.Option("--only", help="Parts: checks, rows, profile, models, tuning, start.")] = (
            "checks,models,rows,start"
        ),
        shapes: Annotated[str, typer.Option("--shapes", help="Shapes of models.")] = "llama-1b,qwen3-0.6b,llama-8b",
        rows: Annotated[str, typer.Option("--rows", help="Rows to measure; default: all.")] = "",
        device: Annotated[str, typer.Option("--device", help="cuda, or one of several: cuda:1.")] = "cuda",
        quick: Annotated[bool, typer.Option("--quick", help="Smaller loads.")] = False,
        deterministic: Annotated[bool, typer.Option("--deterministic", help="Bit for bit, at a price.")] = False,
    ) -> None:
        """Check the GPU kernels, then measure them with random weights: value, limit, and fraction reached."""
        from bifolio.measure.gpu import main

        arguments = ["--only", only, "--shapes", shapes, "--rows", rows, "--device", device]
        arguments += ["--out", str(out)] if out is not None else []
        arguments += ["--quick"] * quick + ["--deterministic"] * deterministic
        raise typer.Exit(main(arguments))
