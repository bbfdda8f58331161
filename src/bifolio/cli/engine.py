"""`bifolio engine`: an engine without a front end, for servers on other hosts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from bifolio.cli import commands, options

HELP = """Run an engine that `bifolio serve --engine HOST:PORT` of other hosts use.

Both ends prove that they know the secret; messages are not encrypted, so the hosts belong to one private network."""
EPILOG = """Example:

  bifolio engine -m ./model.gguf --listen 10.0.0.2:7000 --secret-file secret.txt"""


def register(app: commands.App) -> None:
    app.command(help=HELP, epilog=EPILOG)(engine)


def engine(
    engine: options.BatchEngine,
    adapters: options.Adapters,
    secret_file: Annotated[Path, commands.option("--secret-file", help="File of the secret, 16 bytes or more.")],
    model: options.Model = None,
    listen: Annotated[str, commands.option("--listen", help="HOST:PORT to listen on.")] = "127.0.0.1:7000",
    step_timeout: Annotated[
        float,
        commands.option("--step-timeout", help="Seconds after which a step counts as hung; the engine is restarted."),
    ] = 300.0,
) -> None:
    import asyncio
    import signal

    from bifolio.errors import MissingDependencyError

    try:
        from bifolio.api.messages import Launch
        from bifolio.serve.http.server import event_loop
        from bifolio.serve.process.engine_host import host_engine
        from bifolio.serve.process.handshake import read_secret
        from bifolio.serve.views.logs import configure_logging
    except ImportError as error:
        raise MissingDependencyError(f"the engine host needs {error.name}: pip install 'bifolio[serve]'") from error
    from bifolio.model.registry import DEFAULT_MODEL

    configure_logging("info", "host")
    settings = {"model": str(model or DEFAULT_MODEL), **engine.for_llm(), **adapters.for_llm()}
    if settings["speculative"] is not None:
        settings["speculative"] = asdict(settings["speculative"])

    async def run() -> None:
        task = asyncio.ensure_future(
            host_engine(Launch(settings), listen, read_secret(secret_file), step_timeout=step_timeout)
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    with asyncio.Runner(loop_factory=event_loop()) as runner:
        runner.run(run())
