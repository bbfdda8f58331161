"""The files of clients' snapshots: one folder for each model and key, names that are checked, a limit on bytes.

    FOLDER/<model 16>/<digest of the key's salt>/<name>.snapshot        saved by a client
    FOLDER/<model 16>/<digest of the key's salt>/<name>.response        a stored response that the server saved itself
    FOLDER/<model 16>/<digest of the key's salt>/<name>.session         a pinned conversation, saved at the end

Files of the last two kinds make room for others, the oldest first; files of clients are never removed for them.
"""

from __future__ import annotations

import contextlib
import os
import re
from hashlib import blake2b
from pathlib import Path

from bifolio.api.messages import SnapshotInfo, SnapshotSettings
from bifolio.cache.retention import MAX_SESSIONS_PER_OWNER
from bifolio.engine.tiers.snapshots import Snapshot, read_header, write_snapshot
from bifolio.errors import ConfigError, FaultKind, RequestError, SnapshotError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SAVED, RESPONSE, SESSION = ".snapshot", ".response", ".session"
MAX_FILES_PER_KEY = 4096


class UnknownSnapshotError(RequestError):
    """There is no snapshot of this name for this key."""

    fault = FaultKind.UNKNOWN_SNAPSHOT


class SnapshotFiles:
    """Called from one thread."""

    def __init__(self, settings: SnapshotSettings, model: str) -> None:
        self._max_bytes = settings.max_bytes
        self._folder = Path(settings.folder).expanduser() / model[-16:]
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"snapshot_dir (--snapshot-dir) {settings.folder!r} cannot be used ({error.strerror or error}): pass a "
                "folder that can be written"
            ) from error

    def path(self, salt: bytes, name: str, suffix: str = SAVED) -> Path:
        """The place of a name; RequestError if it is none."""
        if not NAME.fullmatch(name):
            raise RequestError(
                "the name of a snapshot has at most 128 letters, digits, dots, hyphens and underscores, and begins "
                "with a letter or a digit: choose another"
            )
        return self._of_key(salt) / (name + suffix)

    def find(self, salt: bytes, name: str) -> Path:
        """The file of a name."""
        path = self.path(salt, name)
        if not path.is_file() or path.is_symlink():
            raise UnknownSnapshotError(f"there is no snapshot {name!r} of this key: GET /v1/snapshots lists them")
        return path

    def all_of(self, salt: bytes) -> list[SnapshotInfo]:
        """All of a key, the oldest first."""
        return [self.info(path) for _, path in sorted(self._files(salt)) if path.suffix in (SAVED, RESPONSE)]

    def sessions_of(self, salt: bytes) -> list[SnapshotInfo]:
        """The pinned conversations of a key, under their own names, the newest first."""
        found = []
        files = sorted((one for one in self._files(salt) if one[1].suffix == SESSION), reverse=True)
        for _, path in files[:MAX_SESSIONS_PER_OWNER]:
            with contextlib.suppress(SnapshotError, KeyError, TypeError, OSError):  # damaged: found by its next request
                found.append(self.info(path, str(read_header(path)["notes"]["session"])))
        return found

    def info(self, path: Path, name: str | None = None) -> SnapshotInfo:
        status = path.stat()
        try:
            count = len(read_header(path)["token_ids"])
        except (SnapshotError, KeyError, TypeError):
            count = 0  # damaged: listed, so that it can be deleted
        return SnapshotInfo(
            path.stem if name is None else name, count, status.st_size, status.st_mtime, path.suffix == RESPONSE
        )

    def write(self, path: Path, snapshot: Snapshot, salt: bytes) -> SnapshotInfo:
        """Write a file if the key has room for it."""
        needed = sum(block.nbytes for block in snapshot.blocks) + (
            0 if snapshot.state is None else snapshot.state.nbytes
        )
        path.parent.mkdir(exist_ok=True, mode=0o700)
        self._make_room(path, needed, salt)
        try:
            write_snapshot(path, snapshot)
        except SnapshotError as error:
            raise RequestError(str(error)) from error
        info = self.info(path)
        if info.num_bytes > self._max_bytes:
            self.remove(path)
            raise RequestError(self._full(info.num_bytes, 0))
        return info

    def remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()

    def _of_key(self, salt: bytes) -> Path:
        return self._folder / blake2b(salt, digest_size=16, person=b"bifolio-key").hexdigest()

    def _files(self, salt: bytes) -> list[tuple[float, Path]]:
        found = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._of_key(salt)):
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False):
                        found.append((entry.stat().st_mtime, Path(entry.path)))
        return found

    def _make_room(self, path: Path, needed: int, salt: bytes) -> None:
        """Remove saved responses, the oldest first; RequestError if that is not enough."""
        files = [(time, other) for time, other in sorted(self._files(salt)) if other != path]
        taken, count = sum(other.stat().st_size for _, other in files), len(files)
        for _, other in files:
            if taken + needed <= self._max_bytes and count < MAX_FILES_PER_KEY:
                return
            if other.suffix != SAVED:
                taken, count = taken - other.stat().st_size, count - 1
                self.remove(other)
        if taken + needed > self._max_bytes or count >= MAX_FILES_PER_KEY:
            raise RequestError(self._full(needed, taken))

    def _full(self, needed: int, taken: int) -> str:
        return (
            f"the snapshot takes {needed} bytes and the others of this key {taken} of {self._max_bytes} "
            f"(--snapshot-bytes), at most {MAX_FILES_PER_KEY} files: delete some"
        )
