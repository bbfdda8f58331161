"""`bifolio rm`: delete pulled models."""

from __future__ import annotations

import json
from typing import Annotated

from bifolio.cli import commands

HELP = """Delete models that `bifolio pull` fetched."""
EPILOG = """Examples:

  bifolio rm smollm2"""


def register(app: commands.App) -> None:
    app.command("rm", help=HELP, epilog=EPILOG)(rm)


def rm(
    names: Annotated[list[str], commands.argument(help="Names, as `bifolio models` shows them.")],
    as_json: Annotated[bool, commands.option("--json", help="Print one JSON array.")] = False,
) -> None:
    from bifolio.engine.memory import show_bytes
    from bifolio.model.pull import remove

    freed = {name: remove(name) for name in names}
    if as_json:
        commands.echo(json.dumps([{"name": name, "freed": count} for name, count in freed.items()]))
        return
    for name, count in freed.items():
        commands.echo(f"removed {name}: {show_bytes(count)} are free again")
