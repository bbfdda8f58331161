"""Tokens per second of one answer: the page in Chromium, and a script that reads the same stream.

    python benchmarks/page_speed.py MODEL [--tokens 256] [--rounds 5] [--json]

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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from playwright.sync_api import sync_playwright

QUESTION = "Tell me a story about a little fox who finds a map."
TICKS = os.sysconf("SC_CLK_TCK")


class Figure(NamedTuple):
    """One answer."""

    tokens_per_second: float
    cpu_ms_per_token: float


@contextlib.contextmanager
def served(model: str) -> Iterator[tuple[str, int]]:
    """(address, process id) of a server."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bifolio", "serve", "-m", model, "--port", str(port), "--log-level", "error"]
    with subprocess.Popen(command) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(1200):
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/ready").status_code == 200:
                        break
                time.sleep(0.1)
            yield url, process.pid
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


def by_page(page: Any, server: int, tokens: int) -> Figure:
    """The speed that the page shows below the answer."""
    page.click("#new-chat")
    page.fill("#o-temperature", "0")
    page.fill("#o-max_tokens", str(tokens))
    page.evaluate("document.getElementById('o-ignore_eos').closest('details').open = true")
    page.set_checked("#o-ignore_eos", True)
    began = browser_seconds(server)
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant[aria-busy=false]", timeout=600_000)
    used = browser_seconds(server) - began
    words = page.locator(".stats").last.inner_text().split(" · ")
    shown = {part.split(" ", 1)[1]: float(part.split(" ", 1)[0]) for part in words if part.split(" ", 1)[0].isdecimal()}
    return Figure(shown["tokens/s"], 1000 * used / shown["tokens"])


def browser_seconds(server: int) -> float:
    """Processor time of the descendants of this process but the server's: playwright's driver and the browser."""
    table: dict[int, tuple[int, float]] = {}  # process -> (parent, seconds)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            table[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS)
    family: set[int] = {os.getpid()}
    while grown := {child for child, (parent, _) in table.items() if parent in family} - family - {server}:
        family |= grown
    return sum(table[process][1] for process in family - {os.getpid()} if process in table)


def measure(model: str, tokens: int, rounds: int) -> dict[str, list[Figure]]:
    found: dict[str, list[Figure]] = {"script": [], "page": []}
    with served(model) as (url, server), sync_playwright() as control:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = control.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        page.wait_for_selector("#status.ok")
        for number in range(rounds + 1):
            figures = {"script": by_script(url, tokens), "page": by_page(page, server, tokens)}
            if number:  # the first round warms up caches and the browser
                for name, figure in figures.items():
                    found[name].append(figure)
        browser.close()
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
