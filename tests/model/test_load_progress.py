"""The line that is shown while weights are prepared."""

from __future__ import annotations

import io

import numpy as np
import pytest

from bifolio.kernels.interface import Linear
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model import load_progress
from bifolio.model.load_progress import LoadProgress


class Screen(io.StringIO):
    def __init__(self, watched: bool) -> None:
        super().__init__()
        self.watched = watched

    def isatty(self) -> bool:
        return self.watched


def run(screen: Screen) -> str:
    matrix = np.zeros((4, 32), np.float32)
    progress = LoadProgress(4 * matrix.nbytes, screen)
    for _ in range(4):
        progress.prepare(ReferenceKernels(), Linear((matrix,), (None,)))
    progress.finish()
    return screen.getvalue()


def test_slow_loads_are_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_progress, "PATIENCE", -1.0)
    shown = run(Screen(True))
    assert [f"{share}%" in shown for share in (25, 50, 75, 100)] == [True] * 4
    assert shown.endswith("\r")
    assert run(Screen(False)) == ""


def test_quick_loads_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_progress, "PATIENCE", 1000.0)
    assert run(Screen(True)) == ""
