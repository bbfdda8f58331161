"""`bifolio ps`: the models that a running server has loaded."""

from __future__ import annotations

import json
from typing import Annotated, Any

from bifolio.cli import commands

HELP = """Show the models that a running server has loaded, with their memory."""
EPILOG = """Examples:

  bifolio ps

  bifolio ps --url http://10.0.0.5:8000 --api-key KEY"""
TIMEOUT = 10.0
MAX_BYTES = 4 << 20


def register(app: commands.App) -> None:
    app.command("ps", help=HELP, epilog=EPILOG)(ps)


def ps(
    url: Annotated[str, commands.option("--url", help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, commands.option("--api-key", help="API key of the server.")] = None,
    as_json: Annotated[bool, commands.option("--json", help="Print the server's answer.")] = False,
) -> None:
    found = ask(url, api_key)
    if as_json:
        commands.echo(json.dumps(found, ensure_ascii=False))
        return
    for line in table(found):
        commands.echo(line)


def ask(url: str, api_key: str | None) -> dict[str, Any]:
    """The answer to `/api/ps`."""
    import urllib.request

    from bifolio.errors import ConfigError

    try:
        request = urllib.request.Request(url.rstrip("/") + "/api/ps")
        if api_key is not None:
            request.add_header("authorization", f"Bearer {api_key}")
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            body = json.loads(answer.read(MAX_BYTES))
        return {**body, "models": list(body["models"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"no server answers at {url} ({error}): start one with `bifolio serve`, or pass --url") from (
            error
        )


def table(found: dict[str, Any]) -> list[str]:
    """One line for each model, and the budget where there is one."""
    from bifolio.engine.memory import show_bytes

    rows = [("name", "state", "memory", "requests", "unloaded at"), *map(_row, found["models"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    memory = found.get("memory")
    if memory is not None:
        lines.append(f"{show_bytes(memory['used'])} of {show_bytes(memory['budget'])} in use")
    return lines


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    from bifolio.engine.memory import show_bytes

    expires = model.get("expires_at") if "state" in model else None  # a server of one model never unloads it
    size, requests = show_bytes(int(model.get("size", 0))), str(model.get("open_requests", ""))
    return str(model.get("name")), str(model.get("state", "loaded")), size, requests, str(expires or "when evicted")
