"""Prefill replicas: the front end names one with each request; a lost one costs a computation, never a wrong answer."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from serving import ENGINE, model_folder

from bifolio import LLM, SamplingParams
from bifolio.api import messages as m
from bifolio.cluster.prefill_pool import PrefillPool
from bifolio.cluster.prefix_router import PrefixRouter, prefix_hashes
from bifolio.cluster.replica import free_ports, transfer_of
from bifolio.cluster.replica_engine import ReplicaEngine
from bifolio.config.transfer import Address, BlockSource
from bifolio.serve.process.supervisor import EngineProcess
from helpers import random_prompt

HELLO = m.Hello(1, "tiny", "reference", 512, 4, 300, 64, 8, [])
NUM_TOKENS = 12


# -- the choice -------------------------------------------------------------------------------------------------------
def pool(sources: dict[str, str], threshold: int = 16) -> tuple[PrefillPool, PrefixRouter]:
    router = PrefixRouter(block_size=8)
    router.set_replicas(sources)
    router.set_block_sources(sources)
    return PrefillPool(None, router, threshold), router


def start(number: int, prompt: list[int], **params: Any) -> m.Start:
    return m.Start(f"r{number}", prompt, params)


def test_prompts_go_to_the_replica_that_has_their_prefix_or_no_work() -> None:
    chosen, router = pool({"a": "s@h:1", "b": "s@h:2"})
    prompts = [[1] * 64, [2] * 64, [1] * 96, [2] * 96]
    hashes = [prefix_hashes(prompt, b"", 8) for prompt in prompts]
    sources = [chosen.choose(start(k, prompts[k]), hashes[k]) for k in range(4)]
    assert sources == ["s@h:1", "s@h:2", "s@h:1", "s@h:2"]
    assert [router.num_open(name) for name in "ab"] == [2, 2]
    for number in range(4):
        chosen.end(f"r{number}")
        chosen.end(f"r{number}")  # of a request that is over after its first output
    assert [router.num_open(name) for name in "ab"] == [0, 0]


def test_short_prompts_and_scored_prompts_stay() -> None:
    chosen, router = pool({"a": "s@h:1"})
    assert chosen.choose(start(0, [1] * 15), []) == ""
    assert chosen.choose(start(1, [1] * 64, prompt_logprobs=1), []) == ""
    assert router.num_open("a") == 0


def test_silent_and_lost_replicas_are_not_chosen() -> None:
    chosen, router = pool({"a": "s@h:1", "b": "s@h:2"})
    router.set_silent("a", True)
    assert [chosen.choose(start(k, [k] * 64), []) for k in range(3)] == ["s@h:2"] * 3
    router.set_replicas("a")
    assert chosen.choose(start(4, [4] * 64), []) == ""  # the decode replica computes it
    router.set_silent("a", False)
    assert chosen.choose(start(5, [5] * 64), []) == "s@h:1"


def test_the_front_end_names_the_source_and_drops_that_of_a_client() -> None:
    """The address that a decode replica gets is the router's, whatever a request asked for."""
    seen: list[str] = []

    class Handle:
        def __init__(self) -> None:
            self.describe = SimpleNamespace(remote=self._describe)
            self.report = SimpleNamespace(remote=self._report)
            self.generate = SimpleNamespace(remote=self._generate)

        def options(self, stream: bool) -> Handle:
            return self

        async def _describe(self, *route: Any) -> bytes:
            return msgspec.msgpack.encode(HELLO)

        async def _report(self, *route: Any) -> bytes:
            return msgspec.msgpack.encode(m.Beat({}))

        async def _generate(self, body: bytes, *route: Any) -> AsyncIterator[bytes]:
            request = msgspec.msgpack.decode(body, type=m.Start)
            seen.append(request.prefill_at)
            yield b"a"
            ended = m.Ended(0.0, 0.0, 0.0, 0, 0)
            piece = m.NewTokens(0, array("i", [1]).tobytes(), None, "length")
            yield msgspec.msgpack.encode(m.Updates([m.Update(request.id, [piece], ended=ended)]))

    async def main() -> None:
        chosen, prefill = pool({"p": "s@h:1"})
        chosen._handle = Handle()
        router = PrefixRouter()
        router.set_replicas("a")
        for each in (chosen, None):
            engine = ReplicaEngine(Handle(), router, each)
            await engine.start()
            for prompt in ([1] * 64, [1] * 8):
                stream = engine.submit([m.Start(engine.new_id(), prompt, {}, prefill_at="kv:10.0.0.1:22")])
                while await stream.next():
                    pass
                stream.close()
            await engine.close()
        assert prefill.num_open("p") == 0

    asyncio.run(main())
    assert seen == ["s@h:1", "", "", ""]


def test_sources_are_read_back() -> None:
    for host in ("10.0.0.5", "::1"):
        source = BlockSource(Address(host, 7001), "0f" * 16)
        assert BlockSource.parse(str(source)) == source


# -- engines ----------------------------------------------------------------------------------------------------------
def options() -> dict[str, Any]:
    return {**ENGINE, "kernels": "native", "threads": 1, "model": str(model_folder())}


def engine_process(role: str, source: BlockSource | None = None) -> EngineProcess:
    return EngineProcess(m.Launch(options(), transfer=transfer_of(role, source, 64)))


async def answer(engine: EngineProcess, prompt: list[int], source: str) -> tuple[list[int], int]:
    """The tokens of a sampled request, and how many of its prompt were cached."""
    params = {"max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    stream = engine.submit([m.Start(engine.new_id(), prompt, params, prefill_at=source)])
    tokens: list[int] = []
    cached = 0
    try:
        while updates := await stream.next():
            for update in updates:
                for piece in update.pieces:
                    tokens += array("i", piece.token_ids)
                cached = cached if update.ended is None else update.ended.num_cached_tokens
    finally:
        stream.close()
    return tokens, cached


@pytest.mark.full
def test_replicas_fetch_from_the_named_engine_and_compute_after_its_loss() -> None:
    """Two prefill engines and a decode engine as replicas start them; one prefill engine is killed, one is unknown."""
    prompts = [random_prompt(120, seed=seed, vocab_size=250) for seed in range(5)]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=3, ignore_eos=True)
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(**options()) as llm:
        expected = [list(one.outputs[0].token_ids) for one in llm.generate(given, params, use_tqdm=False)]
    sources = [BlockSource(Address("127.0.0.1", port), f"{port:032x}") for port in free_ports(2)]

    async def main() -> None:
        engines = [*(engine_process("prefill", source) for source in sources), engine_process("decode")]
        await asyncio.gather(*(engine.start() for engine in engines))
        first, decode = engines[0], engines[2]
        try:
            for number in range(2):
                assert await answer(decode, prompts[number], str(sources[number])) == (expected[number], 112)
            wrong = BlockSource(sources[1].address, "of another replica")
            assert await answer(decode, prompts[2], str(wrong)) == (expected[2], 0)
            assert first.hello is not None
            os.kill(first.hello.pid, signal.SIGKILL)
            assert (await answer(decode, prompts[3], str(sources[0])))[0] == expected[3]
            assert (await answer(decode, prompts[4], ""))[0] == expected[4]
        finally:
            await asyncio.gather(*(engine.close() for engine in engines))

    asyncio.run(main())
