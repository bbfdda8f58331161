"""Model presets: an INI file with one section for each model of a server (`bifolio serve --models-preset FILE`).

    [*]                            for all models
    max-num-seqs = 8

    [coder]                        the name of the model in requests
    model = ./qwen2.5-coder-1.5b.gguf
    max-model-len = 16384
    memory = 2GB
    load-on-startup = true         as --keep

Keys are the options of the engine without their hyphens. Some of llama.cpp's names are understood as well.
"""

from __future__ import annotations

import configparser
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bifolio.cli import commands
from bifolio.cli.option_values import TRUE
from bifolio.cli.options import BatchEngine
from bifolio.errors import ConfigError, did_you_mean

EVERY = "*"
MODEL, KEEP = "model", "load-on-startup"
LLAMA_CPP = {"m": MODEL, "c": "max-model-len", "ctx-size": "max-model-len", "np": "max-num-seqs",
             "parallel": "max-num-seqs", "t": "threads", "ubatch-size": "chunk-size", "ub": "chunk-size",
             "n-cpu-moe": "cpu-experts", "ncmoe": "cpu-experts"}  # fmt: skip
OF_REQUESTS = re.compile(r"(temp|temperature|top-[pk]|min-p|seed|presence-penalty|frequency-penalty|repeat-penalty)")
NAME = re.compile(r"[^\s\x00-\x1f]{1,200}")


class Preset(NamedTuple):
    """One section."""

    name: str
    reference: str
    engine: BatchEngine
    keep: bool


def read_presets(path: Path, engine: BatchEngine) -> list[Preset]:
    """The models of a file; their options come before those of the command line."""
    parser = configparser.ConfigParser(
        interpolation=None,
        delimiters=("=",),
        comment_prefixes=("#", ";"),
        inline_comment_prefixes=(";",),
        default_section="\0",
        strict=True,
    )
    parser.optionxform = str  # type: ignore[assignment]  # keys keep their case
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        parser.read_string(_without_head(text), str(path))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "message", None) or error
        raise ConfigError(f"--models-preset {str(path)!r} cannot be read ({reason}): pass an INI file") from error
    common = dict(parser[EVERY]) if parser.has_section(EVERY) else {}
    found = [_preset(path, name, {**common, **parser[name]}, engine) for name in parser.sections() if name != EVERY]
    if not found:
        raise ConfigError(f"--models-preset {str(path)!r} names no model: write a section such as [name] for each")
    return found


def _without_head(text: str) -> str:
    """The file without `version = 1` in front of the sections."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    head = [line for line in lines[:first] if not re.fullmatch(r"\s*(version\s*=\s*1\s*)?([#;].*)?", line)]
    return "\n".join([*head, *lines[first:]])


def _preset(path: Path, name: str, values: Mapping[str, str], engine: BatchEngine) -> Preset:
    place = f"--models-preset {str(path)!r}, section [{name}]"
    if not NAME.fullmatch(name):
        raise ConfigError(f"{place}: the name of a model has no spaces and at most 200 characters: choose another")
    options = {_key(parameter): parameter for parameter in commands.fields_of(BatchEngine)}
    given: dict[str, Any] = {}
    reference, keep = "", False
    for written, text in values.items():
        key = LLAMA_CPP.get(written, written).replace("_", "-")
        if key == MODEL:
            reference = _reference(path, text)
        elif key == KEEP:
            keep = text.lower() in TRUE
        elif key in options:
            if written in ("c", "ctx-size") and text == "0":
                continue  # the model's own length, which is the default
            try:
                given[options[key].name] = commands.value_of(options[key], text)
            except commands.BadParameter as error:
                raise ConfigError(f"{place}: {written}: {error}") from error
        elif OF_REQUESTS.fullmatch(key):
            raise ConfigError(f"{place}: {written} belongs to requests, which carry their sampling options: remove it")
        else:
            hint = did_you_mean(key, [MODEL, KEEP, *options]) or ": see bifolio serve --help-all"
            raise ConfigError(f"{place}: the engine has no option {written!r}{hint}")
    if not reference:
        raise ConfigError(f"{place} has no model: add a line such as model = ./file.gguf")
    return Preset(name, reference, dataclasses.replace(engine, **given), keep)


def _key(parameter: Any) -> str:
    names = commands.notes_of(parameter)[1].names or ("--" + parameter.name.replace("_", "-"),)
    return next(name for name in names if name.startswith("--")).removeprefix("--")


def _reference(path: Path, text: str) -> str:
    """A model's name, or a path, which is relative to the file."""
    if text.startswith(("./", "../")):
        return str((path.expanduser().parent / text).resolve())
    return text
