"""Shares of a server without keys: addresses divide the machine, and priorities count only where they are allowed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Limits, RunningServer, running_server

from bifolio.api.messages import Update
from bifolio.handshakes import Handshakes, network_of

SHORT = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
LONG = {"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def client_at(server: RunningServer, address: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, transport=httpx.HTTPTransport(local_address=address))


def sent(server: RunningServer, address: str, body: dict[str, Any], done: list[str], name: str) -> threading.Thread:
    def work() -> None:
        with client_at(server, address) as http:
            http.post("/v1/completions", json=body)
            done.append(name)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_open(server: RunningServer, count: int) -> None:
    end = time.monotonic() + 30
    while server.on_loop(lambda: server.context.engine.num_open) != count:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_networks() -> None:
    assert network_of("10.1.2.3") == "10.1.2.3"
    assert network_of("::ffff:10.1.2.3") == "10.1.2.3"
    assert network_of("2001:db8:1:2:3:4:5:6") == network_of("2001:db8:1:2::1") == "2001:db8:1:2::/64"
    assert network_of("2001:db8:1:3::1") != network_of("2001:db8:1:2::1")
    assert network_of("fe80::1%eth0") == "fe80::/64"
    assert network_of("") == ""


def test_strangers_make_room_for_newcomers() -> None:
    handshakes, closed = Handshakes(most=4), list[str]()
    for number in range(10):
        handshakes.begin(number, "10.0.0.1", lambda number=number: closed.append(f"flood {number}"))
    handshakes.begin("honest", "10.0.0.2", lambda: closed.append("honest"))
    for number in range(10, 20):
        handshakes.begin(number, "10.0.0.1", lambda number=number: closed.append(f"flood {number}"))
    assert closed == [f"flood {number}" for number in range(17)]  # the oldest first
    assert handshakes.end("honest")
    assert not handshakes.end(3)
    assert len(handshakes) == 3


def ends_in_order(server: RunningServer) -> list[str]:
    """Ids of requests in the order in which the engine ends them; clients may read two answers in either order."""
    ended: list[str] = []
    engine = server.context.engine
    take = engine._take_update

    def noted(update: Update) -> None:
        if update.ended is not None:
            ended.append(update.id)
        take(update)

    engine._take_update = noted
    return ended


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that makes no progress."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.full
@pytest.mark.parametrize("allowed", [False, True])
def test_priorities_of_clients_without_keys(allowed: bool) -> None:
    with running_server(allow_priority=allowed, engine={"max_num_seqs": 1}) as server:
        ended, done = ends_in_order(server), list[str]()
        with client_at(server, "127.0.0.1") as http:
            first = http.send(http.build_request("POST", "/v1/completions", json={**LONG, "stream": True}), stream=True)
            lines = first.iter_lines()
            next(lines)  # it runs, in the only slot
            (running,) = server.context.engine._streams
            with stopped(server.context.engine.hello.pid):
                threads = []
                for number, (name, priority) in enumerate([("honest", 0), ("urgent", -1000)]):
                    threads.append(sent(server, "127.0.0.1", {**SHORT, "priority": priority}, done, name))
                    wait_open(server, number + 2)
                _, honest, urgent = server.context.engine._streams
            assert list(lines)[-2:] == ["data: [DONE]", ""]
            for thread in threads:
                thread.join()
    later = [urgent, honest] if allowed else [honest, urgent]
    assert ended == [running, *later]  # the first keeps its slot to its end, whichever priority the others have


@pytest.mark.full
def test_addresses_without_keys_share_slots_and_queue() -> None:
    with running_server(limits=Limits(max_queue=6), engine={"max_num_seqs": 2}) as server:
        done: list[str] = []
        threads = [sent(server, "127.0.0.2", {**LONG, "cache_salt": str(n)}, done, "bomb") for n in range(8)]
        wait_open(server, 8)
        with client_at(server, "127.0.0.2") as same, client_at(server, "127.0.0.1") as other:
            assert same.post("/v1/completions", json=SHORT).status_code == 429
            answer = other.post("/v1/completions", json=SHORT)
        assert answer.status_code == 200
        assert len(done) <= 2  # it did not wait for the eight requests before it
        for thread in threads:
            thread.join()
