"""`bifolio list`: the same as `bifolio models`."""

from __future__ import annotations

from bifolio.cli import commands
from bifolio.cli.models import EPILOG, HELP, models


def register(app: commands.App) -> None:
    app.command("list", help=HELP, epilog=EPILOG.replace("bifolio models", "bifolio list"))(models)
