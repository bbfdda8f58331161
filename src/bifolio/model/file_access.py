"""Memory-mapped reading and atomic writing of files."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bifolio.errors import ConfigError, ModelFileError
from bifolio.quant.formats import Bytes


def map_file(path: Path) -> Bytes:
    """Map a file read-only: u8[size]. Pages are read on first access; nothing is copied."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{path} is empty: fetch it again")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path} cannot be read: {error}") from error


@contextlib.contextmanager
def atomic_path(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` when the block ends without an error.

    Readers see either the old file or the complete new one; after an error the temporary file is removed.
    """
    refuse_existing(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    os.close(handle)
    try:
        yield Path(name)
        _flush_to_disk(name)
        _give_ordinary_mode(name)
        refuse_existing(path, overwrite)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def atomic_write(path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing, with the guarantees of `atomic_path`."""
    with atomic_path(path, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        yield file


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise ConfigError if `path` exists and `overwrite` is off."""
    if not overwrite and path.exists():
        raise ConfigError(f"{path} exists already: choose another name or pass --force to replace it")


def _flush_to_disk(path: str) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _give_ordinary_mode(path: str) -> None:
    """Set the permissions of a finished file to those of `open`; temporary files are private."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)
