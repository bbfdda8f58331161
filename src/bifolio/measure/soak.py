"""A soak test of a server: exact answers under chaos, and no growth.

    oracle clients   compare every answer with that of the offline API, character for character
    chaos            hostile requests, clients that read slowly or leave, stops and kills of the engine
    sampler          memory, file descriptors and threads of the server and its processes, once a second

All clients pause for some seconds twice a minute, so that the memory of a process without requests shows. The run fails
on a wrong answer, a process whose memory grows (`soak_growth`), growing descriptors, blocks in use at the end, or a
victim that waits too long.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bifolio.config import NUMERICS
from bifolio.measure.soak_bombs import BOMBS, Bomb
from bifolio.measure.soak_growth import MIN_QUIET, Growth, growth_of
from bifolio.measure.soak_processes import command_line, count_of, own_memory, part_of, slowdown
from bifolio.measure.soak_server import CHAOS_KEY, SmallCache, SoakServer

PROMPTS = ("Once upon a time", "The fox", "One day, a little girl", "Tom and his dog", "In the dark wood", "a")
TOKENS = (4, 16, 48)
SETTLED_SECONDS = 600.0  # a run of this length is judged by `max_growth`, a shorter one less strictly
LAST_LIFE_SECONDS = 360.0  # of the engine, in runs that long: no kill comes after
QUIET_EVERY, QUIET_SECONDS = 20.0, 7.0  # of requests, and of a pause; its last two seconds are read
DOWN_SECONDS = 5.0  # after the engine has answered again: requests that it refused before may still be on their way
DRAIN_SECONDS = 20.0  # the longest time until no request is in flight


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The length of a run and its limits."""

    seconds: float = 60.0
    model: str | None = None
    oracle_clients: int = 4
    chaos_clients: int = 2
    kill_every: float = 45.0  # seconds; 0: the engine is never killed
    max_wait: float = 30.0  # seconds of one answer, restarts of the engine aside
    max_growth: float = 0.3  # MiB per minute of any process, in runs of ten minutes or more
    seed: int = 0
    numerics: Mapping[str, Any] = field(default_factory=dict)  # of the server and of the exact answers alike


@dataclass(slots=True)
class Sample:
    """The processes of the server at one moment."""

    time: float  # seconds since the start
    memory: float  # MiB of all processes
    descriptors: int  # of the front end
    threads: int
    parts: dict[str, float] = field(default_factory=dict)  # MiB of the front end, the engine and the helpers
    processes: dict[str, float] = field(default_factory=dict)  # MiB of each process, by part and id
    is_quiet: bool = False  # no request has been in flight for some seconds
    slowdown: float = 1.0  # wall-clock time of work of this process by its CPU time: other programs use the cores


@dataclass(slots=True)
class SoakReport:
    """The outcome of a run."""

    seconds: float = 0.0
    answers: list[tuple[float, float]] = field(default_factory=list)  # (time, seconds) of the oracle's requests
    wrong: list[str] = field(default_factory=list)
    lost: int = 0  # answered with a 503 or a broken connection while the engine was down
    bombs: dict[str, dict[str, int]] = field(default_factory=dict)  # name -> status -> count
    kills: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    used_blocks: float = 0.0  # at the end
    problems: list[str] = field(default_factory=list)

    @property
    def growth(self) -> dict[str, Growth]:
        """Of each process that lived for half of the run or longer."""
        lives: dict[str, list[tuple[float, float, bool]]] = {}
        for sample in self.samples:
            for name, memory in sample.processes.items():
                lives.setdefault(name, []).append((sample.time, memory, sample.is_quiet))
        found = {}
        for name, life in lives.items():
            if 2 * len(life) < len(self.samples):
                continue
            quiet = [one for one in life if one[2]]
            times, memories, _ = np.array(quiet if len(quiet) >= MIN_QUIET else life).T
            growth = growth_of(times, memories)
            if growth is not None:
                found[name] = growth
        return found

    def judge(self, plan: SoakPlan) -> None:
        """Note every limit that was not kept."""
        late = [
            (seconds, end) for end, seconds in self.answers if seconds > plan.max_wait * self._slowdown(end, seconds)
        ]
        if not self.answers:
            self.problems.append("no answer came")
        if self.wrong:
            self.problems.append(f"{len(self.wrong)} wrong answers, the first: {self.wrong[0]}")
        if late:
            seconds, end = max(late)
            self.problems.append(f"a request waited {seconds:.1f} s, until {end:.0f} s after the start")
        # A new process grows until its caches are full, which takes a large part of a short run.
        limit = plan.max_growth * max(1.0, SETTLED_SECONDS / max(self.seconds, 1.0)) ** 2
        for name, growth in self.growth.items():
            if growth.least > limit:
                self.problems.append(
                    f"the memory of the {name} grows by {growth.slope:.2f} MiB per minute, by {growth.least:.2f} at "
                    f"least; the limit is {limit:.2f}"
                )
        if self.used_blocks:
            self.problems.append(f"{self.used_blocks:.1%} of the blocks are in use at the end")
        half = self.samples[len(self.samples) // 2 :]
        if half and half[-1].descriptors > 2 * min(sample.descriptors for sample in half) + 32:
            self.problems.append(f"{half[-1].descriptors} file descriptors are open")

    def _slowdown(self, end: float, seconds: float) -> float:
        """The mean of the samples while a request waited: the time allowed to it is as many times longer."""
        found = [sample.slowdown for sample in self.samples if end - seconds <= sample.time <= end]
        return sum(found) / len(found) if found else 1.0

    def as_dict(self) -> dict[str, Any]:
        waits = sorted(seconds for _, seconds in self.answers) or [0.0]
        return {
            "seconds": round(self.seconds, 1),
            "answers": len(self.answers),
            "wrong": len(self.wrong),
            "lost": self.lost,
            "kills": len(self.kills),
            "wait_median": round(waits[len(waits) // 2], 3),
            "wait_longest": round(waits[-1], 3),
            "slowdown": round(float(np.mean([sample.slowdown for sample in self.samples] or [1.0])), 2),
            "memory_growth_mib_per_minute": {
                name: {"slope": round(growth.slope, 2), "at_least": round(growth.least, 2)}
                for name, growth in self.growth.items()
            },
            "descriptors": [self.samples[0].descriptors, self.samples[-1].descriptors] if self.samples else [],
            "threads": [self.samples[0].threads, self.samples[-1].threads] if self.samples else [],
            "bombs": self.bombs,
            "problems": self.problems,
        }


class Soak:
    """One run: a server of its own, and the threads around it."""

    def __init__(self, plan: SoakPlan) -> None:
        self.plan, self.report = plan, SoakReport()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._down_until = 0.0  # answers may be lost until then
        self._pausing = self._is_quiet = False
        self._num_idle = 0  # clients that wait for the end of a pause
        self._began = time.monotonic()
        self._exact: dict[tuple[str, int], str] = {}  # set by `run`, as is the server
        self._server: SoakServer

    def run(self) -> SoakReport:
        plan = self.plan
        self._exact, cache = self._expected()
        self._server = SoakServer(plan.model, plan.numerics, cache)
        threads = [threading.Thread(target=self._oracle, args=(number,)) for number in range(plan.oracle_clients)]
        threads += [threading.Thread(target=self._chaos, args=(number,)) for number in range(plan.chaos_clients)]
        threads += [threading.Thread(target=work) for work in (self._sample, self._kill, self._pause)]
        try:
            self._server.wait_ready()
            self._server.fill_cache(plan.seed, self._stop)
            self._began = time.monotonic()
            for thread in threads:
                thread.start()
            self._stop.wait(plan.seconds)
            self._stop.set()
            for thread in threads:
                thread.join()
            self.report.seconds = time.monotonic() - self._began
            self.report.used_blocks = self._server.used_blocks()
        finally:
            self._stop.set()
            if not self._server.close():
                self.report.problems.append("the server did not end on SIGTERM")
        self.report.judge(plan)
        return self.report

    # -- exact answers -------------------------------------------------------------------------------------------------
    def _expected(self) -> tuple[dict[tuple[str, int], str], SmallCache]:
        """The greedy text of every prompt and length, by the offline API, and the cache for a server of this model."""
        from bifolio.api.llm import LLM
        from bifolio.sampling_params import SamplingParams

        chosen = {name: value for name, value in self.plan.numerics.items() if value is not None}
        llm = LLM(self.plan.model, dtype=chosen.pop("kv_dtype", NUMERICS.kv_dtype), **chosen)
        cases = [(prompt, count) for prompt in PROMPTS for count in TOKENS]
        params = [SamplingParams(temperature=0, max_tokens=count) for _, count in cases]
        outputs = llm.generate([prompt for prompt, _ in cases], params, use_tqdm=False)
        cache = SmallCache.of(llm.plan, llm.engine.config.max_model_len, llm.engine.model.config.vocab_size)
        return {case: output.outputs[0].text for case, output in zip(cases, outputs, strict=True)}, cache

    # -- threads -------------------------------------------------------------------------------------------------------
    def _oracle(self, number: int) -> None:
        expected, rng = self._exact, random.Random(f"{self.plan.seed}-oracle-{number}")
        while self._may_ask():
            prompt, count = rng.choice(list(expected))
            began = time.monotonic()
            body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "n": 1}
            try:
                status, answer = self._server.ask("POST", "/v1/completions", body)
            except (OSError, http.client.HTTPException):
                status, answer = 503, b""
            now = time.monotonic()
            with self._lock:
                if status == 200:
                    self.report.answers.append((now - self._began, now - began))
                    text = json.loads(answer)["choices"][0]["text"]
                    if text != expected[prompt, count]:
                        self.report.wrong.append(f"{prompt!r}, {count} tokens: {text!r}")
                elif status in (429, 503) and (now < self._down_until or status == 429):
                    self.report.lost += 1
                else:
                    self.report.wrong.append(f"{prompt!r}: status {status}")
            if status != 200:
                time.sleep(0.2)

    def _chaos(self, number: int) -> None:
        rng = random.Random(f"{self.plan.seed}-chaos-{number}")
        while self._may_ask():
            bomb = rng.choice(BOMBS)
            try:
                status = str(self._throw(bomb))
            except (OSError, http.client.HTTPException):
                status = "closed"
            with self._lock:
                counts = self.report.bombs.setdefault(bomb.name, {})
                counts[status] = counts.get(status, 0) + 1

    def _throw(self, bomb: Bomb) -> int | str:
        if bomb.leaves_after is None:
            return self._server.ask("POST", bomb.path, bomb.body(), CHAOS_KEY)[0]
        content = json.dumps(bomb.body()).encode()
        head = (
            f"POST {bomb.path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {CHAOS_KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=30) as connection:
            connection.sendall(head.encode() + content)
            self._stop.wait(bomb.leaves_after)  # nothing is read
        return "left"

    def _may_ask(self) -> bool:
        """Wait for the end of a pause; whether the run goes on."""
        if self._pausing:
            with self._lock:
                self._num_idle += 1
            while self._pausing and not self._stop.wait(0.1):
                pass
            with self._lock:
                self._num_idle -= 1
        return not self._stop.is_set()

    def _pause(self) -> None:
        """Let all clients pause now and then, until no request is in flight."""
        clients = self.plan.oracle_clients + self.plan.chaos_clients
        while self.plan.seconds >= 3 * QUIET_EVERY and not self._stop.wait(QUIET_EVERY):
            self._pausing, end = True, time.monotonic() + DRAIN_SECONDS
            while self._num_idle < clients and time.monotonic() < end and not self._stop.wait(0.1):
                pass
            is_idle = self._num_idle == clients
            self._stop.wait(QUIET_SECONDS - 2)
            self._is_quiet = is_idle
            self._stop.wait(2)
            self._is_quiet = self._pausing = False

    def _kill(self) -> None:
        """Kill the engine now and then; before that, stop it for a moment. In long runs its last life is a long one."""
        long_run = self.plan.seconds >= SETTLED_SECONDS
        end = self.plan.seconds - (LAST_LIFE_SECONDS if long_run else 0.0)
        while self.plan.kill_every and not self._stop.wait(self.plan.kill_every):
            if time.monotonic() - self._began > end:
                return
            engines = [pid for pid in self._server.processes() if b"bifolio.serve.process.worker" in command_line(pid)]
            for pid in engines:
                os.kill(pid, signal.SIGSTOP)
                self._stop.wait(1.0)
                os.kill(pid, signal.SIGCONT)
                with self._lock:
                    self._down_until = math.inf
                    self.report.kills.append(time.monotonic() - self._began)
                os.kill(pid, signal.SIGKILL)
            if engines and not self._server.fill_cache(len(self.report.kills), self._stop) and not self._stop.is_set():
                self.report.problems.append("the engine did not start again after it was killed")
            self._down_until = time.monotonic() + DOWN_SECONDS

    def _sample(self) -> None:
        while not self._stop.wait(1.0):
            pids = self._server.processes()
            parts, processes = dict.fromkeys(("front end", "engine", "helpers"), 0.0), {}
            for pid in pids:
                part, memory = part_of(pid, pids[0]), own_memory(pid) / (1 << 20)
                parts[part] += memory
                processes[f"{part} {pid}"] = memory
            front = pids[0] if pids else 0
            threads = sum(count_of(pid, "task") for pid in pids)
            now, total = time.monotonic() - self._began, sum(parts.values())
            sample = Sample(now, total, count_of(front, "fd"), threads, parts, processes, self._is_quiet, slowdown())
            with self._lock:
                self.report.samples.append(sample)
