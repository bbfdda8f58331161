"""Connections of strangers: those that have not proved yet that they may connect.

Every port has one `Handshakes`. A newcomer is always let in; if there are too many, the oldest stranger of the network
with the most strangers is closed. So strangers never count as clients, and a client that proves itself at once is
admitted however many silent connections another host opens.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress

HANDSHAKE_SECONDS = 5.0  # that a connection gets to prove that it may connect
MAX_STRANGERS = 128  # of one port


def network_of(address: str) -> str:
    """The unit in which clients without keys are counted: an IPv4 address, or a /64 of IPv6, which one host may own."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))


class Handshakes:
    """The strangers of one port. Thread-safe; `close` of a stranger is called by the thread that lets a newcomer in."""

    def __init__(self, most: int = MAX_STRANGERS) -> None:
        self._most = most
        self._strangers: dict[Hashable, tuple[str, Callable[[], object]]] = {}  # the oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._strangers)

    def begin(self, connection: Hashable, address: str, close: Callable[[], object]) -> None:
        """Let a newcomer in; `close` is called if it has to make room for a later one."""
        with self._lock:
            self._strangers[connection] = (network_of(address), close)
            crowded_out = self._pop_oldest() if len(self._strangers) > self._most else None
        if crowded_out is not None:
            with suppress(OSError):  # it is gone already
                crowded_out()

    def end(self, connection: Hashable) -> bool:
        """A connection has proved itself or has ended; False if it was closed before."""
        with self._lock:
            return self._strangers.pop(connection, None) is not None

    def _pop_oldest(self) -> Callable[[], object]:
        newest = next(reversed(self._strangers))
        networks = Counter(network for known, (network, _) in self._strangers.items() if known != newest)
        busiest = networks.most_common(1)[0][0]
        oldest = next(known for known, (network, _) in self._strangers.items() if network == busiest)
        return self._strangers.pop(oldest)[1]
