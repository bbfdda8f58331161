"""Bearer keys. Every route is guarded except those named here; the guard decides by the path alone."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError
from bifolio.handshakes import network_of
from bifolio.serve.http.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/kv_transfer"})  # and the page's own files, see `Guard`
ADMIN_PATHS = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"}
)  # a POST to them needs an admin key
PLAIN_KEY_PATHS = (b"/v1/messages",)  # Anthropic's clients send `x-api-key`
MAX_KEY_BYTES = 1024
SECRET_BYTES = 32

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of a key."""

    name: str  # for metrics and logs; reveals nothing about the key
    salt: bytes  # cached prefixes are shared under the same salt only: the time of a hit would reveal other prompts
    share: str = ""  # clients with equal shares divide one part of the machine: the key, or without keys the address

    @property
    def has_key(self) -> bool:
        return bool(self.salt)


def new_secret() -> bytes:
    """A secret for each start of a server: digests of keys have no use elsewhere."""
    return secrets.token_bytes(SECRET_BYTES)


def kept_secret(folder: Path) -> bytes:
    """The secret in a folder, made on first use: a server that is started again finds the blocks of its keys."""
    path = folder / "secret"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = folder / f"secret.{os.getpid()}"
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(file, new_secret())
        finally:
            os.close(file)
        try:
            os.link(unfinished, path)  # of servers that start at the same time, the first one's
        except FileExistsError:
            pass
        finally:
            os.unlink(unfinished)
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"kv_offload_dir (--kv-offload-dir) {str(folder)!r} cannot hold the server's secret "
            f"({error.strerror or error}): pass a folder that can be written"
        ) from error
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} is no secret of a server: remove it, and blocks of API keys are computed again")
    return secret


ANONYMOUS = Tenant("anonymous", b"")  # every client of a server without keys


class KeyRing:
    """The accepted keys; without any, every client is accepted."""

    def __init__(self, keys: Iterable[str] = (), secret: bytes | None = None) -> None:
        """`secret` is that of another front end of the same server."""
        self._secret = secret or new_secret()
        self._tenants: list[tuple[bytes, Tenant]] = []
        for number, key in enumerate(dict.fromkeys(keys)):
            digest = self._digest(key.encode())
            self._tenants.append((digest, Tenant(f"key-{number}", digest[:16], f"key-{number}")))

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def find(self, header: bytes | None, plain: bytes | None = None) -> Tenant | None:
        """The tenant of an `Authorization` header, or of an `x-api-key` header, which holds the `plain` key.

        All keys are compared, in time that does not depend on the key.
        """
        if not self._tenants:
            return ANONYMOUS
        scheme, _, key = (header or b"").partition(b" ")
        if header is None and plain is not None:
            scheme, key = b"bearer", plain
        if scheme.lower() != b"bearer" or len(key) > MAX_KEY_BYTES:
            return None
        digest = self._digest(key.strip())
        found = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def tenant_of(self, path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Tenant | None:
        """The tenant of a request; None if it has no valid key, or several."""
        takes_plain = path.startswith(PLAIN_KEY_PATHS)
        bearers, plain = list[bytes](), list[bytes]()
        for name, value in headers:
            if name == b"authorization":
                bearers.append(value)
            elif takes_plain and name == b"x-api-key":
                plain.append(value)
        if len(bearers) > 1 or len(plain) > 1:
            return None
        return self.find(bearers[0] if bearers else None, plain[0] if plain else None)

    def _digest(self, key: bytes) -> bytes:
        return hmac.new(self._secret, key, hashlib.sha256).digest()


def read_keys(keys: Iterable[str], files: Iterable[Path]) -> list[str]:
    """Keys from the command line and from files, one a line; empty lines and lines with # are skipped."""
    found = list(keys)
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--api-key-file {file} cannot be read ({error}): pass a text file with one key a line"
            ) from error
        read = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not read:
            raise ConfigError(f"--api-key-file {file} holds no key: write one a line")
        found += read
    for key in found:
        if len(key) < 8 or len(key) > MAX_KEY_BYTES or not key.isascii() or any(c.isspace() for c in key):
            raise ConfigError(
                f"an API key has 8 to {MAX_KEY_BYTES} ASCII characters without spaces, and one has not: write another"
            )
    return found


class Guard:
    """ASGI middleware: the outermost, so that not even a wrong path is answered without a key."""

    def __init__(
        self, app: App, keys: KeyRing, open_paths: Iterable[str] = (), admin_keys: KeyRing | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys or KeyRing()
        self._open = OPEN_PATHS | frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        is_admin = scope["path"] in ADMIN_PATHS and scope["method"] == "POST"
        keys = self._admin_keys if is_admin and self._admin_keys else self._keys
        tenant = keys.tenant_of(scope["path"].encode(), scope["headers"])
        if tenant is None and not (scope["path"] in self._open and scope["method"] in ("GET", "HEAD")):
            error = ApiError(401, "pass a valid key as 'Authorization: Bearer KEY'", "invalid_api_key")
            await send_error(send, error, scope["path"])
            return
        if is_admin and not self._admin_keys:
            error = ApiError(403, "this path changes the server: start it with --admin-key-file", "admin_key_needed")
            await send_error(send, error, scope["path"])
            return
        if tenant is None or not tenant.has_key:
            tenant = replace(ANONYMOUS, share=network_of((scope.get("client") or ("",))[0]))
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


async def send_error(send: Send, error: ApiError, path: str = "") -> None:
    """Send an error in the shape of the protocol that the path belongs to."""
    body = error.body(path)
    headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
