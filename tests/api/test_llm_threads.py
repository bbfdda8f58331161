"""One `LLM` used from several threads, an `LLM` inside an `AsyncLLM`, and engines with thread pools of their own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bifolio import LLM, AsyncLLM, SamplingParams
from bifolio.errors import ConfigError, MissingDependencyError
from bifolio.kernels.native import NativeKernels
from helpers import tiny_folder

TEXTS = [
    "Once upon a time",
    "a little fox",
    "The quiet wood",
    "read the sea",
    "Once",
    "a",
    "fox",
    "The sea and the wood",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_folder(tokenizer=True)


def native_llm(folder: Path, threads: int = 2) -> LLM:
    try:
        return LLM(
            folder, kernels=NativeKernels(threads), block_size=4, max_model_len=96, max_num_seqs=4, num_blocks=96
        )
    except MissingDependencyError as error:
        pytest.skip(str(error))


def params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=12, ignore_eos=True)


def generated(llm: LLM, number: int) -> list[int]:
    return llm.generate(TEXTS[number % len(TEXTS)], params(number))[0].outputs[0].token_ids


def streamed(llm: LLM, number: int) -> list[int]:
    results = list(llm.stream([TEXTS[number % len(TEXTS)]], params(number)))
    assert {result.request_id for result in results} == {"0"}
    return [result.token for result in results if result.token is not None]


def check_idle(llm: LLM) -> None:
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    llm.engine.blocks.check_invariants()


@pytest.mark.full
def test_calls_from_several_threads_give_the_tokens_of_calls_one_after_the_other(folder: Path) -> None:
    llm = native_llm(folder)
    expected = [generated(llm, number) for number in range(24)]
    with ThreadPoolExecutor(4) as pool:
        whole = list(pool.map(lambda number: generated(llm, number), range(24)))
        mixed = list(pool.map(lambda number: (streamed if number % 2 else generated)(llm, number), range(24)))
    assert whole == expected
    assert mixed == expected
    check_idle(llm)


def test_a_stream_keeps_its_results_while_another_call_steps_the_engine(folder: Path) -> None:
    llm = native_llm(folder)
    expected, other = generated(llm, 1), generated(llm, 2)
    stream = llm.stream([TEXTS[1]], params(1))
    tokens = [next(stream).token]
    assert generated(llm, 2) == other
    tokens += [result.token for result in stream]
    assert [token for token in tokens if token is not None] == expected
    check_idle(llm)


def test_an_llm_inside_an_async_llm_refuses_calls_until_it_is_closed(folder: Path) -> None:
    llm = native_llm(folder)
    expected = generated(llm, 3)

    async def use() -> list[int]:
        async with AsyncLLM(llm) as served:
            with pytest.raises(ConfigError, match="AsyncLLM runs the engine"):
                llm.generate("a")
            (output,) = await served.generate(TEXTS[3], params(3))
            return output.outputs[0].token_ids

    assert asyncio.run(use()) == expected
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda number: generated(llm, 3), range(8))) == [expected] * 8
    check_idle(llm)


def test_an_llm_with_running_requests_is_not_handed_over(folder: Path) -> None:
    llm = native_llm(folder)
    stream = llm.stream([TEXTS[0]], params(0))
    next(stream)
    with pytest.raises(ConfigError, match="requests are running"):
        llm.hand_over("AsyncLLM")
    stream.close()
    check_idle(llm)


def test_engines_have_pools_of_their_own(folder: Path) -> None:
    one, three = native_llm(folder, 1), native_llm(folder, 3)
    pools = [llm.engine.runner.kernels.pool for llm in (one, three)]
    assert [pool.num_threads for pool in pools] == [1, 3]
    expected = [generated(one, number) for number in range(8)]
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda llm: [generated(llm, number) for number in range(8)], [one, three])
        assert list(both) == [expected, expected]
    assert [pool.num_threads for pool in pools] == [1, 3]
