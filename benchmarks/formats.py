"""Formats of one model side by side: size, memory, speed and perplexity, each from a file that is written for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bifolio.engine.memory import weight_bytes
from bifolio.measure.figures import new_figure, plain_axes
from bifolio.measure.perplexity import WINDOW, text_perplexity
from bifolio.measure.throughput import Test, bench_llm, run_tests
from bifolio.model.gguf.mixes import parse_mix
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model


@dataclass(frozen=True, slots=True)
class FormatRow:
    """The figures of one format."""

    format: str
    file_bytes: int
    held_bytes: int  # of the weights, as the kernels hold them
    prefill: float  # tokens per second
    decode: float
    perplexity: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_formats(
    model: LoadedModel,
    names: Sequence[str],
    folder: Path,
    *,
    text: str | None = None,
    num_prompt: int = 256,
    num_generated: int = 32,
    max_tokens: int = 2048,
    repetitions: int = 3,
    on_format: Callable[[str], None] | None = None,
    **options: Any,
) -> list[FormatRow]:
    """Write, open and measure each format in turn; the best of the repetitions counts."""
    tests = [Test(num_prompt=num_prompt), Test(num_generated=num_generated)]
    rows = []
    for name in names:
        if on_format is not None:
            on_format(name)
        path = folder / f"{name}.gguf"
        write_gguf(path, model, parse_mix(name), overwrite=True)
        opened = load_model(path)
        llm = bench_llm(opened, tests, **options)
        speeds = [max(row.speeds) for row in run_tests(llm.engine, tests, repetitions)]
        held = weight_bytes(opened.weights, llm.engine.runner.kernels.formats)
        del llm
        found = None if text is None else _perplexity(opened, text, max_tokens, options)
        rows.append(FormatRow(name, path.stat().st_size, held, speeds[0], speeds[1], found))
        path.unlink()
    return rows


def _perplexity(model: LoadedModel, text: str, max_tokens: int, options: dict[str, Any]) -> float:
    length = min(WINDOW, model.config.max_position)
    llm = bench_llm(model, [Test(num_prompt=length)], **options)
    return text_perplexity(llm, text, window=length, max_tokens=max_tokens).value


def plot_formats(rows: Sequence[FormatRow], path: Path) -> None:
    """Speed over size and, where there is one, perplexity over size."""
    scored = all(row.perplexity is not None for row in rows)
    figure = new_figure(11 if scored else 6, 4)
    panels = figure.subplots(1, 2 if scored else 1, squeeze=False)[0]
    _over_size(panels[0], rows, [row.decode for row in rows], "tokens per second, one sequence")
    if scored:
        _over_size(panels[1], rows, [row.perplexity for row in rows], "perplexity")
    figure.savefig(path, dpi=120)


def _over_size(axes: Any, rows: Sequence[FormatRow], values: Sequence[float | None], title: str) -> None:
    sizes = [row.held_bytes / 1e6 for row in rows]
    axes.scatter(sizes, values, s=25)
    for row, size, value in zip(rows, sizes, values, strict=True):
        axes.annotate(row.format, (size, value), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set(title=title, xlabel="weights in memory (MB)")
    plain_axes(axes)
