"""Attacks that are more than one request: the victim law holds while they last, with and without keys."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator

from law_server import ATTACKER, LawServer

from bifolio.serve.http.connection import allow_files

Siege = Callable[[LawServer], contextlib.AbstractContextManager[None]]
NUM_PARTIAL = 1060  # more than one client may have
LEAVES_AFTER = 3.0  # seconds


@contextlib.contextmanager
def repeated(server: LawServer, num_threads: int, path: str, body: Callable[[int], object]) -> Iterator[None]:
    """Requests of the attacker all the time, each with a number."""
    stop, numbers = threading.Event(), itertools.count()

    def work() -> None:
        while not stop.is_set():
            server.ask(path, json.dumps(body(next(numbers))).encode(), ATTACKER, LEAVES_AFTER)

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


SIEGES: dict[str, Siege] = {
    "partial bodies": partial_bodies,
    "stored responses": stored_responses,
    "urgent requests": urgent_requests,
    "grammar bombs": grammar_bombs,
}
