"""Output that the measuring verbs share: the setting of a measurement, its progress, its table and its plot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bifolio.cli import commands

if TYPE_CHECKING:
    from bifolio.api.llm import LLM


def describe(llm: LLM, threads: int | None) -> dict[str, Any]:
    """The model, kernels and cache of a measurement, as JSON fields."""
    from bifolio.engine.memory import default_threads, weight_bytes
    from bifolio.measure.random_models import stored_format

    config, cache = llm.model.config, llm.engine.config.cache
    return {
        "model": llm.model.path.name,
        "format": stored_format(llm.model),
        "num_parameters": config.num_parameters,
        "weight_bytes": weight_bytes(llm.model.weights),
        "kernels": llm.engine.runner.kernels.name,
        "device": llm.engine.runner.kernels.device,
        "threads": threads or default_threads(),
        "kv_dtype": cache.dtype,
        "block_size": cache.block_size,
    }


def title(setting: dict[str, Any]) -> str:
    from bifolio.engine.memory import show_bytes
    from bifolio.measure.statistics import show_count

    size = f"{setting['num_parameters'] / 1e6:.1f} M parameters, {show_bytes(setting['weight_bytes'])}"
    place = show_count(setting["threads"], "thread") if setting["device"] == "cpu" else setting["device"]
    return f"{setting['model']} ({setting['format']}, {size}), {setting['kernels']}, {place}"


class progress:  # noqa: N801  # used like a function
    """A status line on standard error with the measurement in progress; silent unless standard error is a terminal."""

    def __init__(self, quiet: bool) -> None:
        self._status: Any = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("measuring")

    def __enter__(self) -> progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)


def show(table: Any) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)


def picture_line(plot: Path | None) -> None:
    if plot is not None:
        commands.echo(f"picture: {plot}")
