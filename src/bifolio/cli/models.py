"""`bifolio models`: embedded and pulled models."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from bifolio.cli import commands

if TYPE_CHECKING:
    from bifolio.model.registry import ModelEntry

HELP = """List the models that are known by name: embedded ones, and those that `bifolio pull` fetched."""
EPILOG = """Examples:

  bifolio models

  bifolio models --json | jq '.[].name'"""


def register(app: commands.App) -> None:
    app.command("models", help=HELP, epilog=EPILOG, alias="list")(models)


def models(as_json: Annotated[bool, commands.option("--json", help="Print one JSON array.")] = False) -> None:
    from bifolio.model.registry import list_models

    entries = list_models()
    if as_json:
        commands.echo(json.dumps([asdict(entry) for entry in entries], default=str, ensure_ascii=False))
    else:
        show(entries)


def show(entries: list[ModelEntry]) -> None:
    """Aligned columns; the path comes last and is never cut."""
    from bifolio.model.registry import PULLABLE

    rows = [("name", "from", "architecture", "parameters", "format", "size", "path"), *map(row, entries)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]) - 1)]
    for *cells, path in rows:
        commands.echo("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), path]))
    for entry in entries:
        if entry.problem is not None:
            commands.echo(f"{entry.name} cannot be used: {entry.problem}")
    if not any(entry.origin == "pulled" for entry in entries):
        commands.echo(f"more: bifolio pull {PULLABLE[0]}")


def row(entry: ModelEntry) -> tuple[str, ...]:
    from bifolio.engine.memory import show_bytes
    from bifolio.model.registry import DEFAULT_MODEL

    name = entry.name + (" (default)" if entry.name == DEFAULT_MODEL else "")
    parameters = "?" if entry.num_parameters is None else f"{entry.num_parameters / 1e6:,.1f} M"
    details = (entry.architecture or "?", parameters, entry.format or "?", show_bytes(entry.size))
    return name, entry.source or entry.origin, *details, str(entry.path)
