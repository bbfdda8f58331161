"""The tier of files: one file for each block, found again after a restart.

    FOLDER/<namespace>/ab/abcdef....block     the first two digits of the digest name a subfolder
    FOLDER/<namespace>/ab/abcdef....state

    |magic 8|length u64|namespace 16|digest 16|root 16|checksum 16|content ...|

The checksum is that of the native kernels, or blake2b without them; the magic says which.

The namespace is a digest of the model, the arithmetic and the layout of a block, so only engines that compute the same
bits share files. A file is written under another name and renamed when it is complete: a process that is killed at any
moment leaves whole files, and unfinished ones that the next start removes. A file that is damaged, cut, foreign or of
another version is a miss, and is removed. When a write fails, writing pauses and reading goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np

from bifolio.engine.tiers.tier import Key
from bifolio.errors import ConfigError
from bifolio.kernels.cpu import checksum

logger = logging.getLogger(__name__)
MAGIC, PLAIN_MAGIC = b"BIFOTIR2", b"BIFOTIR1"  # with the checksum of the native kernels, and with blake2b
HEADER = struct.Struct("<8sQ16s16s16s16s")
SUFFIXES = {".block": False, ".state": True}
UNFINISHED = ".part"
UNFINISHED_SECONDS = 3600.0  # an unfinished file of another process is removed after this time
PAUSE_SECONDS = 60.0  # without writing, after a write has failed
TOUCH_SECONDS = 60.0  # between two records of a file's use


def _new_array(num_bytes: int) -> np.ndarray:
    return np.empty(num_bytes, np.uint8)


class FileTier:
    """Content in files under one folder. Several engines may share it; each keeps its own count of bytes."""

    def __init__(
        self, folder: Path, namespace: bytes, max_bytes: int, allocate: Callable[[int], np.ndarray] = _new_array
    ) -> None:
        self._namespace = namespace
        self._max_bytes = max_bytes
        self._allocate = allocate  # memory for content that is read
        self._magic = PLAIN_MAGIC if checksum(_new_array(1)) is None else MAGIC
        self._folder = folder / namespace.hex()
        self._sizes: OrderedDict[Key, int] = OrderedDict()  # the least recently used first
        self._touched: dict[Key, float] = {}
        self._num_bytes = 0
        self._paused_until = 0.0
        self._lock = threading.Lock()
        self.num_damaged = 0
        self.num_failed_writes = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._scan()
        except OSError as error:
            raise ConfigError(
                f"kv_offload_dir {str(folder)!r} cannot be used ({error.strerror or error}): pass a folder that can be "
                "written"
            ) from error

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def is_paused(self) -> bool:
        """Whether a write has failed a moment ago."""
        return time.monotonic() < self._paused_until

    def close(self) -> None:
        """Nothing is open."""

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, key: Key, root: bytes, content: np.ndarray) -> None:
        size = HEADER.size + content.nbytes
        if key in self._sizes or self.is_paused or size > self._max_bytes:
            return
        self._make_room(size)
        path = self._path(key)
        try:
            self._write(path, self._header(key, root, content), content)
        except OSError as error:
            with self._lock:
                self._num_bytes -= size
            self.num_failed_writes += 1
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            logger.error("blocks cannot be written to %s (%s): writing pauses", self._folder, error.strerror or error)
            return
        with self._lock:
            self._sizes[key] = size

    def _header(self, key: Key, root: bytes, content: np.ndarray) -> bytes:
        check = self._checksum(key, root, content)
        return HEADER.pack(self._magic, content.nbytes, self._namespace, key.digest, root, check)

    def _write(self, path: Path, header: bytes, content: np.ndarray) -> None:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{UNFINISHED}")
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                _write_all(file, header)
                _write_all(file, content.data)
            finally:
                os.close(file)
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise

    def _make_room(self, size: int) -> None:
        """Count the bytes of a file that will be written; the least recently used files make room."""
        with self._lock:
            self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            with self._lock:
                oldest = next(iter(self._sizes), None)
            if oldest is None:
                return
            self._remove(oldest)

    # -- reading -----------------------------------------------------------------------------------------------------

    def get(self, key: Key, root: bytes, into: np.ndarray | None = None) -> np.ndarray | None:
        if key not in self._sizes:
            return None
        path = self._place(key)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            self._remove(key)  # another engine made room
            return None
        try:
            content = self._read(file, key, root, into)
        except (OSError, ValueError, struct.error) as error:
            self.num_damaged += 1
            logger.warning("%s is not used and removed: %s", path, error)
            self._remove(key)
            return None
        finally:
            os.close(file)
        self._touch(key, path)
        return content

    def _read(self, file: int, key: Key, root: bytes, into: np.ndarray | None) -> np.ndarray:
        """The content of a file; ValueError unless all of its header and content is as it was written."""
        header = os.read(file, HEADER.size)
        magic, length, namespace, digest, found_root, check = HEADER.unpack(header)
        if magic != self._magic or namespace != self._namespace or digest != key.digest or found_root != root:
            raise ValueError("it belongs to another model, prefix or key")
        if os.fstat(file).st_size != HEADER.size + length:
            raise ValueError("it has another length than its header says")
        content = into if into is not None and into.nbytes == length else self._allocate(length)
        _read_into(file, content.data)
        if self._checksum(key, root, content) != check:
            raise ValueError("its checksum is wrong")
        return content

    def _touch(self, key: Key, path: str) -> None:
        """Record the use of a file, in memory and now and then in its time, for the order after a restart."""
        now = time.monotonic()
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)
        if now - self._touched.get(key, -TOUCH_SECONDS) >= TOUCH_SECONDS:
            self._touched[key] = now
            with contextlib.suppress(OSError):
                os.utime(path)

    # -- internal ----------------------------------------------------------------------------------------------------

    def _checksum(self, key: Key, root: bytes, content: np.ndarray) -> bytes:
        quick = None if self._magic == PLAIN_MAGIC else checksum(content)
        digest = blake2b(content.data if quick is None else quick, digest_size=16, person=b"bifolio-tier")
        digest.update(self._namespace + key.digest + root + bytes([key.is_state]))
        return digest.digest()

    def _path(self, key: Key) -> Path:
        return Path(self._place(key))

    def _place(self, key: Key) -> str:
        name = key.digest.hex()
        return f"{self._folder}/{name[:2]}/{name}{'.state' if key.is_state else '.block'}"

    def _remove(self, key: Key) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(key, 0)
            self._touched.pop(key, None)
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))

    def _scan(self) -> None:
        """Find the files of earlier runs by their names; they are checked when they are read."""
        found: list[tuple[float, Key, int]] = []
        for folder in os.scandir(self._folder):
            if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
                for file in os.scandir(folder.path):
                    with contextlib.suppress(OSError, ValueError):
                        found += _scanned(file)
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self._num_bytes += size
        self._make_room(0)


def _scanned(file: os.DirEntry[str]) -> list[tuple[float, Key, int]]:
    """(Time of the last use, key, bytes) of a file; nothing for others. Old unfinished files are removed."""
    status = file.stat(follow_symlinks=False)
    if file.name.endswith(UNFINISHED):
        is_ours = not _is_running(file.name)
        if is_ours or time.time() - status.st_mtime > UNFINISHED_SECONDS:
            os.unlink(file.path)
        return []
    name, suffix = os.path.splitext(file.name)
    if suffix not in SUFFIXES or len(name) != 32 or not file.is_file(follow_symlinks=False):
        return []
    return [(status.st_mtime, Key(bytes.fromhex(name), SUFFIXES[suffix]), status.st_size)]


def _is_running(name: str) -> bool:
    """Whether the process that writes an unfinished file is alive on this host."""
    pid = int(name.removesuffix(UNFINISHED).rpartition(".")[2].partition("-")[0])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _write_all(file: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(file, view) :]


def _read_into(file: int, target: memoryview) -> None:
    while target:
        count = os.readv(file, [target])
        if not count:
            raise ValueError("it ends too early")
        target = target[count:]
