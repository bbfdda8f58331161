"""Protection of a server without keys on the loopback interface against web pages in a local browser.

A page of another site may send requests to `localhost`, directly or under a host name that it points to 127.0.0.1.
Both are refused: the `Host` must be one of this server, and an `Origin`, which browsers add, must be this server's or
allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from bifolio.serve.http.auth import App, Receive, Scope, Send, send_error
from bifolio.serve.http.errors import ApiError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class HostGuard:
    """ASGI middleware: requests to other host names and from other origins are refused with a 403."""

    def __init__(self, app: App, hosts: Iterable[str], origins: Iterable[str] = ()) -> None:
        self._app = app
        self._hosts = LOOPBACK_NAMES | frozenset(hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host, origin = _header(scope, b"host"), _header(scope, b"origin")
            if _name(host or "") not in self._hosts:
                error = ApiError(403, f"this server does not answer to the host {host!r}", "bad_host")
                await send_error(send, error, scope["path"])
                return
            own = origin is not None and origin.partition("://")[2] == host
            if origin is not None and not own and origin not in self._origins and "*" not in self._origins:
                message = f"requests from the origin {origin!r} are not allowed: start the server with --cors-origin"
                await send_error(send, ApiError(403, message, "bad_origin"), scope["path"])
                return
        await self._app(scope, receive, send)


def _header(scope: Scope, name: bytes) -> str | None:
    values = [value for key, value in scope["headers"] if key == name]
    return str(values[0].decode("latin-1")) if values else None


def _name(host: str) -> str:
    """The host without its port: `[::1]:8000` and `localhost:8000`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
