"""`bifolio serve` as its users start it: the command in a process of its own, and a client that knows HTTP alone."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from doors import ADAPTER, NUM_NEW, OPTIONS, SMALL, Door, Tolerance, Turn, opened_llm, recorded

NAME = "door"  # of the served model
ARGUMENTS = {  # of `bifolio serve`, as `doors.OPTIONS`
    "small memory": ("--block-size", str(SMALL["block_size"]), "--max-model-len", str(SMALL["max_model_len"])),
    "deterministic": ("--deterministic",),
    "tensor parallel": ("--tensor-parallel-size", "2", "--threads", "2"),
    "draft": ("--speculative", "ngram"),
}
START_SECONDS = 120.0  # a GPU compiles kernels before the server is ready
STOP_SECONDS = 30.0
REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Client:
    """Implements `Entry`: requests to a running server."""

    port: int

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def complete(self, prompt: list[int], num_new: int, **options: Any) -> Any:
        body = {"model": NAME, "prompt": prompt, "max_tokens": num_new, "return_token_ids": True}
        status, text = self.call("POST", "/v1/completions", body | options)
        assert status == 200, text
        return json.loads(text)

    def _turn(self, prompt: list[int], num_new: int, **options: Any) -> Turn:
        answer = self.complete(prompt, num_new, temperature=0, logprobs=0, **options)
        (choice,) = answer["choices"]
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Turn(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"], cached)

    def ask(
        self, prompts: list[list[int]], num_new: int = NUM_NEW, pattern: str | None = None, adapter: str | None = None
    ) -> list[Turn]:
        options: dict[str, Any] = {"ignore_eos": True}
        if pattern is not None:
            options = {"structured_outputs": {"regex": pattern}}
        if adapter is not None:
            options["model"] = adapter
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._turn(prompt, num_new, **options), prompts))

    def ask_cold(self, prompt: list[int]) -> Turn:
        return self._turn(prompt, NUM_NEW, ignore_eos=True, cache_salt="another")

    def beams(self, prompt: list[int], width: int, num_new: int) -> list[tuple[list[int], float]]:
        search = {"width": width, "length_penalty": 0.0}
        answer = self.complete(prompt, num_new, ignore_eos=True, n=width, beam_search=search)
        return [(choice["token_ids"], choice["beam"]["score"]) for choice in answer["choices"]]

    def num_preemptions(self) -> int:
        return int(self._metric("bifolio:num_preemptions_total", lambda value: value > 0))

    def num_used_blocks(self) -> int:
        used = self._metric("bifolio:kv_cache_usage_perc", lambda value: value == 0)
        return round(used * self._metric("bifolio:kv_cache_num_blocks", lambda value: True))

    def _metric(self, name: str, is_expected: Callable[[float], bool]) -> float:
        """A metric as soon as it has an expected value: the engine reports its counters now and then."""
        end = time.monotonic() + REPORT_SECONDS
        while True:
            status, text = self.call("GET", "/metrics")
            assert status == 200, text
            (line,) = (line for line in text.splitlines() if line.startswith((name + " ", name + "{")))
            value = float(line.split()[-1])
            if is_expected(value) or time.monotonic() > end:
                return value
            time.sleep(0.05)


@contextmanager
def served(path: Path, *arguments: str, kernels: str | None = None) -> Iterator[Client]:
    """A server for the model at a path; SIGTERM ends it and all of its processes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bifolio", "serve", "--model", str(path), "--port", str(port),
               "--served-model-name", NAME, *arguments]  # fmt: skip
    variables = os.environ | ({} if kernels is None else {"BIFOLIO_KERNELS": kernels})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, env=variables
    )
    try:
        client = Client(port)
        _wait_until_ready(client, process)
        yield client
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=STOP_SECONDS)[0]
        assert process.returncode == 0, output.decode(errors="replace")
        assert _members(process.pid) == []
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        for member in _members(process.pid):
            os.kill(member, signal.SIGKILL)


def _wait_until_ready(client: Client, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            output = process.communicate()[0].decode(errors="replace")
            raise AssertionError(f"the server ended with status {process.returncode}: {output}")
        try:
            if client.call("GET", "/ready")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the server was not ready after {START_SECONDS:.0f} seconds")


def _members(session: int) -> list[int]:
    """The processes of a session: those that the server started."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.name))
    return found


def check_served_door(door: Door, tolerance: Tolerance, *arguments: str) -> None:
    """Start a server with a door's option, and check it, or see that it ends with the reason of a refusal."""
    option = OPTIONS[door.option]
    chosen = [*arguments, *ARGUMENTS.get(door.option, ())]
    kernels = None if door.kernels == "gpu" else door.kernels  # those of the device that an argument names
    if option.has_adapter:
        chosen += ["--lora-modules", f"{ADAPTER}={door.settings['lora_modules'][ADAPTER]}"]
    if door.option == "small memory":
        chosen += ["--memory", str(_small_bytes(door))]
    if door.refusal is not None:
        with pytest.raises(AssertionError, match=door.refusal), served(door.path, *chosen, kernels=kernels):
            pass
        return
    with recorded(door), served(door.path, *chosen, kernels=kernels) as client:
        option.check(client, door.model, tolerance)


def _small_bytes(door: Door) -> int:
    """The bytes of the few blocks that `LLM` has with this option."""
    with opened_llm(door.path, kernels=door.kernels, threads=1, **SMALL) as entry:
        return entry.llm.plan.cache_bytes
