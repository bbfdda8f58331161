"""Tests of encoders compare with transformers, which takes seconds to import: they are full."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "serve"))  # a running server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "encoders" in item.path.parts:
            item.add_marker(pytest.mark.full)
