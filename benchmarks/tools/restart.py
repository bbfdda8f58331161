"""Second turns of conversations on a server that was ended and started again, from its files and without them.

    python -m benchmarks.tools.restart -m smollm2 --conversations 50 [--kill]

A server answers the first turn of each conversation and ends: it is told to, or killed once its blocks are written.
Then it starts again on its files, beside one without any, and the two answer each second turn one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.tools.page import free_port

READY_SECONDS = 300.0
NAMES = ("fox", "owl", "bear", "hare", "otter", "badger", "heron", "mouse")
PLACES = ("a quiet wood", "an old mill", "a wide river", "a small harbour", "a high tower", "a green valley")
DEEDS = ("found a map", "lost a golden key", "heard a strange song", "built a little boat", "met a traveller")


class Answer(NamedTuple):
    """One streamed answer."""

    text: str
    first: float  # seconds to the first token
    cached: int  # prompt tokens
    num_prompt: int


class Server:
    """`bifolio serve` in a process of its own."""

    def __init__(self, model: str | None, *options: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", "bifolio", "serve", "--port", port, "--log-level", "error"]
        command += [] if model is None else ["-m", model]
        began = time.perf_counter()
        self._process = subprocess.Popen([*command, *options])
        self._http = httpx.Client(base_url=self.url, timeout=600)
        while self._process.poll() is None and time.perf_counter() - began < READY_SECONDS:
            with contextlib.suppress(httpx.HTTPError):
                if self._http.get("/ready").status_code == 200:
                    break
            time.sleep(0.02)
        self.ready = time.perf_counter() - began
        self.pid = self._process.pid

    def ask(self, messages: list[dict[str, str]], num_tokens: int) -> Answer:
        body = {"messages": messages, "temperature": 0, "max_tokens": num_tokens, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        began, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece:
                        first = first or time.perf_counter() - began
                    text += piece
        return Answer(text, first, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])

    def end(self, number: int) -> None:
        self._http.close()
        self._process.send_signal(number)
        self._process.wait(60)


@contextlib.contextmanager
def serving(model: str | None, *options: str) -> Iterator[Server]:
    server = Server(model, *options)
    try:
        yield server
    finally:
        if server._process.poll() is None:
            server.end(signal.SIGTERM)


def question(number: int, num_sentences: int) -> str:
    """A message whose beginning is that of no other."""
    draw = random.Random(number)
    sentences = [
        f"Once upon a time the {draw.choice(NAMES)} of {draw.choice(PLACES)} {draw.choice(DEEDS)}."
        for _ in range(num_sentences)
    ]
    return f"Story {number}. {' '.join(sentences)} How does it end?"


def wait_until_written(folder: Path, seconds: float = 60.0) -> None:
    """Wait until no further file appears for a second."""
    end, count = time.monotonic() + seconds, -1
    while time.monotonic() < end and (found := len(list(folder.rglob("*")))) != count:
        count = found
        time.sleep(1.0)


def summary(name: str, answers: list[Answer], ready: float) -> dict[str, Any]:
    first = [answer.first for answer in answers]
    return {
        "server": name,
        "ready_s": round(ready, 2),
        "first_token_p50_ms": round(1e3 * statistics.median(first)),
        "first_token_max_ms": round(1e3 * max(first)),
        "cached_share": round(sum(answer.cached for answer in answers) / sum(one.num_prompt for one in answers), 3),
        "prompt_tokens": round(statistics.mean(answer.num_prompt for answer in answers)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--sentences", type=int, default=16, help="of the first message")
    parser.add_argument("--tokens", type=int, default=12, help="of each answer")
    parser.add_argument("--kill", action="store_true", help="kill the first server (SIGKILL)")
    arguments = parser.parse_args()
    talks = [[{"role": "user", "content": question(n, arguments.sentences)}] for n in range(arguments.conversations)]
    with tempfile.TemporaryDirectory(prefix="bifolio-restart-") as folder:
        options = ("--kv-offload-dir", folder)
        server = Server(arguments.model, *options)
        first = [server.ask(talk, arguments.tokens) for talk in talks]
        print(json.dumps(summary("first start", first, server.ready)), flush=True)
        if arguments.kill:
            wait_until_written(Path(folder))
        server.end(signal.SIGKILL if arguments.kill else signal.SIGTERM)
        for talk, answer in zip(talks, first, strict=True):
            talk += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
        with serving(arguments.model, *options) as restarted, serving(arguments.model) as plain:
            found: dict[str, list[Answer]] = {"started again": [], "without files": []}
            for talk in talks:
                found["started again"].append(restarted.ask(talk, arguments.tokens))
                found["without files"].append(plain.ask(talk, arguments.tokens))
            for name, one in zip(found, (restarted, plain), strict=True):
                print(json.dumps(summary(name, found[name], one.ready)), flush=True)
        pairs = zip(*found.values(), strict=True)
        print(json.dumps({"equal answers": sum(one.text == other.text for one, other in pairs), "of": len(talks)}))


if __name__ == "__main__":
    main()
