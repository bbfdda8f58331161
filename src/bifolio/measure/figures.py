"""Figures for plots, without a display and without pyplot's global state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError, MissingDependencyError


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches; MissingDependencyError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("pictures need matplotlib: pip install 'bifolio[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_target(path: Path | None) -> None:
    """Raise before the measurement if the picture cannot be written."""
    if path is None:
        return
    new_figure(1, 1)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path}: pictures are written as .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder: create it first")


def plain_axes(axes: Any) -> None:
    """Draw a faint grid and two spines only."""
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
