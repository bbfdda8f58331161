"""The process of the engine, started before the server's own modules are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bifolio.cli.serve_several import SeveralOptions

if TYPE_CHECKING:
    from bifolio.cli.serve import ServerOptions
    from bifolio.serve.process.worker_process import StartedWorker


def start(server: ServerOptions, several: SeveralOptions, models: list[str]) -> StartedWorker | None:
    """The process of the one engine, if there is one here: it imports its modules while this process does so."""
    from importlib.util import find_spec

    from bifolio.serve.views.logs import LEVELS

    is_one = several == SeveralOptions() and len(models) < 2 and server.engine is None
    if not is_one or server.replicas > 1 or server.prefill_replicas or server.log_level not in LEVELS:
        return None
    if any(find_spec(needed) is None for needed in ("msgspec", "uvicorn")):
        return None
    from bifolio.serve.process.worker_process import StartedWorker

    return StartedWorker()
