"""The two ports of KV events: live batches and replays, for clients that need no secret.

All batches that are kept lie in one `BatchLog`. A client is a position in it: a slow one takes no memory of its own,
misses the batches that the log has dropped, and asks for a replay or starts anew. A client that is in the middle of a
dropped batch is closed. Messages of clients are bounded by `MAX_READ_BYTES` and `MAX_FRAMES` (`serve.process.zmtp`).

    batch      |  dropped  |  kept ...                    |
    client                      ^ sent up to here  ------>|
"""

from __future__ import annotations

import selectors
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bifolio.errors import ConfigError
from bifolio.handshakes import HANDSHAKE_SECONDS, Handshakes
from bifolio.serve.process.zmtp import GREETING, Frame, FrameReader, ZmtpError, command, frame, frame_head, ready

MAX_KEPT_BATCHES = 10_000  # for replay and for slow subscribers
MAX_KEPT_BYTES = 64 << 20
MAX_READ_BYTES = 1024  # of a frame of a subscription or of a request for a replay, which any client may send
MAX_FRAMES = 2  # of a message of a client
FRAMES_AT_ONCE, FRAMES_PER_SECOND = 256, 64  # that a client may send: they are read on a thread of the engine's process
MAX_CLIENTS = 256  # of each port; the oldest of the busiest address makes room
MAX_UNSENT_ANSWERS = 4096  # bytes of answers to commands of a client that does not read them
BYTES_AT_ONCE = 1 << 20  # sent to one client before the next one has its turn
READ_AT_ONCE = 4096
BACKLOG = 128
ACCEPT_PAUSE_SECONDS = 0.01  # after a connection that could not be accepted
END_OF_REPLAY = frame(b"", has_more=True) + frame((-1).to_bytes(8, "big", signed=True), has_more=True) + frame(b"")


class BatchLog:
    """The newest batches, by number."""

    def __init__(self) -> None:
        self._bodies: dict[int, bytes] = {}  # the oldest first
        self._num_bytes = 0
        self.first = self.end = 0  # numbers of the kept batches: first <= number < end

    def append(self, body: bytes) -> None:
        """Add a batch; old ones are dropped, but never the newest."""
        self._bodies[self.end] = body
        self._num_bytes += len(body)
        self.end += 1
        while len(self._bodies) > 1 and (len(self._bodies) > MAX_KEPT_BATCHES or self._num_bytes > MAX_KEPT_BYTES):
            self._num_bytes -= len(self._bodies.pop(self.first))
            self.first += 1

    def get(self, number: int) -> bytes | None:
        return self._bodies.get(number)


class Client:
    """One connection, and how far it has read."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reader = FrameReader(MAX_READ_BYTES)
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS
        self.is_greeted = False  # its greeting has arrived
        self.is_ready = False  # the handshake has ended
        self.out = bytearray(GREETING)  # to be sent first: commands, and the heads of the batch below
        self.answers = bytearray()  # to be sent after the batch
        self.batch: int | None = None  # the one that is being sent
        self.offset = 0  # bytes of it that were sent
        self.next = 0  # the batch after it
        self.frames: list[bytes] = []  # of a message that is not complete
        self._credit, self._counted = float(FRAMES_AT_ONCE), time.monotonic()  # frames that it may send, and since when

    def count_frame(self) -> None:
        """Note a frame of the client; `ZmtpError` if there were too many."""
        now = time.monotonic()
        self._credit = min(self._credit + (now - self._counted) * FRAMES_PER_SECOND, FRAMES_AT_ONCE) - 1
        self._counted = now
        if self._credit < 0:
            raise ZmtpError("the client sends too many frames")


class Port:
    """Accepts clients and sends them batches of a log. Lives on the publisher's thread."""

    socket_type = b""
    first_frame = b""  # of every message

    def __init__(self, endpoint: str, log: BatchLog, selector: selectors.BaseSelector) -> None:
        self._log = log
        self._selector = selector
        self._strangers = Handshakes()
        self._ready = Handshakes(MAX_CLIENTS)
        self._clients: dict[Client, None] = {}  # in the order in which they came
        self._listener = listen(endpoint)
        self.endpoint = address_of(endpoint, self._listener)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        for client in list(self._clients):
            self._close(client)
        self._listener.close()

    @property
    def has_unsent(self) -> bool:
        return any(client.is_ready and self._has_unsent(client) for client in self._clients)

    def advance(self) -> None:
        """Send new batches, and close clients whose handshake takes too long."""
        now = time.monotonic()
        for client in list(self._clients):
            if client.is_ready:
                if self._has_unsent(client):
                    self._guarded(client, self._send)
            elif client.deadline < now:
                self._close(client)

    # -- clients -----------------------------------------------------------------------------------------------------
    def _accept(self, listener: socket.socket, events: int) -> None:
        try:
            connection, peer = listener.accept()
        except OSError:  # it has gone, or no descriptor is free: the next poll tries again
            time.sleep(ACCEPT_PAUSE_SECONDS)
            return
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = Client(connection)
        self._clients[client] = None
        address = str(peer[0]) if isinstance(peer, tuple) else ""
        self._selector.register(connection, selectors.EVENT_READ, lambda _, events: self._on_event(client, events))
        self._strangers.begin(client, address, lambda: self._close(client))
        self._guarded(client, self._send)

    def _close(self, client: Client) -> None:
        if client in self._clients:
            del self._clients[client]
            self._strangers.end(client)
            self._ready.end(client)
            self._selector.unregister(client.connection)
            client.connection.close()

    def _guarded(self, client: Client, work: Callable[[Client], None]) -> None:
        """Do something with a client that may have gone or break the protocol; then it is closed."""
        try:
            work(client)
        except BlockingIOError:
            pass  # it has sent nothing after all
        except (OSError, ZmtpError):
            self._close(client)

    def _on_event(self, client: Client, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._guarded(client, self._read)
        if client in self._clients:
            self._guarded(client, self._send)

    # -- reading -----------------------------------------------------------------------------------------------------
    def _read(self, client: Client) -> None:
        data = client.connection.recv(READ_AT_ONCE)
        if not data:
            raise ZmtpError("the client has gone")
        for one in client.reader.feed(data):
            client.count_frame()
            self._take(client, one)
        if client.reader.is_greeted and not client.is_greeted:
            client.is_greeted = True
            client.out += ready(self.socket_type)

    def _take(self, client: Client, one: Frame) -> None:
        found = one.command()
        if found is not None:
            self._obey(client, *found)
            return
        if not client.is_ready:
            raise ZmtpError("a message came before the end of the handshake")
        client.frames.append(one.body)
        if len(client.frames) > MAX_FRAMES:
            raise ZmtpError(f"a message has more than {MAX_FRAMES} frames")
        if not one.has_more:
            frames, client.frames = client.frames, []
            self._take_message(client, frames)

    def _obey(self, client: Client, name: bytes, data: bytes) -> None:
        if name == b"READY" and not client.is_ready:
            address = self._address(client)
            if not self._strangers.end(client):
                raise ZmtpError("the client was closed")
            client.is_ready = True
            self._ready.begin(client, address, lambda: self._close(client))
        elif name == b"PING":
            client.answers += command(b"PONG", data[2:])
            if len(client.answers) > MAX_UNSENT_ANSWERS:
                raise ZmtpError("the client does not read the answers to its commands")
        elif name in (b"SUBSCRIBE", b"CANCEL"):
            self._take_message(client, [(b"\1" if name == b"SUBSCRIBE" else b"\0") + data])
        elif name == b"ERROR":
            raise ZmtpError("the client reports an error")

    @staticmethod
    def _address(client: Client) -> str:
        peer = client.connection.getpeername()
        return str(peer[0]) if isinstance(peer, tuple) else ""

    # -- sending -----------------------------------------------------------------------------------------------------
    def _send(self, client: Client) -> None:
        """Send as much as the client takes, up to the share of one turn."""
        left = BYTES_AT_ONCE
        with suppress(BlockingIOError):
            while left > 0 and (client in self._clients) and self._fill(client):
                if client.out:
                    count = client.connection.send(client.out)
                    del client.out[:count]
                else:
                    count = self._send_batch(client)
                left -= count
        if client in self._clients:
            self._selector.modify(
                client.connection,
                selectors.EVENT_READ * self._may_read(client) | selectors.EVENT_WRITE * self._has_unsent(client),
                self._selector.get_key(client.connection).data,
            )

    def _fill(self, client: Client) -> bool:
        """Put the next bytes in the client's way; False if there are none."""
        if client.out or client.batch is not None:
            return True
        if client.answers:
            client.out, client.answers = client.answers, bytearray()
            return True
        if not client.is_ready:
            return False
        number = max(client.next, self._log.first)
        body = self._log.get(number) if self._wants(client, number) else None
        if body is None:
            return self._fill_end(client)
        client.batch, client.offset, client.next = number, 0, number + 1
        client.out += self.first_frame + frame(number.to_bytes(8, "big"), has_more=True) + frame_head(len(body))
        return True

    def _send_batch(self, client: Client) -> int:
        body = None if client.batch is None else self._log.get(client.batch)
        if body is None:
            raise ZmtpError("the client is too slow: the batch that it reads was dropped")
        count = client.connection.send(memoryview(body)[client.offset :])
        client.offset += count
        if client.offset == len(body):
            client.batch = None
        return count

    def _has_unsent(self, client: Client) -> bool:
        is_behind = client.is_ready and self._wants(client, max(client.next, self._log.first))
        return bool(client.out or client.answers or client.batch is not None or is_behind)

    # -- for the two kinds -------------------------------------------------------------------------------------------
    def _take_message(self, client: Client, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _wants(self, client: Client, number: int) -> bool:
        """Whether a batch with this number, if there is one, is sent to a client."""
        raise NotImplementedError

    def _may_read(self, client: Client) -> bool:
        """Whether messages of a client are read now."""
        return True

    def _fill_end(self, client: Client) -> bool:
        """Put the end of an answer in the client's way, after the last batch; False if there is none."""
        return False


class EventPort(Port):
    """A PUB socket: sends each batch to the clients that subscribe to its topic."""

    socket_type = b"PUB"

    def __init__(self, endpoint: str, topic: bytes, log: BatchLog, selector: selectors.BaseSelector) -> None:
        self._topic = topic
        self.first_frame = frame(topic, has_more=True)
        self._subscriptions: dict[Client, Counter[int]] = {}  # lengths of the prefixes of the topic
        super().__init__(endpoint, log, selector)

    def _close(self, client: Client) -> None:
        self._subscriptions.pop(client, None)
        super()._close(client)

    def _take_message(self, client: Client, frames: list[bytes]) -> None:
        kind, prefix = frames[0][:1], frames[0][1:]
        if not self._topic.startswith(prefix):
            return
        known = self._subscriptions.setdefault(client, Counter())
        if kind == b"\1":
            if not known.total():
                client.next = self._log.end  # a subscriber reads on from here
            known[len(prefix)] += 1
        elif kind == b"\0" and known[len(prefix)]:
            known[len(prefix)] -= 1

    def _wants(self, client: Client, number: int) -> bool:
        known = self._subscriptions.get(client)
        return known is not None and known.total() > 0 and number < self._log.end


class ReplayPort(Port):
    """A ROUTER socket: a request is a number; the answers are the kept batches from there on, then an end.

    A request is [empty, number] or [number]. The next one of the same client is read after the end of a replay.
    """

    socket_type = b"ROUTER"
    first_frame = frame(b"", has_more=True)

    def __init__(self, endpoint: str, log: BatchLog, selector: selectors.BaseSelector) -> None:
        self._ends: dict[Client, int] = {}  # of the replays in flight: the number after the last batch
        self._waiting: dict[Client, list[int]] = {}  # requests that came with the one in flight
        super().__init__(endpoint, log, selector)

    def _close(self, client: Client) -> None:
        self._ends.pop(client, None)
        self._waiting.pop(client, None)
        super()._close(client)

    def _take_message(self, client: Client, frames: list[bytes]) -> None:
        if len(frames[-1]) != 8:
            return
        self._waiting.setdefault(client, []).append(int.from_bytes(frames[-1], "big"))  # at most `READ_AT_ONCE` bytes
        self._start(client)

    def _start(self, client: Client) -> None:
        waiting = self._waiting.get(client)
        if client not in self._ends and waiting:
            client.next, self._ends[client] = waiting.pop(0), self._log.end

    def _wants(self, client: Client, number: int) -> bool:
        return client in self._ends and number < self._ends[client]

    def _may_read(self, client: Client) -> bool:
        return client not in self._ends

    def _has_unsent(self, client: Client) -> bool:
        return client in self._ends or super()._has_unsent(client)

    def _fill_end(self, client: Client) -> bool:
        if client not in self._ends:
            return False
        del self._ends[client]
        client.out += END_OF_REPLAY
        self._start(client)
        return True


def listen(endpoint: str) -> socket.socket:
    """A socket that listens on tcp://HOST:PORT (* for every address of IPv4, * for any port) or ipc://PATH."""
    kind, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    is_tcp = kind == "tcp" and host and (port == "*" or (port.isdigit() and int(port) < 1 << 16))
    if not is_tcp and not (kind == "ipc" and place):
        raise ConfigError(f"KV events are published at an address such as tcp://*:5557, not {endpoint!r}")
    try:
        if is_tcp:
            return _listen_on_port("0.0.0.0" if host == "*" else host.strip("[]"), 0 if port == "*" else int(port))
        return _listen_on_path(Path(place))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"KV events cannot be published at {endpoint} ({getattr(error, 'strerror', None) or error}): pass an "
            "address of this machine and a port that is free"
        ) from error


def _listen_on_port(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def _listen_on_path(path: Path) -> socket.socket:
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()  # of an engine that has gone
    return socket.create_server(str(path), family=socket.AF_UNIX, backlog=BACKLOG)


def address_of(endpoint: str, listener: socket.socket) -> str:
    """The endpoint with the port that the system has chosen for `*`."""
    if endpoint.startswith("ipc://"):
        return endpoint
    host, port, *_ = listener.getsockname()
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
