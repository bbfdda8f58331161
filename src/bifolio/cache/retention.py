"""Blocks that are evicted last: the prefixes of conversations that clients will continue.

A protected block is still free: it is allocated when no other free block is left, so hints never keep a sequence from
running. Each client protects at most a quarter of the cache and all together a half; beyond that, the conversations
that were not used for the longest time lose their protection.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from bifolio.images import PromptImage
from bifolio.sessions import SessionHint

SHARE_OF_OWNER, SHARE_OF_ALL = 0.25, 0.5  # of the blocks
MAX_SESSIONS, MAX_SESSIONS_PER_OWNER = 4096, 256


@dataclass(slots=True, eq=False)
class Session:
    """A conversation as of its last request."""

    owner: str
    hint: SessionHint
    digests: tuple[bytes, ...]  # of its full blocks
    num_tokens: int
    salt: bytes
    expires: float  # of `time.monotonic`
    token_ids: array[int] | None = None  # of a pinned one
    adapter: bytes = b""  # digest of the adapter of its blocks; empty: of the base
    images: tuple[PromptImage, ...] = ()  # of a pinned one
    num_protected: int = 0  # leading blocks


def victim(evictable: OrderedDict[int, None], digests: Sequence[bytes | None], protected: Container[bytes]) -> int:
    """Remove and return the entry to evict: the first without protection, else the first."""
    if protected:
        for _ in range(len(evictable)):
            first = next(iter(evictable))
            if digests[first] not in protected:
                break
            evictable.move_to_end(first)
    return evictable.popitem(last=False)[0]


class Retention:
    """The conversations of all clients; the block manager holds its lock during every call."""

    def __init__(self, num_blocks: int) -> None:
        self.protected: Counter[bytes] = Counter()  # digest -> conversations that protect it
        self._most, self._most_per_owner = int(num_blocks * SHARE_OF_ALL), int(num_blocks * SHARE_OF_OWNER)
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()  # the least recently used first
        self._next_expiry = math.inf

    def sessions(self) -> list[Session]:
        """The newest first."""
        return list(reversed(self._sessions.values()))

    def has(self, owner: str, name: str) -> bool:
        return (owner, name) in self._sessions

    def note(self, session: Session) -> None:
        """Protect the blocks of a conversation instead of those of its earlier requests."""
        self.release(session.owner, session.hint.name)
        self._sessions[session.owner, session.hint.name] = session
        own = [one for one in self._sessions.values() if one.owner == session.owner]
        for oldest in own[:-MAX_SESSIONS_PER_OWNER]:
            self.release(oldest.owner, oldest.hint.name)
        while len(self._sessions) > MAX_SESSIONS:
            self.release(*next(iter(self._sessions)))
        session.num_protected = min(len(session.digests), self._most_per_owner)
        self.protected.update(session.digests[: session.num_protected])
        self._next_expiry = min(self._next_expiry, session.expires)
        self._bound([one for one in own if one is not session], self._most_per_owner - session.num_protected)
        self._bound([one for one in self._sessions.values() if one is not session], self._most - session.num_protected)

    def release(self, owner: str, name: str) -> bool:
        """Forget a conversation; its blocks are evicted as all others are."""
        session = self._sessions.pop((owner, name), None)
        if session is not None:
            self._unprotect(session)
        return session is not None

    def sweep(self) -> None:
        """End the protection of conversations whose time is over."""
        now = time.monotonic()
        if now < self._next_expiry:
            return
        for session in self._sessions.values():
            if session.expires <= now:
                self._unprotect(session)
        self._next_expiry = min((one.expires for one in self._sessions.values() if one.num_protected), default=math.inf)

    def _bound(self, sessions: Iterable[Session], most: int) -> None:
        """End the protection of the oldest of these until all together have at most that many blocks."""
        sessions = list(sessions)
        taken = sum(one.num_protected for one in sessions)
        for oldest in sessions:
            if taken <= most:
                return
            taken -= oldest.num_protected
            self._unprotect(oldest)

    def _unprotect(self, session: Session) -> None:
        for digest in session.digests[: session.num_protected]:
            self.protected[digest] -= 1
            if self.protected[digest] <= 0:
                del self.protected[digest]
        session.num_protected = 0
