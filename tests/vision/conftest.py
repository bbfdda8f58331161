"""Tests of images compare with transformers and its processors, which take seconds to import: they are full."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "vision" in item.path.parts:
            item.add_marker(pytest.mark.full)
