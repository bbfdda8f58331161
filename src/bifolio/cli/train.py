"""`bifolio train`: a language model from text files."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import sys
import typing
from typing import Annotated, Any

from bifolio.cli import commands

HELP = """Train a language model on text files and write a folder that bifolio and transformers load.

Examples:

  bifolio train tinyshakespeare.txt --preset char --tokenizer char --output shakespeare

  bifolio train stories/ --preset stories --vocab-size 4096 --steps 5000 --gguf q8_0 --output my-stories

  bifolio train stories/ --output my-stories --resume

  torchrun --nproc-per-node=2 -m bifolio.train stories/ --output my-stories

Ctrl-C saves a checkpoint; the same command with --resume goes on from it.
"""


def register(app: commands.App) -> None:
    """Add the command; its options are the fields of `TrainSettings`."""

    def command(as_json: bool = False, **values: Any) -> None:
        _train(values, as_json)

    command.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters()}
    app.command("train", help=HELP)(command)


def _parameters() -> list[inspect.Parameter]:
    """One keyword for each setting; the text files are the arguments."""
    from bifolio.train.settings import TrainSettings

    kinds = typing.get_type_hints(TrainSettings)
    parameters = []
    for option in dataclasses.fields(TrainSettings):
        help, default = option.metadata["help"], option.default
        if option.name == "data":
            written, kind, default = commands.argument(help=help), list[str], inspect.Parameter.empty
        else:
            written, kind = commands.option(help=help), kinds[option.name]
        parameters.append(
            inspect.Parameter(
                option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, written]
            )
        )
    written = commands.option("--json", help="Print one JSON object at the end; progress goes to standard error.")
    parameters.append(
        inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, written])
    )
    return parameters


def _train(values: dict[str, Any], as_json: bool) -> None:
    from bifolio.errors import MissingDependencyError
    from bifolio.train.settings import TrainSettings

    settings = TrainSettings(**{**values, "data": tuple(values["data"])})
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("training needs torch: pip install 'bifolio[train]'") from error
    from bifolio.train.loop import train

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        result = train(settings)
    if as_json:
        evaluations = [[step, loss] for step, loss in result.history.held_out]
        record = {"folder": str(result.folder), "steps": result.steps_done, "finished": result.finished}
        commands.echo(json.dumps({**record, "evaluations": evaluations}))
