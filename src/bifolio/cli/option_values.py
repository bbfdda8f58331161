"""Values of options from the environment and from a configuration file, for options that the command line leaves out.

    BIFOLIO_THREADS=4                         every option has a variable: BIFOLIO_ and its long name
    ~/.config/bifolio/config.toml             or $BIFOLIO_CONFIG

    threads = 4                               for every verb that has the option
    [chat]
    temperature = 0.5                         for one verb
    ["bench throughput"]
    repetitions = 3

The command line comes before the environment, and the environment before the file; in the file, a verb's table comes
before the top.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError, did_you_mean

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
NO_VARIABLE = {"json", "help", "version", "cache", "config", "history"}  # BIFOLIO_CACHE and others mean something else
VARIABLES = {  # that stand for no option
    "BIFOLIO_CACHE": "the folder of pulled models and compiled kernels",
    "BIFOLIO_CONFIG": "the configuration file",
    "BIFOLIO_HISTORY": "the file of lines that `bifolio chat` remembers",
    "BIFOLIO_ISA": "the instruction set of the CPU kernels",
    "BIFOLIO_KERNELS": "the kernel set",
    "BIFOLIO_MASK_ISA": "instruction sets that the CPU kernels do not use",
    "BIFOLIO_LOG_LEVEL": "the log level, also of engine processes",
}
# Beginnings of those that the tests read.
OF_TESTS = (
    "BIFOLIO_TEST_",
    "BIFOLIO_DOOR",
    "BIFOLIO_OPTION_",
    "BIFOLIO_MACHINE_",
    "BIFOLIO_LLAMA_CPP",
    "BIFOLIO_MATERIAL",
)


def config_path() -> Path:
    """$BIFOLIO_CONFIG, or bifolio/config.toml in the user's configuration folder."""
    if override := os.environ.get("BIFOLIO_CONFIG"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "bifolio" / "config.toml"


def read_config() -> dict[str, Any]:
    """The configuration file; {} where there is none."""
    path = config_path()
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"the configuration {path} cannot be read ({error}): correct it, or set BIFOLIO_CONFIG"
        ) from error


class OptionValues:
    """The values that environment and file hold for the options of one verb."""

    def __init__(self, verb: str, config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        table = config.get(verb, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{config_path()}: [{verb}] must be a table of options")
        self._verb = verb
        for name, value in table.items():
            if isinstance(value, dict):
                raise ConfigError(f'{config_path()}: write ["{verb} {name}"] instead of [{verb}.{name}]')
        self._own = {_key(name): value for name, value in table.items()}
        self._shared = {_key(name): value for name, value in config.items() if not isinstance(value, dict)}
        self._tables = [name for name, value in config.items() if isinstance(value, dict)]
        self._environment = environment
        self._known: set[str] = set()

    @classmethod
    def of(cls, program: str) -> OptionValues:
        """Those of "bifolio chat"."""
        return cls(program.partition(" ")[2], read_config(), os.environ)

    def take(self, names: Sequence[str], read: Callable[[str], Any], several: bool) -> Any:
        """The value of the option with these names, read as the command line reads it; None where there is none."""
        keys = [_key(name) for name in names if name.startswith("--")] or [_key(max(names, key=len))]
        self._known.update(keys)
        for variable in ("BIFOLIO_" + key.upper() for key in keys if key not in NO_VARIABLE):
            if variable in self._environment:
                text = self._environment[variable]
                return self._read(text.split(",") if several else text, read, several, variable)
        for values in (self._own, self._shared):
            for key in keys:
                if key in values:
                    return self._read(values[key], read, several, f"{key} in {config_path()}")
        return None

    def check_all_used(self) -> None:
        """Refuse options in the verb's own table that the verb does not have; warn about names that no verb has."""
        for key in self._own:
            if key not in self._known:
                hint = did_you_mean(key, self._known)
                raise ConfigError(f"{config_path()}: `bifolio {self._verb}` has no option {key!r}{hint}")
        shared, tables = set(self._shared) - self._known, set(self._tables) - {self._verb}
        variables = {name for name in self._environment if self._is_strange(name)}
        if shared or tables or variables:
            self._warn(shared, tables, variables)

    def _is_strange(self, variable: str) -> bool:
        """Whether a variable is named like ours and stands for no option of this verb."""
        if not variable.startswith("BIFOLIO_") or variable in VARIABLES or variable.startswith(OF_TESTS):
            return False
        key = variable.removeprefix("BIFOLIO_").lower()
        return key not in self._known or key in NO_VARIABLE

    def _warn(self, shared: set[str], tables: set[str], variables: set[str]) -> None:
        """Warn about keys, tables and variables that are of no other verb either. Only here are all verbs imported."""
        from bifolio.cli.completion import options_of
        from bifolio.cli.main import ALIASES, build_app

        options = {verb: {_key(name) for name in names} for verb, names in options_of(build_app())}
        known = self._known.union(*options.values())
        lines = [f"no verb has an option {key!r}{did_you_mean(key, known)}" for key in sorted(shared - known)]
        verbs = {self._verb, *options, *ALIASES}
        lines += [f"[{name}] is no verb{did_you_mean(name, verbs)}" for name in sorted(tables - verbs)]
        for line in lines:
            print(f"warning: {config_path()}: {line}", file=sys.stderr)
        self._warn_variables(variables, known)

    def _warn_variables(self, variables: set[str], known: set[str]) -> None:
        names = {"BIFOLIO_" + key.upper(): key for key in known}
        for variable in sorted(variables):
            key = names.get(variable)
            if key in NO_VARIABLE:
                print(f"warning: {variable} has no effect: pass --{key}", file=sys.stderr)
            elif key is None:
                hint = _nearest(variable, [*names, *VARIABLES])
                print(f"warning: {variable} stands for no option{hint}", file=sys.stderr)

    def _read(self, value: Any, read: Callable[[str], Any], several: bool, source: str) -> Any:
        try:
            if several:
                return [read(str(item)) for item in (value if isinstance(value, list) else [value])]
            return _truth(value) if read is bool else read(str(value))
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"{source} is {value!r}, which is no value of the option: {error}") from error


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _nearest(variable: str, known: Sequence[str]) -> str:
    """The hint of `did_you_mean` for names in capital letters."""
    return did_you_mean(variable, [name.lower() for name in known]).upper().replace("DID YOU MEAN", "did you mean")


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise ValueError("write true or false")
