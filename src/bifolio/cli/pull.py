"""`bifolio pull`: the command that downloads models (`bifolio run` calls it)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from bifolio.cli import commands

HELP = """Fetch a model into the cache, for use by its name.

MODEL is a short name (smollm2, qwen3-0.6b, gemma3-1b, llama3.2-1b and others), ORG/NAME, ORG/NAME:Q4_K_M or
ORG/NAME:FILE.gguf; hf:ORG/NAME and hf.co/ORG/NAME mean the same. An interrupted download goes on where it ended, and
every file is checked by its digest. No other command but `run` fetches anything. The cache is $BIFOLIO_CACHE, or
bifolio in the user's cache folder; $HF_ENDPOINT names a mirror of the hub."""
EPILOG = """Examples:

  bifolio pull smollm2

  bifolio pull hf:HuggingFaceTB/SmolLM2-135M --name smol

  bifolio pull hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0

  bifolio pull hf:ggml-org/models:tinyllamas/stories260K.gguf"""


def register(app: commands.App) -> None:
    app.command("pull", help=HELP, epilog=EPILOG)(pull)


def pull(
    model: Annotated[str, commands.argument(help="Short name, ORG/NAME, ORG/NAME:FORMAT or ORG/NAME:FILE.gguf.")],
    name: Annotated[str | None, commands.option("--name", help="Name under which the model is kept.")] = None,
    force: Annotated[
        bool, commands.option("--force", help="Fetch it again, and replace another of the same name.")
    ] = False,
    as_json: Annotated[bool, commands.option("--json", help="Print one JSON object.")] = False,
) -> None:
    from bifolio.engine.memory import show_bytes
    from bifolio.model.registry import describe

    path = fetch(model, name, force)
    kept = path.stem if path.suffix == ".gguf" else path.name
    entry = describe(kept, "pulled", path)
    if as_json:
        record = {"name": kept, "path": str(path), "size": entry.size, "source": entry.source, "format": entry.format}
        commands.echo(json.dumps(record))
        return
    commands.echo(f"{kept}: {show_bytes(entry.size)} in {path}")
    commands.echo(f"try: bifolio chat --model {kept}")


def fetch(model: str, name: str | None = None, force: bool = False) -> Path:
    """Pull a model, with a bar and the time left on standard error if it is a terminal."""
    from bifolio.cli.progress import bytes_bar
    from bifolio.model.pull import pull as fetch_model

    with bytes_bar("fetching") as progress:
        return fetch_model(
            model, name=name, force=force, say=lambda line: commands.echo(line, err=True), progress=progress
        )
