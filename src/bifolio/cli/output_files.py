"""Files that a command writes: their paths are checked when options are read, before any work."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bifolio.errors import ConfigError


def output_file(text: str) -> Path:
    """The path of a file that can be written, for `commands.option(read=...)`; the error follows the option's name."""
    path = Path(text).expanduser()
    folder = path.parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file in it")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {folder} does not exist: create it, or choose another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: the permission is missing; name a file elsewhere")
    return path


def output_folder(text: str) -> Path:
    """The path of a folder that files can be written to; it is made where it does not exist."""
    path = Path(text).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be made: {error.strerror}; name another folder") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: the permission is missing; name another folder")
    return path


def write_output(path: Path, text: str) -> None:
    """Write a text; a full disk is a named error."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from error
