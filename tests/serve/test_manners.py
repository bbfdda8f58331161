"""Manners of the server: turns of keys, logs that never block, heartbeats, hosts and origins, silent connections."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import RunningServer, model_folder, running_server

from bifolio.api.messages import BLOCK_HELD
from bifolio.serve.http.auth import Tenant
from bifolio.serve.process.fairness import MAX_SHIFT, Turns
from bifolio.serve.views import live
from pty_session import PtySession

SHORT = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


# -- turns ----------------------------------------------------------------------------------------------------------


def test_keys_take_turns_however_many_requests_each_sends() -> None:
    turns = Turns()
    flood = [turns.next("loud") for _ in range(100)]
    quiet = [turns.next("quiet") for _ in range(3)]
    order = sorted([(turn, 1, "loud") for turn in flood] + [(turn, 0, "quiet") for turn in quiet])
    assert [name for _, _, name in order[:6]] == ["quiet", "loud"] * 3


def test_an_idle_key_gains_nothing_by_waiting() -> None:
    turns = Turns()
    for _ in range(50):
        turns.started(turns.next("busy"))
    late = [turns.next("late") for _ in range(3)]
    assert late[0] >= 49


def test_a_priority_overtakes_some_requests_and_starves_none() -> None:
    turns = Turns()
    victim = turns.next("same")
    urgent = [turns.next("same", priority=-1000) for _ in range(200)]
    assert sum(turn < victim for turn in urgent) <= MAX_SHIFT
    assert urgent[0] < victim
    assert turns.next("same", priority=-1) > victim


@pytest.mark.full
def test_urgent_requests_do_not_starve_others() -> None:
    with running_server(engine={"max_num_seqs": 2}) as server:
        stop = threading.Event()

        def flood() -> None:
            with server.http() as http:
                while not stop.is_set():
                    http.post("/v1/completions", json={**SHORT, "max_tokens": 8, "priority": -1000})

        threads = [threading.Thread(target=flood) for _ in range(12)]
        for thread in threads:
            thread.start()
        with server.http() as http:
            statuses = [http.post("/v1/completions", json={**SHORT, "priority": 1000}).status_code for _ in range(3)]
        stop.set()
        for thread in threads:
            thread.join()
        assert statuses == [200] * 3


# -- budgets ---------------------------------------------------------------------------------------------------------


def test_logprobs_beyond_the_budget_are_refused(server: RunningServer) -> None:
    body = {"prompt": ["Once upon a time"] * 64, "echo": True, "logprobs": 100, "max_tokens": 400}
    with server.http() as http:
        reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "too_many_logprobs"


@pytest.mark.full
def test_a_full_queue_of_one_key_does_not_refuse_another() -> None:
    from bifolio.serve.http.context import Limits

    limits = Limits(max_queue=8)
    with running_server(keys=["one-key", "other-key"], limits=limits, engine={"max_num_seqs": 2}) as server:
        filling = {**SHORT, "prompt": ["Once"] * 10, "max_tokens": 300, "ignore_eos": True}
        with server.http("one-key") as busy, server.http("other-key") as other:
            thread = threading.Thread(target=lambda: busy.post("/v1/completions", json=filling))
            thread.start()
            while server.on_loop(lambda: server.context.engine.num_open) < 10:
                time.sleep(0.01)
            assert (
                server.http("one-key").post("/v1/completions", json={**SHORT, "prompt": ["a"] * 10}).status_code == 429
            )
            assert other.post("/v1/completions", json=SHORT).status_code == 200
            thread.join()


@pytest.mark.full
def test_embeddings_wait_in_the_same_queue() -> None:
    from bifolio.serve.http.context import Limits

    with running_server(limits=Limits(max_queue=2)) as server, server.http() as http:
        assert http.post("/v1/embeddings", json={"input": ["a"] * 10}).status_code == 200
        assert http.post("/v1/embeddings", json={"input": ["a"] * 11}).status_code == 429


# -- logs and heartbeats ---------------------------------------------------------------------------------------------


def start_server(*options: str, **popen: Any) -> tuple[subprocess.Popen[bytes], str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "bifolio", "serve", "-m", str(model_folder()), "--port", str(port), *options]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **popen)
    return process, f"http://127.0.0.1:{port}"


def wait_ready(url: str, process: subprocess.Popen[bytes], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(url + "/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready; status {process.poll()}")


@pytest.mark.full
def test_a_log_that_is_not_read_holds_nothing_up() -> None:
    reading, writing = os.pipe()
    process, url = start_server("--log-level", "debug", stderr=writing)
    try:
        os.close(writing)
        wait_ready(url, process)
        with httpx.Client(base_url=url, timeout=30) as http:
            for _ in range(600):
                assert http.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(reading)


@pytest.mark.full
def test_a_closed_standard_error_is_no_reason_to_stop() -> None:
    process, url = start_server(preexec_fn=lambda: os.close(2))
    try:
        wait_ready(url, process)
        assert httpx.post(url + "/v1/completions", json=SHORT, timeout=30).status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.full
def test_serving_is_logged_when_the_port_is_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "bifolio", "serve", "-m", str(model_folder()), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert '"message": "serving"' not in done.stderr
    assert f"port {port} is in use: pass --port" in done.stderr


@pytest.mark.full
def test_logs_are_readable_on_a_terminal_and_json_in_a_pipe() -> None:
    options = ("serve", "-m", str(model_folder()), "--port", "0")
    with PtySession.bifolio(*options, width=200) as terminal:
        terminal.expect(" serving")
        terminal.interrupt()
        assert terminal.wait() == 0
    lines = [line for line in re.split(r"[\r\n]+|\^C", terminal.text) if line.strip()]
    assert all(re.match(r"\d\d:\d\d:\d\d \w", line) for line in lines), lines
    assert re.search(r"serving .*127\.0\.0\.1:\d+", terminal.text)
    command = [sys.executable, "-m", "bifolio", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        records = []
        for line in process.stderr or ():
            records.append(json.loads(line))
            if records[-1]["message"] == "serving":
                process.send_signal(signal.SIGTERM)
    assert any(record["message"] == "serving" for record in records)
    assert all({"time", "level", "part", "message"} <= set(record) for record in records)


@pytest.mark.full
def test_a_stopped_engine_is_not_ready() -> None:
    with running_server(heartbeat_timeout=1.5) as server, server.http() as http:
        assert server.context.engine.hello is not None
        pid = server.context.engine.hello.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            end = time.monotonic() + 20
            while http.get("/ready").status_code == 200 and time.monotonic() < end:
                time.sleep(0.1)
            assert http.get("/ready").status_code == 503
            assert http.get("/health").status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)


# -- hosts, origins, types -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:1234"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_requests_of_other_sites_are_refused(server: RunningServer, headers: dict[str, str], status: int) -> None:
    with server.http() as http:
        reply = http.post(
            "/v1/completions", content=json.dumps(SHORT), headers={"content-type": "application/json", **headers}
        )
    assert reply.status_code == status


def test_the_servers_own_page_may_call(server: RunningServer) -> None:
    with server.http() as http:
        assert http.post("/v1/completions", json=SHORT, headers={"origin": server.url}).status_code == 200


def test_docs_are_a_page(server: RunningServer) -> None:
    with server.http() as http:
        reply = http.get("/docs")
    assert reply.status_code == 200
    assert "/v1/completions" in reply.text
    assert "<script" not in reply.text


def test_docs_have_every_route_and_the_styles_of_the_page(server: RunningServer) -> None:
    from bifolio.serve.http.app import ROUTES
    from bifolio.serve.protocols.routes import PROTOCOL_ROUTES

    with server.http() as http:
        page = http.get("/docs").text
        styles = re.findall(r'<link rel="stylesheet" href="([^"]+)"', page)
        assert styles
        assert [http.get(path).status_code for path in styles] == [200] * len(styles)
    shown = set(re.findall(r'<span class="method \w+">(\w+)</span> <code>([^<]+)</code>', page))
    routes = [(method, path) for path, method, _ in (*ROUTES, *PROTOCOL_ROUTES)]
    missing = {(method, path.replace(":path", "")) for method, path in routes} - shown
    assert not missing
    table = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    assert "`GET /docs`" in table


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_silent_connections_deny_no_service() -> None:
    with running_server(max_connections=20, max_connections_per_address=16) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
        try:
            with server.http() as http:
                assert http.get("/health").status_code == 200  # at once
            end = time.monotonic() + 20
            status = 0
            while status != 200 and time.monotonic() < end:
                with server.http() as http, contextlib.suppress(httpx.HTTPError):
                    status = http.post("/v1/completions", json=SHORT).status_code
                time.sleep(0.1)
            assert status == 200
        finally:
            for connection in silent:
                connection.close()


def test_a_key_sees_the_lengths_of_its_own_requests_only() -> None:
    alice, bob = Tenant("key-0", b"a"), Tenant("key-1", b"b")
    entry = {"id": "r-1", "slot": 3, "phase": "decode", "prompt": 7, "tokens": 9, "generated": 2}
    assert live.visible_entry({**entry, "owner": "key-0"}, alice) == entry
    hidden = live.visible_entry({**entry, "owner": "key-0"}, bob)
    assert (hidden["id"], hidden["prompt"], hidden["tokens"], hidden["slot"]) == ("", 0, 0, 3)
    blocks = bytes([0, 0, 1, 0, BLOCK_HELD + 3, 1, BLOCK_HELD + 5, 2])
    assert live._visible_blocks(blocks, {3}) == bytes([0, 0, 1, 0, BLOCK_HELD + 3, 1, BLOCK_HELD, 2])
