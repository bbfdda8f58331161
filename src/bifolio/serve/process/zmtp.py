"""Frames of ZMTP 3.0, the protocol of ZMQ sockets over TCP, with a bound on all that a client can make the reader keep.

    greeting   64 bytes: signature (10), version (2), mechanism "NULL" (20), role (1), zeros (31)
    frame      flags (1: more frames follow, 2: size of 8 bytes, 4: command), size (1 or 8 bytes), body
    command    length of its name (1), name, data; READY ends the handshake

A ZMQ library bounds the size of a frame (ZMQ_MAXMSGSIZE) and the number of messages that wait, but not the frames of
one message, which it keeps until the last one arrives: any client could fill the memory. This reader hands out every
frame when it is complete, and its owner decides how many a message may have.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from bifolio.errors import BifolioError

MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
SIGNATURE_BYTES, VERSION_BYTE, MECHANISM = 10, 10, slice(12, 32)


class ZmtpError(BifolioError):
    """A client does not follow the protocol, or sends more than it may: its connection is closed."""


class Frame(NamedTuple):
    """One part of a message, or a command."""

    flags: int
    body: bytes

    @property
    def has_more(self) -> bool:
        return bool(self.flags & MORE)

    def command(self) -> tuple[bytes, bytes] | None:
        """Its name and data, if it is a command."""
        if not self.flags & COMMAND:
            return None
        end = 1 + self.body[0] if self.body else 1
        return self.body[1:end], self.body[end:]


class FrameReader:
    """Bytes of one connection to frames."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes  # of a frame
        self._unread = bytearray()
        self._is_greeted = False

    @property
    def is_greeted(self) -> bool:
        """Whether the greeting of the other side has arrived."""
        return self._is_greeted

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that these bytes complete; `ZmtpError` for bytes that no client of this version sends."""
        self._unread += data
        if not self._is_greeted and not self._read_greeting():
            return
        start = 0
        while (found := self._frame_at(start)) is not None:
            frame, start = found
            yield frame
        del self._unread[:start]

    def _read_greeting(self) -> bool:
        unread = self._unread
        if unread[:1] != GREETING[: len(unread[:1])] or (len(unread) >= SIGNATURE_BYTES and not unread[9] & 1):
            raise ZmtpError("the other side does not speak ZMTP")
        if len(unread) > VERSION_BYTE and unread[VERSION_BYTE] < GREETING[VERSION_BYTE]:
            raise ZmtpError("the other side speaks a version of ZMTP before 3.0")
        if len(unread) < len(GREETING):
            return False
        if unread[MECHANISM] != GREETING[MECHANISM]:
            raise ZmtpError("the other side asks for a security mechanism; only NULL is known")
        del unread[: len(GREETING)]
        self._is_greeted = True
        return True

    def _frame_at(self, start: int) -> tuple[Frame, int] | None:
        """The frame that begins there, and its end; None if it is not complete."""
        unread = self._unread
        if len(unread) - start < 2:
            return None
        flags, head = unread[start], 2
        size = unread[start + 1]
        if flags & LONG:
            head = 9
            if len(unread) - start < head:
                return None
            (size,) = struct.unpack_from(">Q", unread, start + 1)
        if size > self._max_bytes:
            raise ZmtpError(f"a frame has {size} bytes and {self._max_bytes} are allowed")
        end = start + head + size
        return None if len(unread) < end else (Frame(flags, bytes(unread[start + head : end])), end)


def frame_head(size: int, *, has_more: bool = False, is_command: bool = False) -> bytes:
    """The bytes before the body of a frame."""
    flags = MORE * has_more | COMMAND * is_command
    return bytes((flags, size)) if size < 256 else struct.pack(">BQ", flags | LONG, size)


def frame(body: bytes, *, has_more: bool = False) -> bytes:
    return frame_head(len(body), has_more=has_more) + body


def command(name: bytes, data: bytes = b"") -> bytes:
    body = bytes((len(name),)) + name + data
    return frame_head(len(body), is_command=True) + body


def ready(socket_type: bytes) -> bytes:
    """The command that ends the handshake."""
    name = b"Socket-Type"
    return command(b"READY", bytes((len(name),)) + name + struct.pack(">I", len(socket_type)) + socket_type)
