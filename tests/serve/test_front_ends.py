"""Several front ends on one port: one server to its clients, with limits, metrics and keys in common."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import model_folder

KEYS = ("first-key-123", "second-key-456")
SHORT = {"prompt": "Once upon a time there was a fox", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str

    def http(self, key: str = KEYS[0]) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=60)

    def metrics(self) -> dict[str, float]:
        with self.http() as http:
            found = re.findall(r"^(\S+) (\S+)$", http.get("/metrics").text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def branches(self) -> list[int]:
        """Process numbers of the further front ends."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command, status = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
                parent = int(status.rpartition(")")[2].split()[1])
                if b"bifolio.serve.helpers.branch" in command and parent == self.process.pid:
                    found.append(int(entry.name))
        return found


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--front-ends", "3", "--max-open-per-key", "3", "--max-num-seqs", "8", "--max-model-len", "512"]
    keys = [part for key in KEYS for part in ("--api-key", key)]
    command = [sys.executable, "-m", "bifolio.cli.main", "serve", "-m", str(model_folder()), "--port", str(port)]
    process = subprocess.Popen([*command, *options, *keys, "--memory", "64MB", "--log-level", "warning"])
    running = Served(process, f"http://127.0.0.1:{port}")
    try:
        _wait(lambda: _is_ready(running) and len(running.branches()) == 2)
        time.sleep(0.5)
        _wait(lambda: _listeners(port) == 3)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def _is_ready(served: Served) -> bool:
    with contextlib.suppress(httpx.HTTPError), served.http() as http:
        return http.get("/ready").status_code == 200
    return False


def _wait(condition: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def _listeners(port: int) -> int:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


pytestmark = [pytest.mark.full, pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")]


def test_every_front_end_answers_alike_and_counts_once(served: Served) -> None:
    before = served.metrics().get('bifolio:http_responses_total{path="/v1/completions",status="200"}', 0.0)
    texts = set()
    for _ in range(24):  # connections of their own, which the system distributes
        with served.http() as http:
            answer = http.post("/v1/completions", json=SHORT)
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1
    time.sleep(1.2)  # front ends report their metrics twice a second
    after = served.metrics()
    assert after['bifolio:http_responses_total{path="/v1/completions",status="200"}'] - before == 24
    assert after["bifolio:engine_up"] == 1.0
    assert after["bifolio:front_end_cpu_seconds_total"] > 0


def test_stored_conversations_are_found_by_every_front_end(served: Served) -> None:
    body = {"input": "Hello there", "max_output_tokens": 3}
    with served.http() as http:
        name = http.post("/v1/responses", json=body).json()["id"]
    for _ in range(12):  # a connection of its own each time, so that the system chooses a front end
        with served.http() as http:
            follow = http.post("/v1/responses", json={**body, "previous_response_id": name})
            assert follow.status_code == 200, follow.text
            assert http.get(f"/v1/responses/{name}").json()["id"] == name
    with served.http(KEYS[1]) as http:
        assert http.get(f"/v1/responses/{name}").status_code == 404


def test_a_key_is_the_same_tenant_in_every_front_end(served: Served) -> None:
    """Cached prefixes belong to a key: all front ends give it the same salt, and another key has another."""
    body = {**SHORT, "prompt": list(range(40, 80))}
    hits = []
    for key in [KEYS[0]] * 12 + [KEYS[1]]:
        with served.http(key) as http:
            usage = http.post("/v1/completions", json=body).json()["usage"]
            hits.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert hits[0] == hits[-1] == 0
    assert all(hit > 0 for hit in hits[1:-1])


def test_the_limit_of_a_key_holds_over_all_front_ends(served: Served) -> None:
    async def statuses() -> list[int]:
        async def one() -> int:
            headers = {"authorization": f"Bearer {KEYS[0]}"}
            async with (
                httpx.AsyncClient(base_url=served.url, headers=headers, timeout=60) as http,
                http.stream("POST", "/v1/completions", json=LONG) as answer,
            ):
                async for _ in answer.aiter_bytes():
                    pass
                return answer.status_code

        return list(await asyncio.gather(*(one() for _ in range(12))))

    found = asyncio.run(statuses())
    assert set(found) <= {200, 429}
    assert 3 <= found.count(200) < 12
    with served.http() as http:  # nothing stays counted
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_a_front_end_that_dies_is_replaced_and_its_requests_end(served: Served) -> None:
    victim = served.branches()[0]
    os.kill(victim, signal.SIGKILL)
    port = int(served.url.rpartition(":")[2])
    _wait(lambda: victim not in served.branches() and len(served.branches()) == 2 and _listeners(port) == 3)
    for _ in range(6):
        with served.http() as http:
            assert http.post("/v1/completions", json=SHORT).status_code == 200
    _wait(lambda: served.metrics()["bifolio:num_requests_running"] == 0.0)


def test_a_stop_while_further_front_ends_start_ends_all() -> None:
    """They take seconds to start; the drain reaches those that do not serve yet."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bifolio.cli.main", "serve", "-m", str(model_folder()), "--port", str(port)]
    options = ["--front-ends", "2", "--memory", "64MB", "--max-model-len", "512", "--log-level", "warning"]
    process = subprocess.Popen([*command, *options])
    try:
        _wait(lambda: _is_ready(Served(process, f"http://127.0.0.1:{port}")))
        process.send_signal(signal.SIGTERM)
        assert process.wait(25) == 0  # less than the time limit of a drain
    finally:
        process.kill()
