"""Tests of encoders compare with transformers, which takes seconds to import: they are full."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in ("serve", "engine"):  # a running server, and the stand-in for a device
    sys.path.append(str(Path(__file__).parents[1] / folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "encoders" in item.path.parts:
            item.add_marker(pytest.mark.full)
