"""The asyncio twin: the same results as `LLM`, cancellation within a step, and errors that stay with their request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bifolio.api.async_llm import AsyncLLM
from bifolio.api.llm import LLM
from bifolio.beam_params import BeamSearchParams
from bifolio.errors import EngineDeadError, RequestError
from bifolio.sampling_params import SamplingParams
from helpers import tiny_loaded

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["Once upon a time", "The fox", "decode writes one token", "hello"]


def make_llm(**options: Any) -> LLM:
    settings = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, "chunk_size": 16, "max_num_seqs": 4}
    return LLM(tiny_loaded(tokenizer=True), kernels="reference", **{**settings, **options})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def until_idle(llm: AsyncLLM) -> None:
    for _ in range(500):
        stats = await llm.stats()
        if not stats.num_running and not stats.num_waiting:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"still busy: {stats}")


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(make_llm()) as running:
        yield running


pytestmark = pytest.mark.anyio


async def test_the_results_are_those_of_the_offline_api(llm: AsyncLLM) -> None:
    expected = make_llm().generate(PROMPTS, GREEDY)
    found = await llm.generate(PROMPTS, GREEDY)
    assert [item.outputs[0].token_ids for item in found] == [item.outputs[0].token_ids for item in expected]
    assert [item.outputs[0].text for item in found] == [item.outputs[0].text for item in expected]


async def test_many_tasks_share_one_batch(llm: AsyncLLM) -> None:
    alone = [item.outputs[0].text for item in make_llm().generate(PROMPTS, GREEDY)]
    together = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS * 5))
    assert [item[0].outputs[0].text for item in together] == alone * 5
    stats = await llm.stats()
    assert stats.num_steps < 20 * 12  # one task after the other would take more


async def test_a_stream_says_every_token_and_both_completions_end(llm: AsyncLLM) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True)
    texts = {0: "", 1: ""}
    ends = 0
    async for number, result in llm.stream("Once", params):
        assert number == 0
        texts[result.index] += result.text
        ends += result.finished
    expected = make_llm().generate("Once", params)[0]
    assert ends == 2
    assert [texts[0], texts[1]] == [item.text for item in expected.outputs]


async def test_cancelling_a_task_ends_its_request_and_frees_its_blocks(llm: AsyncLLM) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    task = asyncio.create_task(llm.generate("Once upon a time", endless))
    while not (await llm.stats()).num_running:
        await asyncio.sleep(0.001)
    steps = (await llm.stats()).num_steps
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(llm)
    stats = await llm.stats()
    assert stats.num_used_blocks == 0
    assert stats.num_steps < steps + 20  # of the 120 that the request would have taken


async def test_leaving_a_stream_ends_the_request(llm: AsyncLLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=None, ignore_eos=True))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await until_idle(llm)
    assert (await llm.stats()).num_used_blocks == 0


async def test_cancelling_before_the_engine_took_the_request(llm: AsyncLLM) -> None:
    for _ in range(30):
        task = asyncio.create_task(llm.generate(PROMPTS, SamplingParams(max_tokens=None, ignore_eos=True)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until_idle(llm)
    assert (await llm.stats()).num_used_blocks == 0
    assert not llm._channels


async def test_a_bad_prompt_refuses_its_own_call_alone(llm: AsyncLLM) -> None:
    good = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY))
    with pytest.raises(RequestError):
        await llm.generate(["fine", [10**6]], GREEDY)
    assert (await good)[0].outputs[0].finish_reason == "length"
    await until_idle(llm)


async def test_closing_tells_those_who_wait() -> None:
    llm = AsyncLLM(make_llm())
    task = asyncio.create_task(llm.generate("Once", SamplingParams(max_tokens=None, ignore_eos=True)))
    while not (await llm.stats()).num_running:
        await asyncio.sleep(0.001)
    await llm.close()
    outcome = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome[0], EngineDeadError) or outcome[0][0].outputs[0].finish_reason == "abort"
    with pytest.raises(EngineDeadError):
        await llm.generate("Once", GREEDY)


async def test_a_dead_engine_tells_those_who_wait() -> None:
    llm = AsyncLLM(make_llm())

    def broken(*_: Any) -> Any:
        raise MemoryError("no memory for anything")

    llm.llm.engine.batcher.admit_pending = broken  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError):
        await llm.generate("Once", GREEDY)


async def test_chat_uses_the_template() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    loaded = tiny_loaded(tokenizer=True, chat_template=template)
    async with AsyncLLM(loaded, kernels="reference", num_blocks=64, max_model_len=128) as llm:
        answer = (await llm.chat([{"role": "user", "content": "hi"}], GREEDY))[0]
    text = loaded.require_tokenizer().decode(answer.prompt_token_ids)
    assert text == "user: hi\nassistant:"


async def test_beam_search_is_that_of_the_offline_api(llm: AsyncLLM) -> None:
    params = [BeamSearchParams(3, max_tokens=6), BeamSearchParams(2, max_tokens=5, bad_words=("fox",))]
    expected = make_llm().beam_search(PROMPTS[:2], params)
    found = await llm.beam_search(PROMPTS[:2], params)
    assert [item.outputs for item in found] == [item.outputs for item in expected]
    one, other = await asyncio.gather(llm.beam_search(PROMPTS[0], params[0]), llm.generate(PROMPTS[3], GREEDY))
    assert [output.token_ids for output in one[0].outputs] == [output.token_ids for output in expected[0].outputs]
    assert other[0].outputs == make_llm().generate(PROMPTS[3], GREEDY)[0].outputs
    stuck = BeamSearchParams(2, max_tokens=9, allowed_token_ids=(40,), no_repeat_ngram_size=2)
    for _ in range(2):
        [failed] = await llm.beam_search(PROMPTS[0], stuck, "name")
        assert "no token can follow" in (failed.error or "")
        assert [output.finish_reason for output in failed.outputs] == ["error"]
    with pytest.raises(RequestError, match="params must be BeamSearchParams"):
        await llm.beam_search(PROMPTS[0], GREEDY)  # type: ignore[arg-type]
