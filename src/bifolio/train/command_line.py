"""`--name value` pairs → `TrainSettings`, derived from its fields, with the standard library only."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

from bifolio.errors import ConfigError, did_you_mean
from bifolio.train.settings import TrainSettings


def parse(arguments: Sequence[str]) -> TrainSettings:
    """Parse options: field names with dashes, no value for booleans; other arguments are text files or folders."""
    kinds = typing.get_type_hints(TrainSettings)
    values: dict[str, Any] = {}
    data: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            data.append(word)
            continue
        flag, equals, value = word[2:].partition("=")
        negated = flag.startswith("no-")
        name = flag.removeprefix("no-").replace("-", "_")
        if name not in kinds or (negated and bool not in _options(kinds[name])):
            hint = did_you_mean(name, kinds) or f"; options are:\n{describe()}"
            raise ConfigError(f"there is no option --{flag}{hint}")
        if bool in _options(kinds[name]) and not equals:
            values[name] = not negated
            continue
        if not equals and not rest:
            raise ConfigError(f"the option --{flag} needs a value")
        text = value if equals else rest.pop(0)
        if name == "data":
            data.append(text)
        else:
            values[name] = _convert(flag, text, kinds[name])
    return TrainSettings(data=tuple(data), **values)


def describe() -> str:
    """Help text with one line for each option."""
    lines = []
    for option in dataclasses.fields(TrainSettings):
        default = "" if option.default in (None, ()) else f" [{option.default}]"
        lines.append(f"  --{option.name.replace('_', '-'):22} {option.metadata['help']}{default}")
    return "\n".join(lines)


def _options(kind: Any) -> tuple[Any, ...]:
    """The value type of an annotation such as `int | None` or `int`."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _convert(flag: str, text: str, kind: Any) -> Any:
    wanted = next(option for option in _options(kind) if option is not type(None))
    if wanted is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"the option --{flag} is true or false, not {text!r}")
        return text.lower() == "true"
    try:
        return wanted(text)
    except ValueError:
        raise ConfigError(f"the option --{flag} takes a value of type {wanted.__name__}, not {text!r}") from None
