"""Connections: those without a complete request make room for others, those of the busiest client first."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from serving import RunningServer, running_server

from bifolio.serve.http.connection import Connections, Stage

SHORT = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
KEYS = ["victim-secret", "hostile-secret"]


class Fake:
    """A connection at a stage."""

    def __init__(self, stage: Stage = Stage.SILENT) -> None:
        self.stage = stage
        self.is_dropped = False

    def drop(self) -> None:
        self.is_dropped = True


def filled(connections: Connections, share: str, *stages: Stage) -> list[Fake]:
    fakes = [Fake(stage) for stage in stages]
    for fake in fakes:
        assert connections.add(fake, share)
    return fakes


def test_the_busiest_share_makes_room_by_the_request_that_has_come_the_least_far() -> None:
    connections = Connections(6, 5)
    few = filled(connections, "few", Stage.SILENT, Stage.HEAD)
    many = filled(connections, "many", Stage.BUSY, Stage.BODY, Stage.HEAD, Stage.SILENT)
    for dropped in (3, 2):
        filled(connections, "new", Stage.BUSY)
        assert [fake.is_dropped for fake in many] == [number >= dropped for number in range(4)]
    assert not any(fake.is_dropped for fake in few)
    assert connections.add(Fake(Stage.BUSY), "many")  # it has no fewer than the others, so it makes room itself
    assert many[1].is_dropped
    assert not connections.add(Fake(), "many")  # all of its own are busy
    assert not any(fake.is_dropped for fake in few)


def test_a_share_has_a_limit_of_its_own() -> None:
    connections = Connections(8, 3)
    busy = filled(connections, "one", *[Stage.BUSY] * 3)
    assert not connections.add(Fake(), "one")
    filled(connections, "other", *[Stage.BUSY] * 3)
    assert not any(fake.is_dropped for fake in busy)


def test_connections_with_a_key_belong_to_it() -> None:
    connections = Connections(8, 3)
    for _ in range(20):  # at the address of the victim
        hostile = Fake(Stage.BUSY)
        connections.add(hostile, "10.0.0.1")
        if not connections.claim(hostile, "key-1"):
            connections.remove(hostile)  # refused and closed
    honest = Fake(Stage.HEAD)
    assert connections.add(honest, "10.0.0.1")
    assert connections.claim(honest, "key-0")
    assert not honest.is_dropped


def test_bodies_that_arrive_make_room_in_their_share() -> None:
    connections = Connections(100, 100, most_bodies=6, most_bodies_per_share=4)
    (honest,) = filled(connections, "honest", Stage.BODY)
    connections.begin_body(honest)
    hostile = filled(connections, "hostile", *[Stage.BODY] * 20)
    for fake in hostile:
        connections.begin_body(fake)
    assert [fake.is_dropped for fake in hostile] == [True] * 16 + [False] * 4
    third = filled(connections, "third", *[Stage.BODY] * 2)
    for fake in third:
        connections.begin_body(fake)
    assert hostile[16].is_dropped  # seven of six: of the share with the most
    assert not honest.is_dropped
    connections.end_body(hostile[17])
    connections.begin_body(filled(connections, "hostile", Stage.BODY)[0])
    assert not hostile[18].is_dropped


def partial_request(server: RunningServer, address: str, key: str, part: str) -> socket.socket:
    """A connection on which a part of a request was sent."""
    connection = socket.create_connection(("127.0.0.1", server.port), source_address=(address, 0))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-length: 999\r\n"
    sent = {"nothing": "", "head": head, "body": head + "\r\n{", "answered": head.replace(key, "wrong") + "\r\n{"}
    connection.sendall(sent[part].encode())
    return connection


@pytest.mark.full
@pytest.mark.parametrize("has_keys", [True, False])
def test_partial_requests_of_one_client_deny_no_service_to_others(
    monkeypatch: pytest.MonkeyPatch, has_keys: bool
) -> None:
    """With keys from one address, without keys from two."""
    monkeypatch.setattr(Connections.__init__, "__defaults__", (24, 8))
    with running_server(keys=KEYS if has_keys else (), max_connections=40, max_connections_per_address=30) as server:
        hostile = "127.0.0.1" if has_keys else "127.0.0.2"
        held: list[socket.socket] = []
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        try:
            for part in ("nothing", "head", "body", "answered"):
                held += [partial_request(server, hostile, KEYS[1], part) for _ in range(60)]
                began = time.monotonic()
                with httpx.Client(base_url=server.url, headers=headers, timeout=30) as http:
                    assert http.post("/v1/completions", json=SHORT).status_code == 200, part
                assert time.monotonic() - began < 5.0
            assert server.on_loop(lambda: len(server.server.server_state.connections)) < 45
            held[125].settimeout(5)  # a dropped body
            with contextlib.suppress(ConnectionResetError):
                assert b" 408 " in held[125].recv(100)
        finally:
            for connection in held:
                connection.close()


# -- trailers --------------------------------------------------------------------------------------------------------
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"


def answer_of(server: RunningServer, *parts: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                connection.sendall(part)
        with contextlib.suppress(ConnectionResetError):
            return connection.recv(65536)
        return b""


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    with running_server(keys=KEYS) as server:
        yield server


@pytest.mark.full
def test_trailers_are_not_headers(guarded: RunningServer) -> None:
    body = b'{"prompt": "Once", "max_tokens": 1}'
    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n"
    key = f"authorization: Bearer {KEYS[0]}\r\n".encode()
    assert b" 200 " in answer_of(guarded, CHUNKED + key + b"\r\n" + chunk + b"x-checksum: 1\r\n\r\n")[:20]
    assert b" 401 " in answer_of(guarded, CHUNKED + b"\r\n" + chunk + key + b"\r\n")[:20]
    named = answer_of(guarded, CHUNKED + key + b"\r\n" + chunk + b"x-request-id: trailing\r\n\r\n")
    assert b" 200 " in named[:20]
    assert b"trailing" not in named


@pytest.mark.full
@pytest.mark.parametrize("trailers", [[b"a: b\r\n" * 200], [b"a: " + b"b" * 50_000] * 8], ids=["many", "long"])
def test_trailers_are_limited(guarded: RunningServer, trailers: list[bytes]) -> None:
    key = f"authorization: Bearer {KEYS[0]}\r\n".encode()
    answer = answer_of(guarded, CHUNKED + key + b"\r\n1\r\n{\r\n0\r\n", *trailers)
    assert b" 431 " in answer[:20] or not answer
