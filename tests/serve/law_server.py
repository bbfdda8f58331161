"""A server in a process of its own with three keys, for measuring what one client can do to another."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

VICTIM, ATTACKER, NEIGHBOUR = "victim-key", "attacker-key", "neighbour-key"
SHORT = json.dumps({"prompt": "Once upon", "max_tokens": 4, "temperature": 0}).encode()


class LawServer:
    """`bifolio serve` with its default limits; a neighbour sends requests all the time."""

    def __init__(self, model: Path | str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        keys = [part for key in (VICTIM, ATTACKER, NEIGHBOUR) for part in ("--api-key", key)]
        command = [sys.executable, "-m", "bifolio", "serve", "-m", str(model), "--port", str(self.port), *keys]
        self._process = subprocess.Popen([*command, "--log-level", "error"], stdin=subprocess.DEVNULL, env=os.environ)
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

    def ask(self, path: str, content: bytes | None, key: str, timeout: float = 60.0) -> int:
        """The status of an answer that is read to its end; 0 if it took longer than `timeout` and the client left."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            connection.request("GET" if content is None else "POST", path, content, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except TimeoutError:
            return 0
        finally:
            connection.close()

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
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server did not start")
