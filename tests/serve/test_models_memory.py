"""Twenty models under a budget for three, in real processes: every answer is right, and memory stays in the budget."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from test_several_server import KEY, PROMPT, folders, served

from bifolio import LLM, SamplingParams
from bifolio.serve.several.settings import PROCESS_BYTES

pytestmark = pytest.mark.slow
NUM_MODELS, NUM_REQUESTS, NUM_CLIENTS = 20, 60, 4


def children(pid: int) -> Iterator[int]:
    """All processes below one."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            yield int(path.parent.name)
            yield from children(int(path.parent.name))


def memory_of(pid: int) -> int:
    """Bytes of a process, with its share of those that it has in common with others."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


class Sampler(threading.Thread):
    """The most memory of the processes below the server, and the most that it counted itself."""

    def __init__(self, pid: int, url: str) -> None:
        super().__init__(daemon=True)
        self._pid, self._http = pid, httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=30)
        self._ends = threading.Event()
        self.found: list[tuple[int, int]] = []

    def run(self) -> None:
        while not self._ends.wait(0.1):
            counted = self._http.get("/api/ps").json()["memory"]["used"]
            self.found.append((sum(map(memory_of, children(self._pid))), counted))

    def end(self) -> None:
        self._ends.set()
        self.join()
        self._http.close()


@pytest.mark.timeout(3000)
def test_twenty_models_share_the_memory_of_three(tmp_path: Path) -> None:
    models = folders(NUM_MODELS)
    params, expected = SamplingParams(temperature=0.0, max_tokens=6), {}
    for folder in models:
        with LLM(folder, max_model_len=512, block_size=8, memory="8MB") as llm:
            expected[folder.name] = llm.generate(PROMPT, params)[0].outputs[0].text
    assert len(set(expected.values())) > NUM_MODELS // 2
    weights = max(path.stat().st_size for folder in models for path in folder.glob("*.safetensors"))
    budget = 3 * (weights + 8_000_000 + PROCESS_BYTES) + 1000
    found = tmp_path / "models"
    found.mkdir()
    for folder in models:
        (found / folder.name).symlink_to(folder)
    files = ("--kv-offload-dir", str(tmp_path / "kv"))
    options = ("--models-dir", str(found), "--models-memory", str(budget), *files, "--models-wait", "600")
    with served(*options) as server:
        sampler = Sampler(server.process.pid, server.url)
        sampler.start()
        server.client.timeout = httpx.Timeout(700)
        wanted = [random.Random(0).choice(sorted(expected)) for _ in range(NUM_REQUESTS)] + sorted(expected)
        began = time.perf_counter()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            answers = list(pool.map(server.complete, wanted))
        seconds = time.perf_counter() - began
        sampler.end()
        evictions = [line for line in server.client.get("/metrics").text.splitlines() if "models_evictions " in line]
    most, counted = (max(column) for column in zip(*sampler.found, strict=True))
    print(f"{len(wanted)} requests in {seconds:.0f} s, {evictions[-1]}, {len(sampler.found)} samples: {most >> 20} MiB "
          f"of processes, {counted >> 20} MiB counted, {budget >> 20} MiB allowed")  # fmt: skip
    for name, answer in zip(wanted, answers, strict=True):
        assert answer["model"] == name
        assert answer["choices"][0]["text"] == expected[name]
    assert counted <= budget
    assert most <= budget
    again = [answer for place, answer in enumerate(answers) if wanted[place] in wanted[:place]]
    hits = [answer for answer in again if answer["usage"]["prompt_tokens_details"]["cached_tokens"]]
    assert len(hits) > len(again) // 2  # of models that were evicted meanwhile, too
