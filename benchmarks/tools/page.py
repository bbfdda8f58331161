"""Tokens per second of one answer: the page in Chromium, and a script that reads the same stream.

    python -m benchmarks.tools.page MODEL [--tokens 256] [--rounds 5] [--json]

Page and script send the same chat request to one server in alternating rounds, so that a slowdown of the machine
affects both. Speed is counted from the first to the last token. Chromium runs on the machine of the server and takes
part of its CPU time; `cpu ms/token` is the processor time of the client: the processes of the browser, or the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

QUESTION = "Tell me a story about a little fox who finds a map."
TICKS = os.sysconf("SC_CLK_TCK")


class Figure(NamedTuple):
    """One answer."""

    tokens_per_second: float
    cpu_ms_per_token: float


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a server."""
    port = free_port()
    command = [sys.executable, "-m", "bifolio", "serve", "-m", model, "--port", str(port), "--log-level", "error"]
    with subprocess.Popen(command) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(1200):
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/ready").status_code == 200:
                        break
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def by_script(url: str, tokens: int) -> Figure:
    """The request of the page, read line by line."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    moments: list[tuple[float, int]] = []
    began = time.process_time()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                count = sum(len(choice.get("token_ids") or ()) for choice in json.loads(line[6:])["choices"])
                if count:
                    moments.append((time.perf_counter(), count))
    used = time.process_time() - began
    count = sum(number for _, number in moments)
    return Figure((count - moments[0][1]) / (moments[-1][0] - moments[0][0]), 1000 * used / count)


class Chromium:
    """A page of a headless browser over the debugging pipe: only `Runtime.evaluate`, so nothing else is observed."""

    def __init__(self, url: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (reads, self._out), (self._in, writes) = os.pipe(), os.pipe()
        program = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"
        options = ["--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--window-size=1440,900"]
        self.process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "sh", program, *options,
             f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(reads, writes), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._unread, self._number = b"", 0
        target = self._call("Target.createTarget", url=url)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def _call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._unread:
                self._unread += os.read(self._in, 1 << 20)
            text, self._unread = self._unread.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("id") == self._number:
                return answer["result"]

    def evaluate(self, code: str) -> Any:
        return self._call("Runtime.evaluate", self._session, expression=code, returnByValue=True)["result"].get("value")

    def wait(self, code: str) -> None:
        while not self.evaluate(code):
            time.sleep(0.5)

    def cpu_seconds(self) -> float:
        """Processor time of all processes of the browser."""
        table: dict[int, tuple[int, float]] = {}  # process -> (parent, seconds)
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                table[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS)
        family = {self.process.pid}
        while grown := {child for child, (parent, _) in table.items() if parent in family} - family:
            family |= grown
        return sum(table[process][1] for process in family if process in table)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._folder.cleanup()


SEND = """(() => {
  document.getElementById("new-chat").click();
  const set = (name, value) => {
    const field = document.getElementById(name);
    if (field.type === "checkbox") field.checked = value; else field.value = value;
    for (const kind of ["input", "change"]) field.dispatchEvent(new Event(kind, { bubbles: true }));
  };
  set("o-temperature", "0"); set("o-max_tokens", "%d"); set("o-ignore_eos", true); set("prompt", "%s");
  document.getElementById("run").click();
})()"""
DONE = "document.querySelector('.message.assistant[aria-busy=false]') !== null"


def by_page(page: Chromium, tokens: int) -> Figure:
    """The speed that the page shows below the answer."""
    began = page.cpu_seconds()
    page.evaluate(SEND % (tokens, QUESTION))
    page.wait(DONE)
    used = page.cpu_seconds() - began
    words = page.evaluate("document.querySelector('.stats').textContent").split(" · ")
    shown = {part.split(" ", 1)[1]: float(part.split(" ", 1)[0]) for part in words if part.split(" ", 1)[0].isdecimal()}
    return Figure(shown["tokens/s"], 1000 * used / shown["tokens"])


def measure(model: str, tokens: int, rounds: int) -> dict[str, list[Figure]]:
    found: dict[str, list[Figure]] = {"script": [], "page": []}
    with served(model) as url:
        page = Chromium(url)
        try:
            page.wait("document.querySelector('#status.ok') !== null")
            for number in range(rounds + 1):
                figures = {"script": by_script(url, tokens), "page": by_page(page, tokens)}
                if number:  # the first round warms up caches and the browser
                    for name, figure in figures.items():
                        found[name].append(figure)
        finally:
            page.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.model, arguments.tokens, arguments.rounds)
    if arguments.json:
        print(json.dumps({name: [figure._asdict() for figure in figures] for name, figures in found.items()}))
        return
    for name, figures in found.items():
        speeds = [figure.tokens_per_second for figure in figures]
        cpu = statistics.median(figure.cpu_ms_per_token for figure in figures)
        best = f"median {statistics.median(speeds):.1f} tokens/s, best {max(speeds):.1f}"
        print(f"{name:<7} {best}, {cpu:.2f} cpu ms/token")
    pairs = zip(found["script"], found["page"], strict=True)
    ratios = [page.tokens_per_second / script.tokens_per_second for script, page in pairs]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"page / script, round by round: {each}; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
