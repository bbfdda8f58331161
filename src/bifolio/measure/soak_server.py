"""The server of a soak test: its process, its cache, and requests to it.

The pages of a cache are taken from the system when they are first written: the memory of an engine with a large cache
rises for as long as new prompts arrive, as with a leak. So this server has a small cache, and `fill_cache` writes all
of its blocks at the beginning of an engine's life.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bifolio.engine.memory import MemoryPlan
from bifolio.errors import ConfigError

ORACLE_KEY, CHAOS_KEY = "soak-oracle-key", "soak-chaos-key"
START_SECONDS = 120.0
MAX_MODEL_LEN = 2048  # tokens; a longer context would take minutes to fill
CACHED_SEQUENCES = 8  # of full length


class SmallCache(NamedTuple):
    """The cache of the server."""

    max_model_len: int
    num_bytes: int | None  # None: the default, which is no larger
    vocab_size: int

    @classmethod
    def of(cls, plan: MemoryPlan, max_model_len: int, vocab_size: int) -> SmallCache:
        """A cache that holds some sequences, for a model whose default one has this plan."""
        length = min(max_model_len, MAX_MODEL_LEN)
        wanted = CACHED_SEQUENCES * -(-length // plan.block_size) + 1
        is_smaller = wanted < plan.num_blocks
        return cls(length, -(-plan.cache_bytes * wanted // plan.num_blocks) if is_smaller else None, vocab_size)

    def options(self) -> list[str]:
        memory = [] if self.num_bytes is None else ["--memory", str(self.num_bytes)]
        return ["--max-model-len", str(self.max_model_len), *memory]

    def prompts(self, seed: object) -> list[list[int]]:
        """Prompts without a common prefix that fill the cache twice."""
        rng = random.Random(f"{seed}-filler")
        count, length = 2 * CACHED_SEQUENCES, self.max_model_len - 1
        return [[rng.randrange(self.vocab_size) for _ in range(length)] for _ in range(count)]


class SoakServer:
    """`bifolio serve` in a process of its own."""

    def __init__(self, model: str | None, numerics: Mapping[str, Any], cache: SmallCache) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        self._cache = cache
        chosen = [] if model is None else ["-m", model]
        command = [sys.executable, "-m", "bifolio", "serve", *chosen, "--port", str(self.port), "--log-level", "error"]
        command += ["--api-key", ORACLE_KEY, "--api-key", CHAOS_KEY, *_options(numerics), *cache.options()]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def wait_ready(self) -> None:
        """Wait until the engine answers."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.ask("GET", "/ready")[0] == 200:
                    return
            time.sleep(0.1)
        raise ConfigError("the server of the soak test did not start: run `bifolio serve` to see why")

    def fill_cache(self, seed: object, stop: threading.Event) -> bool:
        """Write every block of the cache, once the engine has started; False if it does not answer in time."""
        end = time.monotonic() + START_SECONDS
        for prompt in self._cache.prompts(seed):
            while self._asked(prompt) != 200:
                if time.monotonic() > end or stop.wait(0.2):
                    return False
        return True

    def _asked(self, prompt: list[int]) -> int:
        try:
            return self.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1}, CHAOS_KEY)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def ask(self, method: str, path: str, body: Any = None, key: str = ORACLE_KEY) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def used_blocks(self) -> float:
        """Share of the blocks in use once all requests have ended."""
        end = time.monotonic() + 30
        used = 1.0
        while time.monotonic() < end:
            try:
                status, body = self.ask("GET", "/metrics")
            except OSError:
                status, body = 0, b""
            lines = body.decode().splitlines()
            values = [float(line.split()[-1]) for line in lines if line.startswith("bifolio:kv_cache_usage_perc")]
            if status == 200 and values:
                used = values[0]
                if not used:
                    break
            time.sleep(0.5)
        return used

    def processes(self) -> list[int]:
        """The front end, then its children."""
        root = self._process.pid
        found = [root]
        for task in Path(f"/proc/{root}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in task.read_text(encoding="ascii").split()]
        return found

    def close(self) -> bool:
        """End the server; False if it had to be killed."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return False
        return True


def _options(numerics: Mapping[str, Any]) -> list[str]:
    """The same numbers as options of the command line."""
    found: list[str] = []
    for name, value in numerics.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(flag)
        elif value is not None and value is not False:
            found += [flag, str(value)]
    return found
