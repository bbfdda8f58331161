"""Limits on a connection before a request has come through: size and number of headers, and the time they take."""

from __future__ import annotations

from collections import Counter
from typing import Any

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
HEAD_SECONDS = 15.0  # from the first byte of a request, or from the connection, to the end of its headers
SILENT_SECONDS = 1.0  # without a byte, after which a connection makes room for others
SPARED = frozenset({b"/health", b"/ready"})  # answered on any connection


class Connections:
    """The open connections. Silent ones make room for new ones, those of the busiest address first."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._open: dict[Any, str] = {}  # connection -> address; the oldest first
        self._per_address: Counter[str] = Counter()

    def add(self, connection: Any, address: str) -> bool:
        """Register a connection; False if it may only ask for `SPARED` paths, because there are too many."""
        self._open[connection] = address
        self._per_address[address] += 1
        if self._per_address[address] > self._most_per_address:
            return self._close_silent(address)
        if len(self._open) > self._most:
            return self._close_silent(self._per_address.most_common(1)[0][0])
        return True

    def remove(self, connection: Any) -> None:
        address = self._open.pop(connection, None)
        if address is not None:
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def _close_silent(self, address: str) -> bool:
        """Close the oldest connection of an address on which no request has begun; the last one is the new one."""
        newest = next(reversed(self._open))
        for connection, known in self._open.items():
            if known == address and connection is not newest and connection.is_silent:
                connection.close_silent()
                self.remove(connection)
                return True
        return False


def make_protocol(connections: Connections) -> Any:
    """A class for uvicorn's `http` setting."""
    try:
        from bifolio.serve.bounded_protocol import BoundedProtocol
    except ImportError:
        return "h11"  # slower; has a limit on the size of headers of its own
    return type("ServerProtocol", (BoundedProtocol,), {"open_connections": connections})
