"""Helper processes: breaches of limits, processes that are killed from outside, and turns between clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from serving import model_folder

from bifolio.serve.helpers import helper_messages as h
from bifolio.serve.helpers.grammar_checks import GrammarChecks
from bifolio.serve.helpers.helper import MEMORY_BYTES, Helper
from bifolio.serve.http.errors import ApiError
from bifolio.serve.process.fairness import FairQueue, FairThread

FINE = h.Check("regex", "a+b")


def bomb(number: int) -> h.Check:
    """A grammar that takes more than the CPU seconds of a task."""
    return h.Check("json_schema", json.dumps({"type": "integer", "multipleOf": 999983 + 2 * number}))


def with_helper(check: Callable[[Helper], Awaitable[None]]) -> None:
    async def run() -> None:
        helper = Helper(h.Prepare(str(model_folder()), True, MEMORY_BYTES), quick_seconds=0.1, cpu_seconds=0.4)
        try:
            await check(helper)
        finally:
            await helper.close()

    asyncio.run(run())


def processes(helper: Helper) -> list[int]:
    """The helper process, then those of its lanes."""
    assert helper._process is not None
    pid = helper._process._process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [pid, *map(int, children)]


def test_shares_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.put("many", f"many {number}")
    queue.put("few", "few 0")
    assert queue.count("many") == 3
    assert [queue.take() for _ in range(5)] == ["many 0", "few 0", "many 1", "many 2", None]


def test_one_thread_runs_the_work_of_shares_in_turn() -> None:
    thread, done, begin, end = FairThread("test"), list[str](), threading.Event(), threading.Event()
    thread.submit("many", lambda: bool(begin.wait(10)) and None)
    for number in range(3):
        thread.submit("many", partial(done.append, f"many {number}"))
    thread.submit("few", partial(done.append, "few"))
    thread.submit("few", end.set)
    begin.set()
    assert end.wait(10)
    assert "few" in done[:2]  # not after all of the other share
    thread.close()


@pytest.mark.full
def test_a_process_that_died_before_a_task_costs_it_nothing() -> None:
    async def check(helper: Helper) -> None:
        checks = GrammarChecks(helper)
        await checks.require("regex", "a+b", "one")
        for victim in (0, 1):  # the helper process, then the process of the quick lane
            os.kill(processes(helper)[victim], signal.SIGKILL)
            await asyncio.sleep(0.05 * victim)  # before and after the death is seen
            await checks.require("regex", f"a+b{victim}", "one")
        assert helper.num_restarts == 1

    with_helper(check)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_task_whose_process_is_killed_from_outside_runs_once_more(victim: int) -> None:
    async def check(helper: Helper) -> None:
        assert await helper.ask(FINE, "one") == h.Done()
        asked = asyncio.create_task(helper.ask(bomb(0), "one"))
        await asyncio.sleep(0.1)
        os.kill(processes(helper)[victim], signal.SIGKILL)
        assert await asked == h.Failed(h.KILLED)  # by its own limit
        assert await helper.ask(FINE, "one") == h.Done()

    with_helper(check)


@pytest.mark.full
def test_a_process_that_is_killed_again_and_again_is_not_the_fault_of_the_request() -> None:
    async def check(helper: Helper) -> None:
        assert await helper.ask(FINE, "one") == h.Done()
        asked = asyncio.create_task(GrammarChecks(helper).require(bomb(0).kind, bomb(0).text, "one"))
        while not asked.done():
            await asyncio.sleep(0.02)
            if helper._process is not None and not helper._process.is_dead:
                os.kill(processes(helper)[0], signal.SIGKILL)
        error = asked.exception()
        assert isinstance(error, ApiError)
        assert error.status == 503

    with_helper(check)


@pytest.mark.full
def test_a_breach_of_a_limit_is_refused() -> None:
    async def check(helper: Helper) -> None:
        began = time.process_time()
        assert await helper.ask(bomb(0), "one") == h.Failed(h.KILLED)
        assert time.process_time() - began < 1.0  # nothing runs in the front end
        failed = await helper.ask(h.Check("regex", "(a"), "one")
        assert isinstance(failed, h.Failed)
        assert failed.kind == "GrammarError"
        assert len(processes(helper)) == 2  # that of the slow lane is gone

    with_helper(check)


@pytest.mark.full
def test_a_client_waits_for_a_moment_of_each_other_client() -> None:
    """Bombs of two clients: a third one's tasks end long before them."""

    async def check(helper: Helper) -> None:
        assert await helper.ask(FINE, "honest") == h.Done()
        ended: list[str] = []

        async def ask(task: h.Task, share: str) -> Any:
            result = await helper.ask(task, share)
            ended.append(share)
            return result

        bombs = [asyncio.create_task(ask(bomb(number), f"hostile {number % 2}")) for number in range(6)]
        await asyncio.sleep(0.05)
        for number in range(3):
            assert await ask(h.Check("regex", f"a+b{number}"), "honest") == h.Done()
        assert ended == ["honest"] * 3
        for task in bombs:
            task.cancel()
        await asyncio.gather(*bombs, return_exceptions=True)

    with_helper(check)
