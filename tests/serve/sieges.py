"""Attacks that are more than one request: the victim law holds while they last, with and without keys."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from law_server import ATTACKER, LawServer

from bifolio.serve.http.connection import allow_files
from bifolio.serve.process.zmtp import GREETING, ready

Siege = Callable[[LawServer], contextlib.AbstractContextManager[None]]
NUM_PARTIAL = 1060  # more than one client may have
LEAVES_AFTER = 3.0  # seconds


def repeated(
    server: LawServer, num_threads: int, path: str, body: Callable[[int], object]
) -> contextlib.AbstractContextManager[None]:
    """Requests of the attacker all the time, each with a number."""
    numbers = itertools.count()

    def ask() -> None:
        server.ask(path, json.dumps(body(next(numbers))).encode(), ATTACKER, LEAVES_AFTER)

    return again_and_again(ask, num_threads)


@contextlib.contextmanager
def again_and_again(attack: Callable[[], None], num_threads: int) -> Iterator[None]:
    """An attack that every thread repeats."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            attack()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


@contextlib.contextmanager
def partial_bodies(server: LawServer) -> Iterator[None]:
    allow_files(NUM_PARTIAL)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{server.authorization(ATTACKER)}content-length: 9999\r\n"
    )
    with contextlib.ExitStack() as held:
        for _ in range(NUM_PARTIAL):
            connection = socket.create_connection(
                ("127.0.0.1", server.port), 20, source_address=(server.address(ATTACKER), 0)
            )
            held.enter_context(connection)
            with contextlib.suppress(ConnectionError):
                connection.sendall(f"{head}\r\n{{".encode())
        yield


@contextlib.contextmanager
def stored_responses(server: LawServer) -> Iterator[None]:
    tool = {"type": "function", "name": "f", "description": "d" * (60 << 10)}
    body = {"input": "a", "max_output_tokens": 1, "tools": [tool] * 64, "tool_choice": "none"}
    for _ in range(20):
        server.ask("/v1/responses", json.dumps(body).encode(), ATTACKER)
    yield


def urgent_requests(server: LawServer) -> contextlib.AbstractContextManager[None]:
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "priority": -1000}
    return repeated(server, 40, "/v1/completions", lambda number: body)


def grammar_bombs(server: LawServer) -> contextlib.AbstractContextManager[None]:
    def body(number: int) -> object:
        schema = {"type": "integer", "multipleOf": 999983 + 2 * number}
        return {"prompt": "Once", "max_tokens": 4, "structured_outputs": {"json": schema}}

    return repeated(server, 8, "/v1/completions", body)


def long_frames(server: LawServer) -> contextlib.AbstractContextManager[None]:
    """Frames of a gigabyte on the port of KV events, of which the beginning is sent."""
    beginning = b"\x02" + struct.pack(">Q", 1000 << 20) + bytes(64 << 10)

    def attack() -> None:
        source = (server.address(ATTACKER), 0)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", server.events_port), LEAVES_AFTER, source_address=source) as peer,
        ):
            peer.sendall(GREETING + ready(b"SUB") + beginning)
            while peer.recv(1 << 16):
                pass

    return again_and_again(attack, 4)


SIEGES: dict[str, Siege] = {
    "partial bodies": partial_bodies,
    "stored responses": stored_responses,
    "urgent requests": urgent_requests,
    "grammar bombs": grammar_bombs,
    "long frames": long_frames,
}
