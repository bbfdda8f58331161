"""The picture of a trace: waste is drawn on a scale on which it can be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bifolio.measure.figures import new_figure
from bifolio.measure.trace import Moment, TraceReport
from bifolio.measure.trace_plot import _plot_waste, plot_trace


def report(name: str, utilisation: float, last: float | None = None) -> TraceReport:
    """1000 steps of 10 ms; `last` is the utilisation of the last step."""
    moments = [Moment(0.01 * n, 0.01, 4, 2, 50, utilisation, n) for n in range(999)]
    moments.append(Moment(10.0, 0.01, 1, 0, 1, utilisation if last is None else last, 1000))
    return TraceReport(name, 10, 100, 1000, 10.0, 9.0, 100, 16, moments=moments)


@pytest.mark.full
@pytest.mark.parametrize(("waste", "last"), [(4.0, None), (4.0, 0.01), (40.0, None)])
def test_the_scale_of_waste_fits_the_waste(waste: float, last: float | None) -> None:
    axes = new_figure(4, 3).add_subplot()
    _plot_waste(axes, [report("continuous", 1 - waste / 100, last), report("static, padded", 0.99)])
    top = axes.get_ylim()[1]
    assert 0.5 * top <= waste <= top  # between half and all of the height; single steps do not set the scale
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts[0] == f"continuous: {waste:.1f} % on average"
    assert "padding counted as filled" in texts[1]


@pytest.mark.full
def test_all_panels_are_drawn(tmp_path: Path) -> None:
    plot_trace([report("continuous", 0.95), report("static, packed", 0.9)], tmp_path / "trace.png", "a trace")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
