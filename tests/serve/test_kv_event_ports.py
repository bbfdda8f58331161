"""The ports of KV events: clients of the ZMQ library, and clients that send anything or read nothing."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bifolio.api.messages import KvEventSettings
from bifolio.cache.digests import root_digest
from bifolio.cache.events import CacheEvents, Cleared, Stored
from bifolio.errors import ConfigError
from bifolio.serve.process import kv_event_ports
from bifolio.serve.process.kv_event_ports import MAX_READ_BYTES, BatchLog
from bifolio.serve.process.kv_events import KvEventPublisher
from bifolio.serve.process.zmtp import GREETING, FrameReader, ZmtpError, command, frame, ready

zmq = pytest.importorskip("zmq")
ANY = "tcp://127.0.0.1:*"
FROM_START = frame(bytes(8))  # a request for a replay
EVERYTHING = frame(b"\1")  # a subscription


@contextlib.contextmanager
def publishing(endpoint: str = ANY, replay: str = ANY) -> Iterator[tuple[KvEventPublisher, CacheEvents]]:
    events = CacheEvents()
    publisher = KvEventPublisher(events, 2, KvEventSettings(endpoint, replay, "kv@test"))
    try:
        yield publisher, events
    finally:
        publisher.close()


@contextlib.contextmanager
def zmq_socket(kind: int, endpoint: str, **options: int) -> Iterator[Any]:
    context = zmq.Context()
    made = context.socket(kind)
    for name, value in options.items():
        made.setsockopt(getattr(zmq, name), value)
    made.connect(endpoint)
    try:
        yield made
    finally:
        context.destroy(linger=0)


def tcp_peer(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def raw_peer(endpoint: str, kind: bytes) -> socket.socket:
    """A connection after its handshake, on which any bytes can be sent."""
    peer = tcp_peer(endpoint)
    peer.sendall(GREETING + ready(kind))
    received = b""
    while len(received) < 66 or len(received) < 66 + received[65]:
        received += peer.recv(4096)
    return peer


def endpoint_of(publisher: KvEventPublisher, kind: bytes) -> str:
    return publisher.endpoint if kind == b"SUB" else publisher.replay_endpoint


def is_closed(peer: socket.socket) -> bool:
    """Whether the other side ends the connection; pending bytes are read before."""
    try:
        while peer.recv(1 << 16):
            pass
    except ConnectionError:
        pass  # closed with unread bytes
    except TimeoutError:
        return False
    return True


def accepted_bytes(peer: socket.socket, piece: bytes, most: int) -> int:
    """Bytes that a peer can send before its connection is closed."""
    sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        while sent < most:
            peer.sendall(piece)
            sent += len(piece)
    return sent


# -- clients of the library ------------------------------------------------------------------------------------------
def next_live(subscriber: Any, events: CacheEvents) -> list[bytes]:
    """The next message to a subscriber; it misses those before its subscription arrives."""
    for _ in range(600):
        events.record(Cleared())
        if subscriber.poll(50):
            return list(subscriber.recv_multipart())
    raise AssertionError("no event came")


def test_a_subscriber_gets_the_topics_that_it_asks_for() -> None:
    with (
        publishing() as (publisher, events),
        zmq_socket(zmq.SUB, publisher.endpoint) as other,
        zmq_socket(zmq.SUB, publisher.endpoint) as subscriber,
    ):
        other.setsockopt(zmq.SUBSCRIBE, b"kv@else")
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        topic, number, _ = next_live(subscriber, events)
        assert topic == b"kv@test"
        assert len(number) == 8
        assert not other.poll(0)
        other.setsockopt(zmq.SUBSCRIBE, b"")
        assert next_live(other, events)[0] == b"kv@test"


def test_a_client_with_heartbeats_stays_connected() -> None:
    beats = {"HEARTBEAT_IVL": 50, "HEARTBEAT_TIMEOUT": 200}
    with publishing() as (publisher, events), zmq_socket(zmq.SUB, publisher.endpoint, **beats) as subscriber:
        monitor = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        next_live(subscriber, events)
        assert not monitor.poll(400)
        subscriber.disable_monitor()


@pytest.mark.parametrize("kind", ["DEALER", "REQ"])
def test_replays_for_both_kinds_of_sockets(kind: str) -> None:
    with publishing() as (publisher, _), zmq_socket(getattr(zmq, kind), publisher.replay_endpoint) as client:
        client.send(bytes(8))
        assert client.poll(10_000)
        *empty, number, body = client.recv_multipart()
        assert empty == ([b""] if kind == "DEALER" else [])  # a REQ socket removes it
        assert number == bytes(8)
        assert body


def test_requests_that_come_together_are_answered_in_order() -> None:
    with publishing() as (publisher, _), zmq_socket(zmq.DEALER, publisher.replay_endpoint) as client:
        for first in (0, 1, 0):
            client.send_multipart((b"", first.to_bytes(8, "big")))
        numbers = []
        for _ in range(5):
            assert client.poll(10_000)
            numbers.append(int.from_bytes(client.recv_multipart()[1], "big", signed=True))
        assert numbers == [0, -1, -1, 0, -1]


def test_a_path_instead_of_a_port(tmp_path: Path) -> None:
    paths = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    for _ in range(2):  # the second one finds the sockets of the first
        with publishing(*paths) as (publisher, _), zmq_socket(zmq.DEALER, publisher.replay_endpoint) as client:
            client.send(bytes(8))
            assert client.poll(10_000)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "tcp://:5557", "udp://127.0.0.1:1", "tcp://127.0.0.1:99999"])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"such as tcp://\*:5557"):
        KvEventPublisher(CacheEvents(), 2, KvEventSettings(endpoint, ANY))


def test_a_port_in_use() -> None:
    with publishing() as (publisher, _), pytest.raises(ConfigError, match=r"cannot be published at .*already in use"):
        KvEventPublisher(CacheEvents(), 2, KvEventSettings(ANY, publisher.endpoint))


def test_an_engine_publishes_without_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with publishing() as (publisher, _), raw_peer(publisher.replay_endpoint, b"DEALER") as peer:
        peer.sendall(FROM_START)
        assert peer.recv(4096)


# -- hostile clients -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [b"SUB", b"DEALER"])
def test_a_frame_of_a_gigabyte_ends_its_connection(kind: bytes) -> None:
    with publishing() as (publisher, _), raw_peer(endpoint_of(publisher, kind), kind) as peer:
        peer.sendall(b"\x02" + struct.pack(">Q", 1000 << 20) + bytes(4096))  # memory for it would be allocated now
        assert is_closed(peer)


@pytest.mark.parametrize("kind", [b"SUB", b"DEALER"])
def test_a_message_of_many_frames_ends_its_connection(kind: bytes) -> None:
    with publishing() as (publisher, _), raw_peer(endpoint_of(publisher, kind), kind) as peer:
        piece = frame(bytes(MAX_READ_BYTES), has_more=True)
        assert accepted_bytes(peer, piece, 64 << 20) < 16 << 20  # the buffers of the system; all were kept before


@pytest.mark.parametrize("kind", [b"SUB", b"DEALER"])
def test_frames_that_follow_each_other_too_fast_end_their_connection(kind: bytes) -> None:
    with publishing() as (publisher, _), raw_peer(endpoint_of(publisher, kind), kind) as peer:
        assert accepted_bytes(peer, frame(b"\1nothing"), 16 << 20) < 16 << 20


@pytest.mark.parametrize(
    "greeting",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\1", GREETING.replace(b"NULL\0", b"CURVE")],
    ids=["HTTP", "an old version", "another mechanism"],
)
def test_other_protocols_are_closed(greeting: bytes) -> None:
    with publishing() as (publisher, _), tcp_peer(publisher.endpoint) as peer:
        peer.sendall(greeting)
        assert is_closed(peer)


@pytest.mark.full
def test_silent_connections_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_ports, "HANDSHAKE_SECONDS", 1.0)
    with publishing() as (publisher, _), contextlib.ExitStack() as held:
        silent = [held.enter_context(tcp_peer(publisher.replay_endpoint)) for _ in range(300)]
        with raw_peer(publisher.replay_endpoint, b"DEALER") as peer:
            peer.sendall(FROM_START)
            assert peer.recv(4096)
        assert is_closed(silent[0])  # for a later one
        assert is_closed(silent[-1])  # after its time


@pytest.mark.full
def test_a_slow_subscriber_takes_no_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_ports, "MAX_KEPT_BYTES", 1 << 20)
    root = root_digest(b"")
    with publishing() as (publisher, events), raw_peer(publisher.endpoint, b"SUB") as slow:
        slow.sendall(EVERYTHING)
        with zmq_socket(zmq.SUB, publisher.endpoint) as quick:
            quick.setsockopt(zmq.SUBSCRIBE, b"")
            number = int.from_bytes(next_live(quick, events)[1], "big")
            for _ in range(64):  # 30 MB
                events.record(Stored([b"x" * 16], root, root, list(range(1 << 30, (1 << 30) + 100_000))))
                while True:
                    assert quick.poll(10_000)
                    _, found, body = quick.recv_multipart()
                    assert int.from_bytes(found, "big") == number + 1  # the quick one misses none
                    number += 1
                    if len(body) > 100_000:
                        break
        assert publisher._log._num_bytes <= 1 << 20
        assert is_closed(slow)  # in the middle of a batch that is gone


# -- parts -----------------------------------------------------------------------------------------------------------
def test_frames_in_any_pieces() -> None:
    data = GREETING + ready(b"SUB") + frame(b"\1kv", has_more=True) + frame(bytes(300)) + command(b"PING", b"\0\0x")
    whole = list(FrameReader(1024).feed(data))
    assert [one.command() for one in whole] == [(b"READY", ready(b"SUB")[8:]), None, None, (b"PING", b"\0\0x")]
    assert [one.has_more for one in whole] == [False, True, False, False]
    reader = FrameReader(1024)
    assert [one for byte in data for one in reader.feed(bytes((byte,)))] == whole


def test_a_frame_beyond_the_limit() -> None:
    reader = FrameReader(16)
    assert len(list(reader.feed(GREETING + frame(bytes(16))))) == 1
    with pytest.raises(ZmtpError, match="17 bytes and 16 are allowed"):
        list(reader.feed(frame(bytes(17))))


def test_the_log_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_ports, "MAX_KEPT_BYTES", 10)
    log = BatchLog()
    for size in (4, 4, 4, 100):
        log.append(bytes(size))
        assert log.get(log.end - 1) == bytes(size)
    assert (log.first, log.end) == (3, 4)  # a batch beyond the limit stays until the next one
    assert log.get(2) is None
