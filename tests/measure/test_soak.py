"""The soak test judges runs, and a short run passes."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bifolio.engine.memory import MemoryPlan
from bifolio.measure.soak import Sample, Soak, SoakPlan, SoakReport
from bifolio.measure.soak_bombs import BOMBS
from bifolio.measure.soak_growth import growth_of
from bifolio.measure.soak_plot import plot_soak
from bifolio.measure.soak_processes import slowdown
from bifolio.measure.soak_server import CACHED_SEQUENCES, SmallCache, SoakServer


def samples(memory: np.ndarray, name: str = "front end 7") -> list[Sample]:
    """One sample a second of a server of one process."""
    own = memory.tolist()
    return [Sample(float(t), value, 20, 10, {"front end": value}, {name: value}) for t, value in enumerate(own)]


def good() -> SoakReport:
    return SoakReport(seconds=600.0, answers=[(1.0, 0.1)] * 10, samples=samples(np.full(600, 100.0)))


def measured(leak: float, seed: int, seconds: int = 600) -> np.ndarray:
    """Memory of a process that warms up for minutes: noise, requests in flight, pauses of clients, and one step."""
    rng, times = np.random.default_rng(seed), np.arange(seconds, dtype=float)
    memory = 100 + 40 * (1 - np.exp(-times / 50)) + rng.normal(0, 0.4, seconds) + leak * times / 60
    in_flight = rng.random(seconds) * 30 * (times % 30 > 5)
    step = np.where(times > rng.integers(seconds), 3.0, 0.0)
    return memory + in_flight + step


@pytest.mark.full
def test_a_good_run_has_no_problem(tmp_path: Path) -> None:
    report = good()
    report.judge(SoakPlan(kill_every=0))
    assert report.problems == []
    assert report.growth == {"front end 7": (0.0, 0.0)}
    plot_soak(report, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(report.as_dict())


@pytest.mark.parametrize("name", ["wrong", "slow", "grows", "blocks", "descriptors", "silent"])
def test_every_law_can_fail(name: str) -> None:
    report = good()
    if name == "wrong":
        report.wrong.append("a text")
    elif name == "slow":
        report.answers.append((2.0, 99.0))
    elif name == "grows":
        report.samples = samples(100.0 + np.arange(600) / 60)
    elif name == "blocks":
        report.used_blocks = 0.25
    elif name == "descriptors":
        report.samples[-1] = Sample(60.0, 100.0, 500, 10)
    else:
        report.answers.clear()
    report.judge(SoakPlan(kill_every=0))
    assert len(report.problems) == 1


@pytest.mark.parametrize("seed", range(12))
def test_ten_minutes_tell_a_leak_of_one_mebibyte_per_minute_from_none(seed: int) -> None:
    verdicts = []
    for leak in (0.0, 1.0):
        report = SoakReport(seconds=600.0, answers=[(1.0, 0.1)], samples=samples(measured(leak, seed)))
        report.judge(SoakPlan())
        verdicts.append(report.problems)
    assert verdicts[0] == []
    assert len(verdicts[1]) == 1
    assert "front end 7 grows" in verdicts[1][0]


def test_a_step_of_an_allocator_is_no_leak_and_two_halves_of_a_leak_are() -> None:
    times = np.arange(600.0)
    for memory, is_leak in (
        (100 + 5.0 * (times > 400), False),
        (100 + 0.02 * times, True),
        (100 + np.floor(times / 30), True),  # in steps
        (100 - 0.02 * times, False),
    ):
        growth = growth_of(times, memory)
        assert growth is not None
        assert (growth.least > SoakPlan().max_growth) is is_leak


def test_restarts_of_the_engine_are_no_growth() -> None:
    """Memory that rises in every life of the engine and falls with its end; only long lives are judged."""
    found = []
    for second in range(600):
        life = f"engine {second // 45}" if second < 240 else "engine last"
        age = second % 45 if second < 240 else second - 240
        engine = 80.0 + 30.0 * (1 - np.exp(-age / 30))
        found.append(Sample(float(second), engine, 20, 10, {"engine": engine}, {life: engine}))
    report = SoakReport(seconds=600.0, answers=[(1.0, 0.1)], samples=found)
    report.judge(SoakPlan())
    assert report.problems == []
    assert list(report.growth) == ["engine last"]


def test_a_short_run_is_judged_less_strictly_and_still_fails() -> None:
    for rate, is_refused in ((5.0, False), (100.0, True)):
        memory = 100 + rate * np.arange(120) / 60
        report = SoakReport(seconds=120.0, answers=[(1.0, 0.1)], samples=samples(memory))
        report.judge(SoakPlan())
        assert bool(report.problems) is is_refused


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is a function of glibc")
@pytest.mark.full
def test_a_process_returns_the_memory_of_large_requests() -> None:
    """Large blocks between small ones that stay: with glibc's own thresholds they remain in the arena."""
    code = """
import sys
from pathlib import Path
from bifolio.serve.helpers.allocator import return_large_blocks
if sys.argv[1] == "yes":
    assert return_large_blocks()
def own():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024
kept, before = [], own()
for size in (1 << 20, 4 << 20, 8 << 20, 16 << 20):
    bytearray(b"x") * size  # freed: glibc raises its threshold
large = []
for number in range(40):
    large.append(bytearray(b"x") * (2 << 20))
    kept.append(bytearray(b"x") * 5000)
del large
print(own() - before)
"""
    held = {}
    for wanted in ("no", "yes"):
        done = subprocess.run([sys.executable, "-c", code, wanted], capture_output=True, text=True, check=True)
        held[wanted] = int(done.stdout)
    assert held["no"] > 60
    assert held["yes"] < 10


def test_bombs_have_names_of_their_own() -> None:
    assert len({bomb.name for bomb in BOMBS}) == len(BOMBS)
    assert all(json.dumps(bomb.body()) for bomb in BOMBS)


@pytest.mark.slow
def test_a_short_run_passes() -> None:
    report = Soak(SoakPlan(seconds=30.0, kill_every=12.0, oracle_clients=2, chaos_clients=1)).run()
    assert report.problems == []
    assert report.kills


def test_the_cache_of_a_soak_test_is_small_and_its_prompts_fill_it() -> None:
    plan = MemoryPlan(10**6, 16, 1000, 1026, 10**9)
    cache = SmallCache.of(plan, 512, 4096)
    assert cache.num_bytes == (CACHED_SEQUENCES * 32 + 1) * 1000
    assert cache.options() == ["--max-model-len", "512", "--memory", str(cache.num_bytes)]
    prompts = cache.prompts(0)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)  # no block is found in the cache
    assert sum(len(prompt) // 16 for prompt in prompts) > cache.num_bytes // 1000
    assert cache.prompts(0) == prompts != cache.prompts(1)
    assert SmallCache.of(MemoryPlan(10**6, 16, 1000, 100, 10**9), 512, 4096).options() == ["--max-model-len", "512"]
    assert SmallCache.of(plan, 1 << 17, 4096).max_model_len == 2048


def test_the_cache_is_filled_once_the_engine_has_started() -> None:
    """An engine that was killed answers 503 for some seconds."""
    asked: list[int] = []

    class Starting(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
            asked.append(len(prompt))
            self.send_response(503 if len(asked) <= 2 else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Starting) as stand_in:
        threading.Thread(target=stand_in.serve_forever, daemon=True).start()
        server = SoakServer.__new__(SoakServer)
        server.port, server._cache = stand_in.server_port, SmallCache(32, None, 100)
        assert server.fill_cache(0, threading.Event())
        assert asked == [31] * (2 + 2 * CACHED_SEQUENCES)
        stop = threading.Event()
        stop.set()
        asked.clear()
        assert not server.fill_cache(0, stop)  # the run is over
        stand_in.shutdown()
    assert len(asked) == 1


def test_a_request_may_wait_longer_while_other_programs_use_the_cores() -> None:
    for factor, is_refused in ((1.0, True), (2.0, True), (4.0, False)):
        report = good()
        report.answers.append((300.0, 99.0))
        for sample in report.samples[201:301]:
            sample.slowdown = factor
        report.judge(SoakPlan(kill_every=0))
        assert bool(report.problems) is is_refused
    assert slowdown(0.001) >= 1.0
