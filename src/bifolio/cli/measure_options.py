"""Options that the measuring verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bifolio.cli import commands

Shape = Annotated[
    str | None,
    commands.option("--shape", help="Random weights instead of a model: tiny, S (SmolLM2-135M) or M (Llama-3.2-1B)."),
]
Format = Annotated[
    str, commands.option("--format", help="Format of random weights: f32, f16, bf16, q8_0, q4_0 or q4_1.")
]
Kernels = Annotated[str | None, commands.option("--kernels", help="Force a kernel set: native, reference, torch, ...")]
Plot = Annotated[Path | None, commands.option("--plot", help="Write a picture to this .png, .svg or .pdf file.")]
AsJson = Annotated[bool, commands.option("--json", help="Print one JSON object instead of tables.")]
Repetitions = Annotated[
    int, commands.option("--repetitions", "-r", min=1, help="Number of measurements of each figure.")
]
