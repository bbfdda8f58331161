"""The choice of a replica for a request: the one that can begin to answer first.

    cost(replica) = `miss_weight` times the tokens of the prompt that it has not cached
                  + tokens of other prompts that wait there
                  + `request_tokens` for each request in flight

All in tokens of prefill, which the time to the first token mostly is. A token that is not cached costs more than one
that waits: it is also computed again later, and evicts others (docs/cluster.md has the measurements).

The router knows the cached blocks from KV events: per replica a bounded set of recent hashes
(`kv_events.short_hash`), to which the blocks of a prompt are added when it is routed, so that the next turn of a
conversation finds them before their events arrive. A prompt that no replica has cached goes to the least loaded one.
Thread-safe; used by the Ray router and by the simulation alike.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bifolio.cache.digests import next_digest, root_digest

MAX_BLOCKS = 131_072  # hashes that are kept of each replica
REQUEST_TOKENS = 512.0  # cost of a request in flight, in tokens of prefill
MISS_WEIGHT = 4.0  # cost of a token that is not cached, in tokens that wait


def prefix_hashes(token_ids: Sequence[int], salt: bytes, block_size: int) -> list[int]:
    """The hashes of the full blocks of a prompt, as the engines compute them; the last token is always computed."""
    digest, hashes = root_digest(salt), []
    for start in range(0, (len(token_ids) - 1) // block_size * block_size, block_size):
        digest = next_digest(digest, token_ids[start : start + block_size])
        hashes.append(int.from_bytes(digest[-8:], "big"))
    return hashes


class CachedPrefixes:
    """A bounded set of block hashes of one replica; the least recently used are forgotten first."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: dict[int, None] = {}  # in order of use

    def __len__(self) -> int:
        return len(self._known)

    def add(self, hashes: Iterable[int]) -> None:
        known = self._known
        for one in hashes:
            known.pop(one, None)
            known[one] = None
        while len(known) > self._max_blocks:
            del known[next(iter(known))]

    def remove(self, hashes: Iterable[int]) -> None:
        for one in hashes:
            self._known.pop(one, None)

    def clear(self) -> None:
        self._known.clear()

    def match(self, hashes: Sequence[int]) -> int:
        """Number of leading blocks that are known."""
        known = self._known
        for count, one in enumerate(hashes):
            if one not in known:
                return count
        return len(hashes)


class Choice(NamedTuple):
    """A replica, and the number of leading blocks that it has probably cached."""

    replica: str
    num_matched: int


@dataclass(slots=True)
class _Replica:
    cached: CachedPrefixes
    waiting_blocks: int = 0  # of prompts that were routed here and have no output yet
    num_open: int = 0  # requests in flight
    is_silent: bool = False
    block_source: str = ""  # of a prefill engine: where it serves its blocks


@dataclass(slots=True)
class _Routed:
    replica: str
    waiting_blocks: int


@dataclass(slots=True)
class PrefixRouter:
    """Chooses replicas and follows the requests until they end."""

    max_blocks: int = MAX_BLOCKS
    block_size: int = 16  # tokens of a block of the engines
    request_tokens: float = REQUEST_TOKENS
    miss_weight: float = MISS_WEIGHT
    _replicas: dict[str, _Replica] = field(init=False, default_factory=dict)
    _routed: dict[str, _Routed] = field(init=False, default_factory=dict)  # by request
    _lock: threading.RLock = field(init=False, default_factory=threading.RLock)

    # -- replicas ------------------------------------------------------------------------------------------------------
    def set_replicas(self, names: Iterable[str]) -> None:
        """The replicas that exist now; others, and their requests, are forgotten."""
        wanted = set(names)
        with self._lock:
            for name in [name for name in self._replicas if name not in wanted]:
                del self._replicas[name]
            for request_id in [key for key, routed in self._routed.items() if routed.replica not in wanted]:
                del self._routed[request_id]
            for name in sorted(wanted - self._replicas.keys()):
                self._replicas[name] = _Replica(CachedPrefixes(self.max_blocks))

    @property
    def replicas(self) -> list[str]:
        with self._lock:
            return list(self._replicas)

    def num_open(self, replica: str) -> int:
        """Requests that were routed to a replica and have not ended."""
        with self._lock:
            found = self._replicas.get(replica)
            return 0 if found is None else found.num_open

    def set_silent(self, replica: str, is_silent: bool) -> None:
        """Rank a replica that does not answer behind all others, until it does."""
        with self._lock:
            found = self._replicas.get(replica)
            if found is not None:
                found.is_silent = is_silent

    def set_block_sources(self, sources: Mapping[str, str]) -> None:
        """Where prefill engines serve their blocks, by replica."""
        with self._lock:
            for name, source in sources.items():
                if name in self._replicas:
                    self._replicas[name].block_source = source

    def block_source(self, replica: str) -> str:
        """Where a replica serves its blocks; empty if it serves none, is gone, or does not answer."""
        with self._lock:
            found = self._replicas.get(replica)
            return "" if found is None or found.is_silent else found.block_source

    def stored(self, replica: str, hashes: Iterable[int]) -> None:
        self._change(replica, lambda cached: cached.add(hashes))

    def removed(self, replica: str, hashes: Iterable[int]) -> None:
        self._change(replica, lambda cached: cached.remove(hashes))

    def cleared(self, replica: str) -> None:
        self._change(replica, CachedPrefixes.clear)

    def _change(self, replica: str, change: Callable[[CachedPrefixes], None]) -> None:
        with self._lock:
            found = self._replicas.get(replica)
            if found is not None:
                change(found.cached)

    # -- requests ------------------------------------------------------------------------------------------------------
    def rank(self, hashes: Sequence[int], loads: Mapping[str, int] | None = None) -> list[Choice]:
        """All replicas, the best first. `loads`: requests in flight where others than this router send some, too."""
        with self._lock:
            ranked = []
            for name, replica in self._replicas.items():
                matched = replica.cached.match(hashes)
                num_open = max(replica.num_open, 0 if loads is None else loads.get(name, 0))
                blocks = self.miss_weight * (len(hashes) - matched) + replica.waiting_blocks
                cost = blocks * self.block_size + self.request_tokens * num_open
                ranked.append((replica.is_silent, cost, num_open, name, matched))
            ranked.sort()
            return [Choice(name, matched) for _, _, _, name, matched in ranked]

    def begin(self, request_id: str, replica: str, hashes: Sequence[int]) -> None:
        """Record that a request was sent to a replica."""
        with self._lock:
            found = self._replicas.get(replica)
            if found is None:
                return
            new = len(hashes) - found.cached.match(hashes)
            found.cached.add(hashes)
            found.waiting_blocks += new
            found.num_open += 1
            self._routed[request_id] = _Routed(replica, new)

    def first_output(self, request_id: str) -> None:
        """Record that the prompt of a request is computed."""
        with self._lock:
            routed = self._routed.get(request_id)
            if routed is not None:
                self._replicas[routed.replica].waiting_blocks -= routed.waiting_blocks
                routed.waiting_blocks = 0

    def end(self, request_id: str) -> None:
        with self._lock:
            self.first_output(request_id)
            routed = self._routed.pop(request_id, None)
            if routed is not None:
                self._replicas[routed.replica].num_open -= 1


class LeastLoadedRouter(PrefixRouter):
    """Chooses the replica with the fewest requests in flight."""

    def rank(self, hashes: Sequence[int], loads: Mapping[str, int] | None = None) -> list[Choice]:
        with self._lock:
            ranked = sorted((replica.is_silent, replica.num_open, name) for name, replica in self._replicas.items())
            return [Choice(name, 0) for _, _, name in ranked]


class RandomRouter(PrefixRouter):
    """Chooses any replica, with a fixed seed."""

    chance = random.Random(0)

    def rank(self, hashes: Sequence[int], loads: Mapping[str, int] | None = None) -> list[Choice]:
        names = self.replicas
        self.chance.shuffle(names)
        return [Choice(name, 0) for name in names]


class RoundRobinRouter(PrefixRouter):
    """Chooses the replicas in turn."""

    turn = 0

    def rank(self, hashes: Sequence[int], loads: Mapping[str, int] | None = None) -> list[Choice]:
        names = self.replicas
        type(self).turn += 1
        first = self.turn % max(len(names), 1)
        return [Choice(name, 0) for name in [*names[first:], *names[:first]]]


POLICIES: dict[str, type[PrefixRouter]] = {
    "prefix": PrefixRouter,
    "least-loaded": LeastLoadedRouter,
    "round-robin": RoundRobinRouter,
    "random": RandomRouter,
}
