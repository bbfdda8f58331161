"""`EngineClient`: the three ways to an engine give the same tokens, faults and snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import pytest
from serving import ENGINE, model_folder, running_server

from bifolio.api.client import EngineClient, EngineState, new_prefix
from bifolio.api.llm import LLM
from bifolio.api.messages import Launch, Start
from bifolio.api.update_stream import UpdateStream
from bifolio.errors import ConfigError, EngineFaultError, FaultKind
from bifolio.handshakes import Handshakes
from bifolio.sampling_params import SamplingParams
from bifolio.serve.http.errors import api_error
from bifolio.serve.process import engine_host
from bifolio.serve.process import handshake as h
from bifolio.serve.process.engine_connection import Link
from bifolio.serve.process.engine_host import EngineHost
from bifolio.serve.process.local_engine import LocalEngine
from bifolio.serve.process.remote_engine import RemoteEngine
from bifolio.serve.process.supervisor import EngineProcess

Client = TypeVar("Client", bound=EngineClient)
SECRET = b"a secret of some length"
PROMPT = [5, 9, 3, 7, 11, 2, 8, 6, 4]


def launch() -> Launch:
    return Launch({"model": str(model_folder()), **ENGINE})


@contextlib.asynccontextmanager
async def started(engine: Client) -> AsyncIterator[Client]:
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def local() -> AbstractAsyncContextManager[LocalEngine]:
    return started(LocalEngine(launch()))


def process() -> AbstractAsyncContextManager[EngineProcess]:
    return started(EngineProcess(launch()))


@contextlib.asynccontextmanager
async def hosted() -> AsyncIterator[tuple[EngineHost, str]]:
    async with process() as engine:
        host = EngineHost(engine, SECRET)
        try:
            yield host, f"127.0.0.1:{await host.listen('127.0.0.1:0')}"
        finally:
            await host.close()


@contextlib.asynccontextmanager
async def remote() -> AsyncIterator[RemoteEngine]:
    async with hosted() as (_, address), connected(address) as engine:
        yield engine


def connected(address: str, secret: bytes = SECRET) -> AbstractAsyncContextManager[RemoteEngine]:
    return started(RemoteEngine(address, secret))


async def tokens_of(engine: EngineClient, prompt: list[int], **params: Any) -> list[int]:
    request = Start(engine.new_id(), prompt, {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **params})
    stream = engine.submit([request])
    found: list[int] = []
    try:
        while updates := await stream.next():
            for update in updates:
                for piece in update.pieces:
                    found += array("i", piece.token_ids)
    finally:
        stream.close()
    return found


async def read_to_the_end(stream: UpdateStream) -> None:
    while await stream.next():
        pass


def expected(prompt: list[int]) -> list[int]:
    llm = LLM(model_folder(), **ENGINE)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    return list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)


async def check_contract(engine: EngineClient) -> None:
    assert engine.health().state is EngineState.READY
    assert await tokens_of(engine, PROMPT) == expected(PROMPT)
    several = await asyncio.gather(*(tokens_of(engine, PROMPT[k:]) for k in range(3)))
    assert several == [expected(PROMPT[k:]) for k in range(3)]
    for prompt, kind in (
        ([], FaultKind.EMPTY_PROMPT),
        ([10**6], FaultKind.TOKEN_ID),
        (PROMPT * 99, FaultKind.PROMPT_TOO_LONG),
    ):
        with pytest.raises(EngineFaultError) as refused:
            await tokens_of(engine, prompt)
        assert refused.value.kind is kind
        assert not kind.is_retryable
    assert len(await engine.embed(PROMPT)) % 4 == 0
    endless = engine.submit([Start(engine.new_id(), PROMPT, {"max_tokens": 400, "ignore_eos": True})])
    await endless.next()
    assert [slot["prompt"] for slot in (await engine.snapshot()).slots] == [len(PROMPT)]
    endless.close()
    while (await engine.snapshot()).slots:
        await asyncio.sleep(0.01)
    assert engine.num_open == 0


def test_engine_on_a_thread() -> None:
    async def check() -> None:
        async with local() as engine:
            await check_contract(engine)
        assert engine.health().state is EngineState.CLOSED
        with pytest.raises(EngineFaultError) as gone:
            engine.submit([Start(engine.new_id(), PROMPT, {})])
        assert gone.value.kind is FaultKind.UNAVAILABLE

    asyncio.run(check())


@pytest.mark.full
@pytest.mark.parametrize("make", [process, remote])
def test_engine_elsewhere(make: Callable[[], contextlib.AbstractAsyncContextManager[EngineClient]]) -> None:
    async def check() -> None:
        async with make() as engine:
            await check_contract(engine)

    asyncio.run(check())


@pytest.mark.full
def test_clients_of_one_host_keep_apart_and_survive_its_engine() -> None:
    """Two clients get their own updates; a killed engine costs a retryable fault, and comes back."""

    async def check() -> None:
        async with hosted() as (host, address), connected(address) as first, connected(address) as second:
            both = await asyncio.gather(tokens_of(first, PROMPT), tokens_of(second, PROMPT[2:]))
            assert both == [expected(PROMPT), expected(PROMPT[2:])]
            stream = first.submit([Start(first.new_id(), PROMPT, {"max_tokens": 490, "ignore_eos": True})])
            await stream.next()
            assert first.hello is not None
            os.kill(first.hello.pid, signal.SIGKILL)
            with pytest.raises(EngineFaultError) as lost:
                await read_to_the_end(stream)
            assert lost.value.kind is FaultKind.LOST
            assert lost.value.kind.is_retryable
            assert api_error(lost.value).retry_after is not None
            while not second.health().is_ready:
                await asyncio.sleep(0.05)
            assert await tokens_of(second, PROMPT) == expected(PROMPT)
            await first.close()
            while len(host.clients) > 1:
                await asyncio.sleep(0.01)
            assert host.num_open == 0

    asyncio.run(check())


@pytest.mark.full
def test_host_refuses_strangers() -> None:
    """A wrong secret, ids of another client, and a large frame before the handshake end the connection."""

    async def check() -> None:
        async with hosted() as (host, address), connected(address) as honest:
            with pytest.raises(ConfigError, match="secret"):
                async with connected(address, b"another secret of some length"):
                    pass
            name, port = h.parse_address(address)
            loop = asyncio.get_running_loop()
            large = Link(lambda message: None, h.from_host_decoder)
            await loop.create_connection(lambda: large, name, port)
            large.write((h.HANDSHAKE_BYTES + 1).to_bytes(4, "little"))
            await asyncio.wait_for(large.closed, 5)
            async with connected(address) as thief:
                link = thief._link
                assert isinstance(link, Link)
                link.send(Start(honest.new_id(), PROMPT, {}))
                await asyncio.wait_for(link.closed, 5)
            assert await tokens_of(honest, PROMPT) == expected(PROMPT)
            assert set(host.clients) == {honest.id_prefix}

    asyncio.run(check())


@pytest.mark.full
def test_silent_connections_are_no_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_host, "MAX_CLIENTS", 2)

    async def check() -> None:
        async with hosted() as (host, address):
            host.handshakes = Handshakes(most=8)
            name, port = h.parse_address(address)
            silent = [await asyncio.open_connection(name, port) for _ in range(40)]
            async with connected(address) as first, connected(address) as second:
                assert await tokens_of(first, PROMPT) == expected(PROMPT)
                assert set(host.clients) == {first.id_prefix, second.id_prefix}
                assert len(host.handshakes) <= 8
                with pytest.raises(ConfigError):
                    async with connected(address):
                        pass  # a third front end
                reader, _ = silent[0]
                await asyncio.wait_for(_until_closed(reader), 5)  # it made room
            for _, writer in silent:
                writer.close()

    asyncio.run(check())


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()


def test_a_recorded_handshake_opens_no_other_connection() -> None:
    first, second, nonce, prefix = h.new_nonce(), h.new_nonce(), h.new_nonce(), new_prefix()
    attach = h.Attach(nonce, prefix, h.client_proof(SECRET, first, nonce, prefix))
    assert h.is_valid(attach, SECRET, first)
    assert not h.is_valid(attach, SECRET, second)
    assert not h.is_valid(attach, b"x" * 16, first)
    assert not h.is_valid(h.Attach(nonce, new_prefix(), attach.proof), SECRET, first)


def test_every_fault_has_an_answer() -> None:
    statuses = {kind: api_error(EngineFaultError(kind, "x")).status for kind in FaultKind}
    assert {kind for kind, status in statuses.items() if status in (429, 503)} == {
        k for k in FaultKind if k.is_retryable
    }
    assert {kind for kind, status in statuses.items() if status == 500} == {k for k in FaultKind if k.is_of_engine}


@pytest.mark.full
@pytest.mark.parametrize("where", ["thread", "host"])
def test_the_front_end_serves_any_client(where: str) -> None:
    """The same answers over HTTP from an engine on a thread and from one behind an engine host."""

    def answers(**settings: Any) -> tuple[str, str]:
        with running_server(**settings) as server:
            client = server.client()
            body: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0.0}
            whole = client.completions.create(**body).choices[0].text
            streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**body, stream=True))
            return whole, streamed

    async def check() -> tuple[str, str]:
        if where == "thread":
            return await asyncio.to_thread(lambda: answers(in_process=True))
        async with hosted() as (_, address):
            return await asyncio.to_thread(lambda: answers(engine_address=address, engine_secret=SECRET))

    whole, streamed = asyncio.run(check())
    assert whole == streamed
    assert (whole, streamed) == answers()
