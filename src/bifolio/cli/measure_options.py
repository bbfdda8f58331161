"""Options that the measuring verbs share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from bifolio.cli import commands, options

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


@dataclass(frozen=True)
class Measured(options.Numerics):
    """The engine that is measured: its numbers and its kernels."""

    HEADING: ClassVar[str] = "engine"

    kernels: Kernels = None


@dataclass(frozen=True)
class SizedEngine(Measured):
    """A measured engine whose sizes follow from the device unless they are given."""

    chunk_size: options.AnyChunkSize = None
    block_size: options.AnyBlockSize = None
