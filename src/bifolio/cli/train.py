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

  bifolio train --eagle stories --output stories-eagle

  bifolio train --mtp stories --output stories-mtp

  bifolio train --lora stories --data poems.txt --output poems

Ctrl-C saves a checkpoint; the same command with --resume goes on from it. With --eagle a small head is trained that
drafts tokens for an existing model (`--speculative eagle --draft-model FOLDER`), on text that the model writes itself
or on --data; with --mtp a model like Llama is written together with a head (`--model FOLDER --speculative mtp`); with
--lora a low-rank adapter of a dense model is trained on --data (`generate --lora FOLDER`). Of the
other options, --output, --steps, --batch-size, --context, --learning-rate, --seed, --force and --max-minutes apply.
"""

HEADS = {
    "eagle": "train an EAGLE-3 head for this model instead of a model",
    "mtp": "write this model with a trained head for multi-token prediction",
    "lora": "train an adapter (LoRA) of this model on --data",
}

RANK = "rank of the adapter of --lora [default: 8]"
COMMON = {"output", "tokenizer", "vocab_size", "preset", "context", "steps", "batch_size", "learning_rate", "seed",
          "teacher", "resume", "force", "max_minutes", "device", "gguf"}  # fmt: skip


def register(app: commands.App) -> None:
    """Add the command; its options are the fields of `TrainSettings`."""

    def command(as_json: bool = False, more_data: Any = None, rank: int | None = None, **values: Any) -> None:
        heads = [(kind, target) for kind in HEADS if (target := values.pop(kind, None)) is not None]
        given = {name: value for name, value in values.items() if value is not None}
        given["data"] = (*given.get("data", ()), *(more_data or ()))
        if len(heads) > 1:
            raise commands.BadParameter("--eagle, --mtp and --lora train different things: pass one of them")
        if rank is not None and [kind for kind, _ in heads] != ["lora"]:
            raise commands.BadParameter("--rank is for --lora: leave it out")
        if rank is not None:
            given["rank"] = rank
        if heads:
            _train_head(*heads[0], given, as_json)
        elif not given["data"]:
            raise commands.BadParameter("pass text files or folders, --eagle MODEL, --mtp MODEL or --lora MODEL")
        else:
            _train(given, as_json)

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
            written, kind = commands.argument(help=help), list[str]
        else:
            shown = "" if default is None or isinstance(default, bool) else f" [default: {default}]"
            is_rare = option.name not in COMMON
            written, kind = commands.option(help=help + shown, advanced=is_rare), kinds[option.name]
        parameters.append(_parameter(option.name, Annotated[kind, written], None))
    more = commands.option("--data", help="text files or folders, as without --data; may be repeated")
    heads = [
        _parameter(kind, Annotated[str | None, commands.option(f"--{kind}", help=help)], None)
        for kind, help in HEADS.items()
    ]
    as_json = commands.option("--json", help="Print one JSON object at the end; progress goes to standard error.")
    return [
        *parameters,
        _parameter("more_data", Annotated[list[str] | None, more], None),
        *heads,
        _parameter("rank", Annotated[int | None, commands.option("--rank", min=1, help=RANK)], None),
        _parameter("as_json", Annotated[bool, as_json], False),
    ]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _require_torch() -> None:
    from bifolio.errors import MissingDependencyError

    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("training needs torch: pip install 'bifolio[train]'") from error


def _train_head(kind: str, target: str, values: dict[str, Any], as_json: bool) -> None:
    from bifolio.errors import ConfigError

    _require_torch()
    from bifolio.train.eagle import EagleSettings, train_eagle
    from bifolio.train.lora import LoraSettings, train_lora
    from bifolio.train.mtp import MtpSettings, train_mtp

    unknown = sorted(set(values) - {option.name for option in dataclasses.fields(LoraSettings)})
    if unknown:
        raise ConfigError(f"--{unknown[0].replace('_', '-')} is not for --{kind}: leave it out")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        if kind == "eagle":
            result = train_eagle(EagleSettings(target, **values))
        elif kind == "lora":
            result = train_lora(LoraSettings(target, **values))
        else:
            result = train_mtp(MtpSettings(target, **values))
    if as_json:
        record = {"folder": str(result.folder), "steps": result.steps_done, "losses": result.losses}
        commands.echo(json.dumps({**record, "agreement": result.agreement}))


def _train(values: dict[str, Any], as_json: bool) -> None:
    from bifolio.train.settings import TrainSettings

    settings = TrainSettings(**values)
    _require_torch()
    from bifolio.train.loop import train

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        result = train(settings)
    if as_json:
        evaluations = [[step, loss] for step, loss in result.history.held_out]
        record = {"folder": str(result.folder), "steps": result.steps_done, "finished": result.finished}
        commands.echo(json.dumps({**record, "evaluations": evaluations}))
