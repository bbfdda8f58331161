"""The start of a server: the engine's process begins early, and what requests need later is read meanwhile."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from serving import ENGINE, model_folder

from bifolio.api.messages import Launch
from bifolio.errors import GrammarError
from bifolio.sampling import grammar
from bifolio.serve.helpers import helper_messages as h
from bifolio.serve.helpers.helper import MEMORY_BYTES, Helper
from bifolio.serve.process.fairness import FairThread
from bifolio.serve.process.grammar_start import IDLE_LOOKS, GrammarStart
from bifolio.serve.process.supervisor import EngineProcess
from bifolio.serve.process.worker_process import GENTLE, StartedWorker


@pytest.mark.full
def test_a_worker_that_was_started_before_is_the_first_engine_and_is_replaced() -> None:
    worker = StartedWorker()

    async def run() -> None:
        engine = EngineProcess(Launch({"model": str(model_folder()), **ENGINE}), worker=worker)
        first = await engine.start()
        assert first.pid == worker.pid
        engine.kill()
        async with asyncio.timeout(60):
            while engine.hello is None or engine.hello.pid == first.pid:
                await asyncio.sleep(0.02)
        await engine.close()

    asyncio.run(run())
    assert worker.returncode == -9


@pytest.mark.full
def test_an_engine_that_starts_gently_has_its_usual_share_when_it_is_ready() -> None:
    share = Path("/proc/self/autogroup")
    if not share.is_file() or "nice" not in share.read_text():
        pytest.skip("this system has no shares of sessions")
    worker = StartedWorker()
    own, seen = Path(f"/proc/{worker.pid}/autogroup"), []

    async def run() -> None:
        engine = EngineProcess(Launch({"model": str(model_folder()), **ENGINE}), worker=worker, starts_gently=True)
        starting = asyncio.create_task(engine.start())
        async with asyncio.timeout(60):
            while not own.read_text().rstrip().endswith(f"nice {GENTLE}"):
                await asyncio.sleep(0.005)
            seen.append(GENTLE)
            seen.append((await starting).pid)
            while not own.read_text().rstrip().endswith("nice 0"):
                await asyncio.sleep(0.005)
            seen.append(0)
        await engine.close()

    asyncio.run(run())
    assert seen == [GENTLE, worker.pid, 0]


@pytest.mark.full
def test_a_worker_without_a_server_ends() -> None:
    worker = StartedWorker()

    async def run() -> None:
        engine = EngineProcess(Launch({"model": "no such model"}), worker=worker)
        await engine.close()  # before it began
        async with asyncio.timeout(60):
            assert await worker.wait() == 1

    asyncio.run(run())


@pytest.mark.full
def test_a_helper_that_has_begun_runs_tasks_in_that_process() -> None:
    async def run() -> None:
        helper = Helper(h.Prepare(str(model_folder()), False, MEMORY_BYTES))
        helper.begin()
        async with asyncio.timeout(60):
            while helper._process is None:
                await asyncio.sleep(0.02)
        begun = helper._process
        messages = [{"role": "user", "content": "hello"}]
        assert await helper.ask(h.Render(messages, [], True, {}), "a") == h.Done("user: hello\nassistant:")
        assert helper._process is begun
        await helper.close()
        unused = Helper(h.Prepare(str(model_folder()), False, MEMORY_BYTES))
        unused.begin()
        await asyncio.sleep(0.05)
        await unused.close()  # while it starts

    asyncio.run(run())


class Reader:
    """Stands for the compiler of grammars; counts its starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.count, self.ends, self.error = 0, threading.Event(), error
        monkeypatch.setattr(grammar, "prepare_compiler", self.read)

    def read(self, model: Any) -> None:
        self.count += 1
        self.ends.set()
        if self.error is not None:
            raise self.error


def after_all_work(thread: FairThread) -> None:
    done = threading.Event()
    thread.submit("z", done.set)
    assert done.wait(30)


def test_a_vocabulary_is_read_once_when_the_engine_has_been_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, reader = FairThread("test"), Reader(monkeypatch)
    start = GrammarStart(None, thread)  # type: ignore[arg-type]
    for _ in range(3):
        for number in range(IDLE_LOOKS):
            start.look(is_idle=number != 1)
    after_all_work(thread)
    assert reader.count == 0
    assert start.ready_at is None
    for _ in range(2 * IDLE_LOOKS):
        start.look(is_idle=True)
    start.begin()
    after_all_work(thread)
    assert reader.count == 1
    assert start.ready_at is not None
    thread.close()


def test_the_first_grammar_is_compiled_after_the_vocabulary_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, reader = FairThread("test"), Reader(monkeypatch, GrammarError("no end"))
    start = GrammarStart(None, thread)  # type: ignore[arg-type]
    found: list[int] = []
    start.begin()
    thread.submit("a", lambda: found.append(reader.count))
    after_all_work(thread)
    assert found == [1]
    assert start.ready_at is not None  # also where grammars are refused
    thread.close()


@pytest.mark.full
def test_a_model_reads_the_module_of_its_own_family_alone() -> None:
    code = (
        "import json, sys; from bifolio.model.loader import open_text_model; "
        f"open_text_model({str(model_folder())!r}); "
        "print(json.dumps([m for m in sys.modules if m.startswith('bifolio.model.families.')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    families = json.loads(done.stdout)
    assert "bifolio.model.families.llama" in families
    assert len(families) <= 3  # with those that it imports itself
