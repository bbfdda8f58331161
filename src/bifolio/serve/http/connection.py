"""The open connections of a server, and limits on them before a request has come through.

A connection belongs to a share: the address that it comes from, and once a request on it has named a valid key, that
key. A share has a limit of its own, below that of all together. Connections without a complete request make room for
new ones: those of the share with the most connections first, so one client cannot use up those of another.

    silent ──first byte──▶ head ──▶ body ──last byte──▶ busy ──answer──▶ silent
    |<------------ may be closed for others ---------->|
"""

from __future__ import annotations

import contextlib
import resource
from collections import Counter
from enum import IntEnum
from typing import Protocol

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
HEAD_SECONDS = 15.0  # from the first byte of a request, or from the connection, to the end of its headers
LINGER_SECONDS = 1.0  # in which a closed connection sends its last bytes
MAX_BODIES = 512  # requests whose bodies are arriving
MAX_BODIES_PER_SHARE = 128
SPARE_FILES = 512  # descriptors for other purposes than connections
SPARED = frozenset({b"/health", b"/ready"})  # answered on any connection


class Stage(IntEnum):
    """How far the request on a connection has come; earlier stages make room first."""

    SILENT = 0
    HEAD = 1
    BODY = 2
    BUSY = 3  # it has arrived and is being answered


class Droppable(Protocol):
    """A connection, for `Connections`."""

    @property
    def stage(self) -> Stage: ...

    def drop(self) -> None:
        """Close it, to make room for others."""


class Connections:
    """Decides which connections stay. Lives on the event loop."""

    def __init__(
        self,
        most: int,
        most_per_share: int,
        most_bodies: int = MAX_BODIES,
        most_bodies_per_share: int = MAX_BODIES_PER_SHARE,
    ) -> None:
        self._most = most
        self._most_per_share = most_per_share
        self._most_bodies = most_bodies
        self._most_bodies_per_share = most_bodies_per_share
        self._open: dict[Droppable, str] = {}  # connection -> share; the oldest first
        self._bodies: dict[Droppable, None] = {}  # whose bodies are arriving; the oldest first

    def add(self, connection: Droppable, share: str) -> bool:
        """Register a connection; False if it may only ask for `SPARED` paths, because there are too many."""
        self._open[connection] = share
        return self._has_room(connection)

    def claim(self, connection: Droppable, share: str) -> bool:
        """A request on a connection has named a key; False if that key has too many connections."""
        if connection not in self._open or self._open[connection] == share:
            return True
        self._open[connection] = share
        return self._has_room(connection)

    def remove(self, connection: Droppable) -> None:
        self._open.pop(connection, None)
        self._bodies.pop(connection, None)

    def begin_body(self, connection: Droppable) -> None:
        """The body of a request is arriving; if too many are, the one of its share that began first is dropped."""
        if connection not in self._open or connection in self._bodies:
            return
        self._bodies[connection] = None
        counts = Counter(self._open[known] for known in self._bodies)
        share = self._open[connection]
        if counts[share] <= self._most_bodies_per_share:
            if len(self._bodies) <= self._most_bodies:
                return
            share = counts.most_common(1)[0][0]
        self._drop(next(known for known in self._bodies if self._open[known] == share))

    def end_body(self, connection: Droppable) -> None:
        self._bodies.pop(connection, None)

    def _has_room(self, newcomer: Droppable) -> bool:
        """Whether a connection may stay, after another one was dropped if need be."""
        counts = Counter(self._open.values())
        own = self._open[newcomer]
        if counts[own] > self._most_per_share:
            return self._drop_one(own, newcomer)
        if len(self._open) <= self._most:
            return True
        heavier = [share for share, count in counts.most_common() if count > counts[own] or share == own]
        return any(self._drop_one(share, newcomer) for share in heavier)

    def _drop_one(self, share: str, newcomer: Droppable) -> bool:
        """Drop the connection of a share whose request has come the least far, and of those the oldest."""
        candidates = [known for known, other in self._open.items() if other == share and known is not newcomer]
        found = min(candidates, key=lambda known: known.stage, default=None)
        if found is None or found.stage is Stage.BUSY:
            return False
        self._drop(found)
        return True

    def _drop(self, connection: Droppable) -> None:
        self.remove(connection)
        connection.drop()


def allow_files(num_connections: int) -> None:
    """Raise the limit of this process on open files, where the system lets it, to that of its connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
