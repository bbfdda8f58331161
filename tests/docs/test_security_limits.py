"""The limits that docs/security.md lists are those of the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
ROWS = re.findall(
    r"^\| `([a-z_.]+)\.((?:[A-Z]\w*\.)?\w+)` \| ([0-9.]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)


def test_the_table_is_found() -> None:
    assert len(ROWS) >= 30


@pytest.mark.parametrize(("module", "name", "value"), ROWS, ids=[f"{module}.{name}" for module, name, _ in ROWS])
def test_a_limit_is_the_one_of_the_code(module: str, name: str, value: str) -> None:
    pytest.importorskip("starlette")
    owner = importlib.import_module(f"bifolio.{module}")
    if "." in name:
        kind, name = name.split(".")
        found = getattr(owner, kind)().__getattribute__(name)
    else:
        found = getattr(owner, name)
    assert float(found) == float(value)
