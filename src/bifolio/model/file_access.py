"""Memory-mapped reading and atomic writing of files."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
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
        raise ModelFileError(f"{path} does not exist: check the path, or see `bifolio models`") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path} cannot be read ({error}): check its permissions and its disk") from error


@contextlib.contextmanager
def atomic_path(path: Path, *, overwrite: bool = True, size: int = 0) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` when the block ends without an error.

    Readers see either the old file or the complete new one; after an error the temporary file is removed. `size` is
    the number of bytes that will be written, where it is known: a disk with fewer is refused at once.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file")
    check_target(path, overwrite)
    make_folder(path.parent)
    check_space(path, size)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    os.close(handle)
    try:
        yield Path(name)
        _flush_to_disk(name)
        _give_ordinary_mode(name)
        refuse_existing(path, overwrite)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}: free space, or choose another disk"
            ) from error
        raise


@contextlib.contextmanager
def atomic_write(path: Path, *, overwrite: bool = True, size: int = 0) -> Iterator[BinaryIO]:
    """Open a file for writing, with the guarantees of `atomic_path`."""
    with atomic_path(path, overwrite=overwrite, size=size) as temporary, temporary.open("wb") as file:
        yield file


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise ConfigError if `path` exists and `overwrite` is off."""
    if not overwrite and path.exists():
        raise ConfigError(f"{path} exists already: choose another name or pass --force to replace it")


def check_target(path: Path, overwrite: bool) -> None:
    """Raise ConfigError if a file or folder `path` could not be written; nothing is left behind.

    Permissions alone do not tell (a user may write to /proc, but not create a file there), so it is tried.
    """
    refuse_existing(path, overwrite)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path} is a device and will not be replaced: choose another name")
    missing = path.parent
    try:
        if missing.exists():
            with tempfile.TemporaryFile(dir=missing):
                return
        while not missing.parent.exists():
            missing = missing.parent
        missing.mkdir()
        missing.rmdir()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror} ({missing}): choose another place") from error


def make_folder(path: Path) -> None:
    """Create a folder and its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be created: {error.strerror}: choose another place") from error


def check_space(path: Path, size: int) -> None:
    """Raise ConfigError if the disk of `path` has fewer than `size` bytes left."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ConfigError(
            f"{path} takes {size / 1e6:,.1f} MB and its disk has {free / 1e6:,.1f} MB left: free space, or choose "
            "another disk"
        )


def _flush_to_disk(path: str) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _give_ordinary_mode(path: str) -> None:
    """Set the permissions of a finished file to those of `open`; temporary files are private."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)
