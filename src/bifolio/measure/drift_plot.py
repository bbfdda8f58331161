"""Plot of two engines' drift per layer."""

from __future__ import annotations

from pathlib import Path

from bifolio.measure.figures import new_figure, plain_axes
from bifolio.measure.replay import LayerDrift


def plot_drift(rows: list[LayerDrift], path: Path) -> None:
    """The relative difference of the last token after each layer, on a logarithmic axis."""
    figure = new_figure(8, 4)
    axes = figure.subplots()
    axes.plot([row.layer for row in rows], [max(row.drift, 1e-17) for row in rows], marker="o", color="#1f77b4")
    axes.set_yscale("log")
    axes.set_xlabel("layer (-1: embedding; the last one: logits)")
    axes.set_ylabel("|a - b| / |a|")
    first = next((row for row in rows if row.operation), None)
    axes.set_title("no layer differs" if first is None else f"first difference: layer {first.layer}, {first.operation}")
    plain_axes(axes)
    figure.savefig(path)
