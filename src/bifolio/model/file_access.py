"""Reading files by memory map and writing them in one step."""

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
    """The bytes of a file as a read-only map: u8[size]. Pages are read when touched; nothing is copied."""
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
    """A temporary file to fill, which takes the place of `path` when the block ends without an error.

    Readers see the old file or the whole new one, never a part; after an error nothing is left behind.
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
    """A file to write to, with the promises of `atomic_path`."""
    with atomic_path(path, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        yield file


def refuse_existing(path: Path, overwrite: bool) -> None:
    """ConfigError when `path` exists and must not be replaced."""
    if not overwrite and path.exists():
        raise ConfigError(f"{path} exists already: choose another name or pass --force to replace it")


def _flush_to_disk(path: str) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _give_ordinary_mode(path: str) -> None:
    """Temporary files are private; the finished one gets the permissions that `open` would have given it."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)
