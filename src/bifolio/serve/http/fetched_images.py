"""Images of URLs: fetched from hosts that the operator allows, never from private addresses that a name points to.

A name is resolved once, its addresses are checked, and the connection goes to the checked one, so that a name that
changes meanwhile reaches no other. Redirects lead to allowed hosts alone. Addresses on the list itself may be private.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from bifolio.errors import ConfigError, RequestError
from bifolio.model.vision.decoding import MAX_BYTES

MAX_REDIRECTS = 3
MAX_LENGTH = 2048  # characters of a URL
SECONDS = 10.0  # for all of an image
AT_ONCE = 4  # slow hosts hold no thread that other requests need
PORTS = {"http": 80, "https": 443}
_threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="images")


class Source(NamedTuple):
    """A URL in parts."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def is_default(self) -> bool:
        return self.port == PORTS[self.scheme]

    @property
    def shown(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.is_default else f"{name}:{self.port}"


def is_remote(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def checked_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """The hosts of `--allow-image-urls`: names or addresses, with a port where it is not that of http or https."""
    found = []
    for host in hosts:
        parts = urlsplit(f"//{host}")
        try:
            is_plain = bool(parts.hostname) and not (parts.path or parts.query or parts.username or "*" in host)
            port = parts.port
        except ValueError:
            is_plain, port = False, None
        if not is_plain or parts.hostname is None:
            raise ConfigError(f"--allow-image-urls takes a HOST or HOST:PORT, not {host!r}")
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        found.append(name if port is None else f"{name}:{port}")
    return tuple(found)


async def fetched(url: str, hosts: Sequence[str]) -> bytes:
    """The bytes of an image; a RequestError says why there are none."""
    return await asyncio.get_running_loop().run_in_executor(_threads, _fetch, url, tuple(hosts))


def _fetch(url: str, hosts: tuple[str, ...]) -> bytes:
    end = time.monotonic() + SECONDS
    for _ in range(MAX_REDIRECTS + 1):
        source = source_of(url, hosts)
        try:
            found = _answer(source, end)
        except RequestError:
            raise
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            raise _unreachable(source, end, error) from error
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise RequestError(f"the url of an image leads to more than {MAX_REDIRECTS} others: pass the last one")


def _unreachable(source: Source, end: float, error: Exception) -> RequestError:
    if time.monotonic() >= end or isinstance(error, TimeoutError):
        return RequestError(f"{source.shown} took more than {SECONDS:.0f} seconds for an image: pass the image itself")
    return RequestError(f"the image could not be fetched from {source.shown}: {type(error).__name__}")


def source_of(url: str, hosts: Sequence[str]) -> Source:
    """The parts of a URL whose host is allowed."""
    if len(url) > MAX_LENGTH:
        raise RequestError(f"the url of an image has {len(url)} characters and {MAX_LENGTH} are allowed")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError:
        port, host, parts = None, None, urlsplit("")
    scheme = parts.scheme.lower()
    if host is None or scheme not in PORTS or parts.username is not None or not url.isascii() or not url.isprintable():
        raise RequestError(f"the url of an image is {url[:40]!r}: pass http or https, without a user or other signs")
    query = f"?{parts.query}" if parts.query else ""
    source = Source(scheme, host, port or PORTS[scheme], f"{parts.path or '/'}{query}".replace(" ", "%20"))
    if source.shown.lower() not in {each.lower() for each in hosts}:
        raise RequestError(
            f"images of the host {source.shown[:80]!r} are not allowed here: pass the image itself, as data:image/png;"
            "base64,..., or start the server with --allow-image-urls"
        )
    return source


def address_of(source: Source) -> str:
    """The address of a host; a name that points to a private one is refused."""
    try:
        ip_address(source.host)
    except ValueError:
        pass
    else:
        return source.host  # on the list of hosts
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)]
    if not found or not all(_is_public(address) for address in found):
        raise RequestError(f"{source.shown} has a private address: images are fetched from public ones")
    return found[0]


def _is_public(address: str) -> bool:
    parsed = ip_address(address.partition("%")[0])
    inner = getattr(parsed, "ipv4_mapped", None) or parsed
    return inner.is_global and not inner.is_multicast


def _answer(source: Source, end: float) -> bytes | str:
    """The body of an answer, or the URL that it redirects to."""
    connection = http.client.HTTPConnection(source.host, source.port)
    connection.sock = own = _connected(source, end)
    limit = threading.Timer(_left(end), partial(_shut, own))  # however slowly the host sends
    limit.start()
    try:
        headers = {"Host": source.shown, "Accept": "image/*", "User-Agent": "bifolio", "Connection": "close"}
        connection.request("GET", source.path, headers=headers)
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            return response.getheader("location") or ""
        if response.status != 200:
            raise RequestError(f"{source.shown} answered {response.status} for an image: pass the image itself")
        return _body(source, response, end)
    finally:
        limit.cancel()
        connection.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _connected(source: Source, end: float) -> socket.socket:
    """A connection to the checked address; certificates are those of the name."""
    plain = socket.create_connection((address_of(source), source.port), timeout=_left(end))
    if source.scheme == "http":
        return plain
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=source.host)
    except BaseException:
        plain.close()
        raise


def _body(source: Source, response: http.client.HTTPResponse, end: float) -> bytes:
    found = bytearray()
    while part := response.read1(1 << 16):
        found += part
        if len(found) > MAX_BYTES:
            raise RequestError(f"the image of {source.shown} has more than {MAX_BYTES} bytes: pass a smaller one")
    _left(end)  # a connection that was shut at the limit ends like a short body
    if response.length:
        raise RequestError(f"{source.shown} sent a part of the image: try again, or pass the image itself")
    return bytes(found)


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
