"""The table of families in docs/models.md, from the registry and the recorded results of the doors.

    BIFOLIO_DOOR_RESULTS=results.jsonl pytest tests/doors       # or scripts/gpu-tests -k doors, on a GPU
    python scripts/models_table.py results.jsonl                # adds the results to docs/data/doors.json

Without files the table is only written again. docs/data/families.json has the columns that are written by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bifolio.model.families import Family, all_families

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, RESULTS, FAMILIES = DOCS / "models.md", DOCS / "data" / "doors.json", DOCS / "data" / "families.json"
START, END = "<!-- families: scripts/models_table.py writes this part -->", "<!-- end of families -->"
COLUMNS = {"CPU native": "native", "CPU reference": "reference", "GPU": "gpu"}
ENTRIES = {"folder": "folder", "gguf": "GGUF", "serve": "server"}
HEAD = ["family", "models", "folder", "GGUF", *COLUMNS, "notes"]

# family -> kernels -> entry -> option -> the day on which all rows of the family passed, or "failed"
Results = dict[str, dict[str, dict[str, dict[str, str]]]]


def merge(results: Results, lines: Iterable[dict[str, Any]]) -> Results:
    """Add the lines of a run: an option of which one row failed is recorded as failed."""
    found: dict[tuple[str, str, str, str], str] = {}
    for line in lines:
        key = (line["family"], line["kernels"], line["entry"], line["option"])
        found[key] = "failed" if not line["ok"] or found.get(key) == "failed" else line["date"]
    for (family, kernels, entry, option), outcome in found.items():
        results.setdefault(family, {}).setdefault(kernels, {}).setdefault(entry, {})[option] = outcome
    return results


def table(results: Results, written: dict[str, dict[str, str]]) -> str:
    """The part of the page between the two marks."""
    days = [day for day in _outcomes(results) if day != "failed"]
    lines = [f"Recorded until {max(days, default='now')}.", "", _line(HEAD), "|" + "---|" * len(HEAD)]
    for family in sorted(all_families(), key=lambda family: family.name):
        own, found = written[family.name], results.get(family.name, {})
        tested = [_tested(found.get(kernels, {})) for kernels in COLUMNS.values()]
        lines.append(_line([family.name, own["models"], _code(family.hf_types), _gguf(family), *tested, own["notes"]]))
    return "\n".join(lines)


def _outcomes(results: Results) -> Iterable[str]:
    for kernels in results.values():
        for entries in kernels.values():
            for options in entries.values():
                yield from options.values()


def _tested(entries: dict[str, dict[str, str]]) -> str:
    """The ways in which models of the family were opened with default options."""
    passed = [shown for entry, shown in ENTRIES.items() if entries.get(entry, {}).get("defaults", "failed") != "failed"]
    return ", ".join(passed) or "not recorded"


def _gguf(family: Family) -> str:
    return _code(family.gguf_architectures) or (f"as `{family.written_as}`" if family.written_as else "none")


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def page(text: str, part: str) -> str:
    """The page with another part between the marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{part}\n\n{END}{after}"


def main(files: list[str]) -> None:
    results: Results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    lines = [json.loads(line) for name in files for line in Path(name).read_text(encoding="utf-8").splitlines()]
    merged = merge(results, lines)
    shown = ",\n".join(f"{json.dumps(name)}: {json.dumps(merged[name], sort_keys=True)}" for name in sorted(merged))
    RESULTS.write_text("{\n" + shown + "\n}\n", encoding="utf-8")
    written = json.loads(FAMILIES.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), table(merged, written)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
