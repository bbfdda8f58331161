"""The first messages between a remote engine client and an engine host: both prove that they know a shared secret.

    host   -> client   Challenge(version, nonce a)
    client -> host     Attach(nonce b, prefix of its ids, HMAC of "client", a, b, prefix)
    host   -> client   Welcome(HMAC of "engine", a, b)

The secret itself never travels, and a recorded exchange is of no use for another connection. Messages after the
handshake are neither encrypted nor signed: hosts belong to one private network, or a tunnel lies between them.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256
from pathlib import Path

import msgspec

from bifolio.api import messages as m
from bifolio.errors import ConfigError

VERSION = 1  # of the messages; both ends must have the same
HANDSHAKE_BYTES = 4096  # of a frame before that
MIN_SECRET_BYTES = 16
PREFIX_CHARS = 16  # of the ids of a client


class Challenge(msgspec.Struct, tag="challenge"):
    version: int
    nonce: bytes


class Attach(msgspec.Struct, tag="attach"):
    nonce: bytes
    id_prefix: str  # of all ids of this client
    proof: bytes


class Welcome(msgspec.Struct, tag="welcome"):
    proof: bytes


class Lost(msgspec.Struct, tag="lost"):
    """The engine process ended, and all requests with it; a Hello follows when it is back."""


FromHost = (
    Challenge | Welcome | m.Hello | m.Refused | m.Updates | m.Embedding | m.Picture | m.Recalled | m.BranchReply
    | m.Controlled | m.Beat | Lost
)  # fmt: skip
ToHost = Attach | m.Start | m.Abort | m.Stop | m.Embed | m.Look | m.Remember | m.Recall | m.BranchCall | m.Control
from_host_decoder = msgspec.msgpack.Decoder(FromHost)
to_host_decoder = msgspec.msgpack.Decoder(ToHost)


def new_nonce() -> bytes:
    return secrets.token_bytes(32)


def client_proof(secret: bytes, challenge: bytes, nonce: bytes, id_prefix: str) -> bytes:
    return hmac.digest(secret, b"client" + challenge + nonce + id_prefix.encode(), sha256)


def host_proof(secret: bytes, challenge: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"engine" + challenge + nonce, sha256)


def is_valid(attach: Attach, secret: bytes, challenge: bytes) -> bool:
    """Whether a client knows the secret and has a prefix of the right form."""
    if len(attach.nonce) != 32 or len(attach.id_prefix) != PREFIX_CHARS or not attach.id_prefix.isalnum():
        return False
    return hmac.compare_digest(attach.proof, client_proof(secret, challenge, attach.nonce, attach.id_prefix))


def read_secret(path: Path) -> bytes:
    """The secret of a file, without the white space around it."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the secret {path} cannot be read: {error}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"the secret in {path} has {len(secret)} bytes: write at least {MIN_SECRET_BYTES}")
    return secret


def parse_address(text: str) -> tuple[str, int]:
    """'tcp://10.0.0.2:7000' or '10.0.0.2:7000' -> ('10.0.0.2', 7000)."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"{text!r} is not an address: write HOST:PORT")
    return host.strip("[]"), int(port)
