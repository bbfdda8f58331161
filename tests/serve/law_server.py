"""A server in a process of its own with three clients, for measuring the effect of one client on another."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

VICTIM, ATTACKER, NEIGHBOUR = "victim-key", "attacker-key", "neighbour-key"
ADDRESSES = {VICTIM: "127.0.0.1", ATTACKER: "127.0.0.2", NEIGHBOUR: "127.0.0.3"}  # of clients without keys
SHORT = json.dumps({"prompt": "Once upon", "max_tokens": 4, "temperature": 0}).encode()


def too_slow(during: list[float], calm: list[float], limit: float) -> str | None:
    """Compare times under attack with those before and after it, on a machine that may run other programs.

    The law allows `limit` seconds on an idle machine. A loaded one is as many times slower as its calm times show: the
    median may be four times that without an attack (clients share the machine), beyond a quarter of the limit, and the
    longest time four times the longest, beyond the limit.
    """
    typical, longest = statistics.median(during), max(during)
    if typical > limit / 4 + 4 * statistics.median(calm):
        return f"a median of {typical:.2f} s, and {statistics.median(calm):.2f} s without an attack"
    if longest > limit + 4 * max(calm):
        return f"up to {longest:.2f} s, and {max(calm):.2f} s without an attack"
    return None


class LawServer:
    """`bifolio serve` with its default limits; a neighbour sends requests all the time.

    Clients have keys at one address, or addresses of their own without keys.
    """

    def __init__(self, model: Path | str, has_keys: bool = True) -> None:
        self._has_keys = has_keys
        self._numbers = itertools.count()
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        self.port, self.events_port, replay_port = (int(each.getsockname()[1]) for each in listeners)
        for listener in listeners:
            listener.close()
        keys = [part for key in (VICTIM, ATTACKER, NEIGHBOUR) for part in ("--api-key", key)] if has_keys else []
        command = [sys.executable, "-m", "bifolio", "serve", "-m", str(model), "--port", str(self.port), *keys]
        events = [f"tcp://127.0.0.1:{port}" for port in (self.events_port, replay_port)]
        command += ["--kv-events", events[0], "--kv-events-replay", events[1]]
        command += ["--log-level", "error", "--drain-timeout", "1"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=os.environ)
        self._stop = threading.Event()
        self._load = threading.Thread(target=self._neighbour, daemon=True)
        self._wait_ready()
        self._load.start()

    def close(self) -> None:
        self._stop.set()
        self._load.join(30)
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def num_bytes(self) -> int:
        """Memory of the server and its processes."""
        processes = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        return sum(process.memory_info().rss for process in processes)

    def ask(self, path: str, content: bytes | None, key: str, timeout: float = 60.0) -> int:
        """The status of an answer that is read to its end; 0 if it took longer than `timeout` and the client left."""
        return self._exchange(path, content, key, timeout)[0]

    def address(self, key: str) -> str:
        """The address that a client connects from."""
        return "127.0.0.1" if self._has_keys else ADDRESSES[key]

    def authorization(self, key: str) -> str:
        """The header of a client, with its end of line."""
        return f"authorization: Bearer {key}\r\n" if self._has_keys else ""

    def _exchange(self, path: str, content: bytes | None, key: str, timeout: float = 60.0) -> tuple[int, bytes]:
        source = (self.address(key), 0)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout, source_address=source)
        try:
            headers = {"content-type": "application/json"}
            if self._has_keys:
                headers["authorization"] = f"Bearer {key}"
            connection.request("GET" if content is None else "POST", path, content, headers)
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, body
        except TimeoutError:
            return 0, b""
        finally:
            connection.close()

    def store(self) -> str:
        """Store a response of the victim; the path where it is found."""
        status, body = self._exchange("/v1/responses", b'{"input": "a", "max_output_tokens": 1}', VICTIM)
        if status != 200:
            raise AssertionError(f"a response of the victim was answered with {status}")
        return f"/v1/responses/{json.loads(body)['id']}"

    def times_of_victim(self, stored: str, rounds: int) -> dict[str, list[float]]:
        """The times of each kind of request: short, with a new grammar, of a stored response, `/health`."""
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            name = f"p{next(self._numbers)}"
            schema = {"type": "object", "properties": {name: {"type": "string"}}}
            grammar = {"prompt": "Once", "max_tokens": 4, "structured_outputs": {"json": schema}}
            for kind, path, content in (
                ("short", "/v1/completions", SHORT),
                ("grammar", "/v1/completions", json.dumps(grammar).encode()),
                ("stored", stored, None),
                ("health", "/health", None),
            ):
                times.setdefault(kind, []).append(self._timed(path, content))
        return times

    def attack(self, path: str, content: bytes, copies: int, seconds: float) -> tuple[list[float], list[float], Any]:
        """Send a request several times; (times of the victim's requests, times of /health, statuses of the attack)."""
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(self.ask(path, content, ATTACKER, seconds)))
            for _ in range(copies)
        ]
        for thread in threads:
            thread.start()
        answers, healths = [], []
        while len(answers) < 2 or any(thread.is_alive() for thread in threads):
            answers.append(self._timed("/v1/completions", SHORT))
            healths.append(self._timed("/health", None))
        for thread in threads:
            thread.join()
        return answers, healths, statuses

    def _timed(self, path: str, content: bytes | None) -> float:
        began = time.monotonic()
        status = self.ask(path, content, VICTIM)
        if status != 200:
            raise AssertionError(f"{path} of the victim was answered with {status}")
        return time.monotonic() - began

    def _neighbour(self) -> None:
        body = json.dumps({"prompt": "The fox", "max_tokens": 64, "temperature": 0, "ignore_eos": True}).encode()
        while not self._stop.is_set():
            self.ask("/v1/completions", body, NEIGHBOUR)

    def _wait_ready(self) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end and self.is_alive:
            try:
                if self.ask("/ready", None, VICTIM) == 200:
                    return
            except (OSError, http.client.HTTPException):  # before it listens, a connection may reach itself
                time.sleep(0.1)
        raise AssertionError("the server did not start")
