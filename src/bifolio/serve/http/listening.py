"""The address and the certificate of a server: checked and reserved before the model is loaded.

The sockets are bound at once and listen when the server is ready: until then the system refuses connections, as it does
without a server.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path

from bifolio.errors import ConfigError


def bound_sockets(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """A socket for each address of the host. With `reuse_port` every front end has its own ones."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is a number from 0 to 65535, not {port}")
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in _addresses(host, port):
            try:
                sockets.append(_bound(family, (*address[:1], port, *address[2:]), reuse_port))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _refusal(host, port, error) from error
                missing = error  # `localhost` has an IPv6 address on machines without IPv6 as well
                continue
            port = sockets[0].getsockname()[1]  # where the system chose one
        if missing is not None and not sockets:
            raise _refusal(host, port, missing) from missing
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


def reserve(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """The bound sockets of a server's first front end. A port that another server shares with its own is in use."""
    if reuse_port and port:
        for each in bound_sockets(host, port):
            each.close()
    return bound_sockets(host, port, reuse_port=reuse_port)


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Refuse a certificate without its key, files that are missing, and files that do not belong together."""
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        given, other = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} needs {other}: pass both, or none")
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{option} {path} cannot be read: {error.strerror}: pass a PEM file") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"--tls-cert {certificate} and --tls-key {key} are not a certificate and its key ({reason}): pass PEM "
            "files that belong together, the key without a password"
        ) from error


def _addresses(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host} is no address of this machine: pass 127.0.0.1, or 0.0.0.0 for every network"
        ) from error
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))


def _bound(family: int, address: tuple[object, ...], reuse_port: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _refusal(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} is in use: pass --port with another one, or 0 for a free one")
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} needs a permission of this user: pass --port from 1024 on")
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return ConfigError(f"--host {host} is no address of this machine: pass 127.0.0.1, or 0.0.0.0 for every network")
    return ConfigError(f"{host}:{port} cannot be used (--host, --port): {error.strerror}")
