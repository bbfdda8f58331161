"""The loss curve as a picture, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

from bifolio.train.checkpoint import History


def plot_losses(history: History, path: Path, baselines: dict[str, float] | None = None) -> bool:
    """Write a PNG with training and held-out loss; False, with nothing written, when matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*history.train, strict=True), label="training", linewidth=0.8) if history.train else None
    axes.plot(*zip(*history.held_out, strict=True), label="held out", marker=".") if history.held_out else None
    for name, loss in (baselines or {}).items():
        axes.axhline(loss, linestyle="--", color="gray", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
