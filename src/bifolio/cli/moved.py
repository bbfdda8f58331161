"""Verbs that have moved to the package `benchmarks` of the source tree: the old names still run there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bifolio.cli import commands
from bifolio.errors import ConfigError


def moved(old: str, new: str) -> Callable[[Sequence[str]], None]:
    """A verb that passes its arguments on: `bifolio bench targets ...` runs `python -m benchmarks targets ...`."""

    def run(arguments: Sequence[str]) -> None:
        root = source_tree()
        if root is None:
            raise ConfigError(
                f"`bifolio {old}` is now `python -m benchmarks {new}`, in the source tree of bifolio: run it there, or "
                "add that folder to PYTHONPATH"
            )
        commands.echo(f"`bifolio {old}` is now `python -m benchmarks {new}`", err=True)
        paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "benchmarks", *new.split(), *arguments]
        raise commands.Exit(subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode)

    return run


def source_tree() -> Path | None:
    """The folder that holds the package `benchmarks`: the checkout that this module is in, or one on the path."""
    candidates = [Path(__file__).resolve().parents[3]]
    spec = importlib.util.find_spec("benchmarks")
    candidates += [
        Path(place).parent for place in (spec.submodule_search_locations if spec is not None else None) or ()
    ]
    ours = (root for root in candidates if (root / "benchmarks" / "engines" / "bifolio.py").is_file())
    return next(ours, None)
