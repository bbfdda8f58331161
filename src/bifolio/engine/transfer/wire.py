"""The bytes between a decode engine and a prefill engine: TCP, and shared memory for blocks on one host.

    prefill -> decode   |nonce 16|
    decode -> prefill   |length u32|JSON: version, fingerprint, salt, first, proof, room|tokens i32 ...|
    prefill -> decode   |length u32|JSON: error, or block_bytes, is_shared|
    prefill -> decode   |kind u8|index u32|checksum 16|block|    for each block; then kind END and the number of blocks;
                                                                 kind WAIT without a block while the next is computed
    prefill -> decode   |kind STATE|index u32|checksum 16|state| the recurrent state after so many blocks of the prompt
    decode -> prefill   |1|                                      for each block that was copied out of shared memory

`proof` is an HMAC of the nonce under a secret that both sides have. A block whose checksum is wrong ends the transfer.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.errors import TransferError
from bifolio.handshakes import HANDSHAKE_SECONDS

VERSION = 2
NONCE_BYTES = 16
HEADER = struct.Struct("<BI16s")
LENGTH = struct.Struct("<I")
BLOCK, END, STATE, WAIT = 1, 2, 3, 4
MAX_JSON = 1 << 16
MAX_UNREAD = 1 << 20  # bytes of a refused request that are read and dropped
REFUSAL_SECONDS = 1.0
ROOMS = Path("/dev/shm")
ROOM_PREFIX = "bifolio-blocks-"
ROOM_BLOCKS = 8  # blocks in shared memory at a time


@dataclass(frozen=True, slots=True)
class Pull:
    """A decode engine's request for the blocks of a prompt."""

    fingerprint: bytes
    token_ids: np.ndarray  # i32[t]
    salt: bytes
    first: int  # number of the first block that is missing
    room: str = ""  # file in shared memory that the blocks may be written to


def checksum(block: np.ndarray) -> bytes:
    return blake2b(block.data, digest_size=16).digest()


def proof_of(secret: str, nonce: bytes) -> str:
    return hmac.new(secret.encode(), nonce, "sha256").hexdigest()


def receive_exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytearray:
    """`count` bytes; TransferError if the connection ends before, or at the deadline."""
    data = bytearray(count)
    receive_into(connection, memoryview(data), deadline)
    return data


def receive_into(connection: socket.socket, target: memoryview, deadline: float | None = None) -> None:
    """Fill `target`; TransferError if the connection ends before, or at the deadline (of the monotonic clock)."""
    done = 0
    while done < len(target):
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0.0:
                raise TransferError("a connection did not ask for blocks in time: it was closed")
            connection.settimeout(left)
        count = connection.recv_into(target[done:])
        if not count:
            raise TransferError("the other engine closed the connection in the middle of a transfer")
        done += count


def send_json(connection: socket.socket, message: dict[str, Any], rest: bytes = b"") -> None:
    body = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(body)) + body + rest)


def receive_json(connection: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """An object of at most `MAX_JSON` bytes."""
    (length,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size, deadline))
    if length > MAX_JSON:
        raise TransferError(f"a header of {length} bytes is longer than any real one")
    try:
        message = json.loads(receive_exactly(connection, length, deadline))
    except ValueError as error:
        raise TransferError("the other side does not speak this protocol") from error
    if not isinstance(message, dict):
        raise TransferError("the other side does not speak this protocol")
    return message


def refuse(connection: socket.socket, message: str) -> None:
    """Say why, then read on until the other side ends: closing on unread bytes would reset the sentence away."""
    send_json(connection, {"error": message})
    connection.shutdown(socket.SHUT_WR)
    left, deadline = MAX_UNREAD, time.monotonic() + REFUSAL_SECONDS
    with contextlib.suppress(OSError):
        while left > 0 and (seconds := deadline - time.monotonic()) > 0.0:
            connection.settimeout(seconds)
            count = len(connection.recv(min(left, MAX_JSON)))
            if not count:
                return
            left -= count


def send_pull(connection: socket.socket, pull: Pull, secret: str) -> None:
    nonce = bytes(receive_exactly(connection, NONCE_BYTES))
    header = {
        "version": VERSION, "fingerprint": pull.fingerprint.hex(), "salt": pull.salt.hex(), "first": pull.first,
        "num_tokens": len(pull.token_ids), "proof": proof_of(secret, nonce), "room": pull.room,
    }  # fmt: skip
    send_json(connection, header, pull.token_ids.astype("<i4").tobytes())


def receive_pull(
    connection: socket.socket,
    secret: str,
    max_tokens: int,
    seconds: float = HANDSHAKE_SECONDS,
    admit: Callable[[], None] = lambda: None,
) -> Pull:
    """Read and check a request; TransferError if it is malformed, too long, or does not know the secret.

    The other side has `seconds` to prove that it knows the secret; then `admit` is called, before the tokens are read.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce)
    header = receive_json(connection, time.monotonic() + seconds)
    try:
        version, count, first = int(header["version"]), int(header["num_tokens"]), int(header["first"])
        proof, room = str(header["proof"]), str(header["room"])
        fingerprint, salt = bytes.fromhex(header["fingerprint"]), bytes.fromhex(header["salt"])
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError("a request for blocks lacks a field or has one of another type") from error
    if not hmac.compare_digest(proof, proof_of(secret, nonce)):
        raise TransferError("the request does not know the secret of this engine: start both with the same one")
    if version != VERSION or not 1 <= count <= max_tokens or not 0 <= first <= count:
        raise TransferError(f"version {version} with {count} tokens from block {first} on cannot be served")
    admit()
    tokens = np.frombuffer(receive_exactly(connection, 4 * count), "<i4").astype(np.int32)
    return Pull(fingerprint, tokens, salt, first, room)


class Room:
    """Shared memory for `ROOM_BLOCKS` blocks: block i is at place i % ROOM_BLOCKS until the receiver has copied it."""

    def __init__(self, file: int, block_bytes: int) -> None:
        size = block_bytes * ROOM_BLOCKS
        self._map = mmap.mmap(file, size)
        self.places = np.frombuffer(self._map, np.uint8).reshape(ROOM_BLOCKS, block_bytes)

    @classmethod
    def new(cls, block_bytes: int) -> tuple[Room, str]:
        """Room for the blocks of one transfer, and its path; empty where the host has no shared memory."""
        file, path = tempfile.mkstemp(prefix=ROOM_PREFIX, dir=ROOMS)
        try:
            os.truncate(file, block_bytes * ROOM_BLOCKS)
            return cls(file, block_bytes), path
        finally:
            os.close(file)

    @classmethod
    def open(cls, path: str, block_bytes: int) -> Room | None:
        """The room of a receiver on this host; None if it is on another, or the file is not one of ours."""
        name = Path(path)
        if name.parent != ROOMS or not name.name.startswith(ROOM_PREFIX):
            return None
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
            return cls(file, block_bytes) if is_ours and found.st_size == block_bytes * ROOM_BLOCKS else None
        finally:
            os.close(file)
