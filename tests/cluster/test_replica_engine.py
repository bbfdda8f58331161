"""`ReplicaEngine` with a stand-in for Ray's handle: faults, stops and counters of replicas."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bifolio.api import messages as m
from bifolio.cluster import replica_reports
from bifolio.cluster.prefix_router import PrefixRouter
from bifolio.cluster.replica_engine import ReplicaEngine
from bifolio.errors import EngineFaultError, FaultKind

HELLO = m.Hello(1, "tiny", "reference", 512, 4, 300, 64, 8, [])
encode = msgspec.msgpack.encode


class Responses:
    """The answers of one call; `cancel` is recorded."""

    def __init__(self, bodies: AsyncIterator[bytes]) -> None:
        self._bodies = bodies
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._bodies

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """Two replicas, "a" and "b"; each test says how they answer."""

    def __init__(self, router: PrefixRouter, script: Any) -> None:
        self.router, self.script = router, script
        self.stops: list[Any] = []
        self.started: list[Responses] = []
        method = lambda function: SimpleNamespace(remote=function)  # noqa: E731
        self.generate = method(self._generate)
        self.describe = method(self._describe)
        self.report = method(self._report)
        self.stop_completion = method(lambda *arguments: self.stops.append(arguments))

    def options(self, stream: bool) -> Handle:
        assert stream
        return self

    def _generate(self, start: bytes, request_id: str, packed: bytes, only: str) -> Responses:
        request = msgspec.msgpack.decode(start, type=m.Start)
        assert request_id == request.id
        replica = self.router.rank(array("Q", packed))[0].replica
        self.router.begin(request_id, replica, array("Q", packed))

        async def bodies() -> AsyncIterator[bytes]:
            yield replica.encode()
            async for message in self.script(request, replica):
                yield encode(message)

        self.started.append(Responses(bodies()))
        return self.started[-1]

    async def _describe(self, *route: Any) -> bytes:
        return encode(HELLO)

    async def _report(self, request_id: str, packed: bytes, replica: str) -> bytes:
        return encode(m.Beat({"num_steps": 5.0, "num_waiting": 1.0, "utilisation": 0.5}))


def tokens(request: m.Start, count: int, is_last: bool) -> m.Updates:
    ended = m.Ended(0.0, 0.0, 0.0, 0, 0) if is_last else None
    piece = m.NewTokens(0, array("i", range(count)).tobytes(), None, "length" if is_last else None)
    return m.Updates([m.Update(request.id, [piece], ended=ended)])


def run(script: Any, check: Any) -> None:
    async def main() -> None:
        router = PrefixRouter()
        router.set_replicas("ab")
        handle = Handle(router, script)
        engine = ReplicaEngine(handle, router)
        await engine.start()
        try:
            await check(engine, handle)
        finally:
            await engine.close()

    asyncio.run(main())


async def read(engine: ReplicaEngine, prompt: list[int]) -> int:
    stream = engine.submit([m.Start(engine.new_id(), prompt, {})])
    count = 0
    try:
        while updates := await stream.next():
            count += sum(len(piece.token_ids) // 4 for update in updates for piece in update.pieces)
    finally:
        stream.close()
    return count


def test_slots_and_counters_are_those_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_reports, "REPORT_SECONDS", 0.02)

    async def script(request: m.Start, replica: str) -> AsyncIterator[Any]:
        yield tokens(request, 3, False)
        yield tokens(request, 2, True)

    async def check(engine: ReplicaEngine, handle: Handle) -> None:
        assert engine.hello is not None
        assert engine.hello.max_num_seqs == 2 * HELLO.max_num_seqs
        assert await read(engine, [1] * 20) == 5
        assert engine.num_open == 0
        assert [handle.router.num_open(name) for name in "ab"] == [0, 0]
        while len(engine._reports) < 2:
            await asyncio.sleep(0.01)
        assert engine.stats["num_waiting"] == 2.0
        assert engine.stats["utilisation"] == 0.5
        before = engine.counter("num_steps")
        handle.router.set_replicas("a")
        while len(engine._reports) > 1:
            await asyncio.sleep(0.05)
        assert engine.counter("num_steps") == before == 10.0
        assert engine.num_restarts == 1

    run(script, check)


def test_a_lost_replica_costs_its_own_requests_a_retryable_fault() -> None:
    async def script(request: m.Start, replica: str) -> AsyncIterator[Any]:
        yield tokens(request, 3, False)
        await asyncio.sleep(0.01)
        if replica == "a":
            raise RuntimeError("the actor died")
        yield tokens(request, 2, True)

    async def check(engine: ReplicaEngine, handle: Handle) -> None:
        outcomes = await asyncio.gather(*(read(engine, [k] * 20) for k in range(2)), return_exceptions=True)
        (lost,) = [one for one in outcomes if isinstance(one, EngineFaultError)]
        assert lost.kind is FaultKind.LOST
        assert 5 in outcomes
        assert engine.num_open == 0
        assert [handle.router.num_open(name) for name in "ab"] == [0, 0]

    run(script, check)


def test_refusals_keep_their_kind_and_silence_is_no_end() -> None:
    async def script(request: m.Start, replica: str) -> AsyncIterator[Any]:
        if request.prompt_token_ids:
            yield m.Refused(request.id, FaultKind.PROMPT_TOO_LONG, "too long")

    async def check(engine: ReplicaEngine, handle: Handle) -> None:
        with pytest.raises(EngineFaultError) as refused:
            await read(engine, [1])
        assert refused.value.kind is FaultKind.PROMPT_TOO_LONG
        with pytest.raises(EngineFaultError) as silent:
            await read(engine, [])
        assert silent.value.kind is FaultKind.LOST
        handle.router.set_replicas(())
        with pytest.raises(EngineFaultError) as none:
            await read(engine, [1])
        assert none.value.kind is FaultKind.UNAVAILABLE

    run(script, check)


def test_stops_go_to_the_replica_of_the_request_and_closing_cancels_it() -> None:
    async def script(request: m.Start, replica: str) -> AsyncIterator[Any]:
        yield tokens(request, 3, False)
        await asyncio.sleep(60)

    async def check(engine: ReplicaEngine, handle: Handle) -> None:
        request = m.Start(engine.new_id(), [1] * 20, {})
        stream = engine.submit([request])
        await stream.next()
        engine.stop(request.id, 0, "end")
        assert handle.stops == [(request.id, 0, "end", "", b"", "a")]
        stream.close()
        while engine.num_open or not handle.started[0].is_cancelled:
            await asyncio.sleep(0.01)
        assert handle.router.num_open("a") == 0

    run(script, check)
