"""Results of a run as JSON: one machine, one date, one command, and a row for each figure.

    {"title": ..., "date": ..., "machine": {...}, "limits": {...}, "versions": {...}, "command": ...,
     "rows": [{"row": "S-q4_0/decode1", "title": ..., "model": ..., "unit": "tok/s", "limit": 470.1,
               "columns": {"bifolio": {"passes": [215.2, 214.0]}, "llama.cpp": {"passes": [145.1, 144.9]}}}]}

All passes of a column are kept, in the order of the turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workloads import HIGHER, median

FOLDER = Path(__file__).parent / "results"
OURS = "bifolio"


@dataclass
class Cell:
    """The figures of one column."""

    passes: list[float] = field(default_factory=list)
    details: dict[str, float] = field(default_factory=dict)
    missing: str = ""  # why there is no figure

    @property
    def value(self) -> float | None:
        return median(self.passes) if self.passes else None


@dataclass
class ResultRow:
    """One row: the figures of every column, and the limit of the machine."""

    row: str
    title: str
    model: str
    unit: str
    columns: dict[str, Cell] = field(default_factory=dict)
    limit: float | None = None
    note: str = ""

    @property
    def higher_is_better(self) -> bool:
        return self.unit in HIGHER

    def of_limit(self, column: str) -> float | None:
        """The share of the limit that a column reaches; 1 is the limit."""
        value = self.value(column)
        if not value or not self.limit:
            return None
        return value / self.limit if self.higher_is_better else self.limit / value

    def value(self, column: str) -> float | None:
        cell = self.columns.get(column)
        return None if cell is None else cell.value

    def advantage(self, column: str, ours: str = OURS) -> float | None:
        """How many times as fast as a column bifolio is; above 1 it is faster."""
        mine, other = self.value(ours), self.value(column)
        if not mine or not other:
            return None
        return mine / other if self.higher_is_better else other / mine


@dataclass
class Results:
    """One run."""

    title: str
    date: str
    machine: dict[str, Any]
    rows: list[ResultRow] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    note: str = ""
    setting: dict[str, Any] = field(default_factory=dict)

    def columns(self) -> list[str]:
        """All columns, in the order in which they first occur."""
        return list(dict.fromkeys(name for row in self.rows for name in row.columns))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(_plain(asdict(self)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Results:
        raw = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            ResultRow(**{**row, "columns": {name: Cell(**cell) for name, cell in row["columns"].items()}})
            for row in raw.pop("rows")
        ]
        return cls(**raw, rows=rows)


def _plain(value: Any) -> Any:
    """Without empty fields, and with figures of at most six digits."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each not in ("", None, [], {})}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def published(paths: Iterable[Path] | None = None) -> list[Results]:
    """The committed results, in the order of their file names."""
    return [Results.read(path) for path in (paths or sorted(FOLDER.glob("*.json")))]
