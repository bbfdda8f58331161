"""Sleep gives memory back to the system, and answers after it are those of an engine that never slept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import adapter_folder
from bifolio import LLM, AsyncLLM, SamplingParams, SpeculativeConfig
from bifolio.errors import ConfigError, RequestError
from helpers import fresh_folder, tiny_folder, tiny_model

PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=12, ignore_eos=True)
PROMPT: Any = {"prompt_token_ids": [5, 9, 11, 40, 41, 42, 3, 8, 20]}
SIZES = {"block_size": 4, "num_blocks": 64, "max_model_len": 64}


def resident() -> int:
    """Bytes of this process that are its own, not those of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.full
@pytest.mark.parametrize("kernels", ["native", "reference", "torch"])
def test_the_memory_of_the_cache_is_given_back(kernels: str) -> None:
    llm = LLM(str(tiny_folder(fresh_folder("sleep"))), kernels=kernels, **{**SIZES, "num_blocks": 40_000})
    expected, storage = tokens(llm), llm.engine.runner.storage
    for array in (*storage.keys, *storage.values):
        array[...] = 1
    before = resident()
    llm.sleep()
    assert llm.is_sleeping()
    assert before - resident() > 0.9 * storage.num_bytes > 10 << 20
    llm.wake_up()
    assert not llm.is_sleeping()
    assert tokens(llm) == expected
    llm.engine.blocks.check_invariants()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.full
def test_the_memory_of_the_weights_is_given_back() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 61}
    llm = LLM(str(tiny_folder(fresh_folder("sleep"), **sizes)), **SIZES)
    expected = tokens(llm)
    num_bytes = 4 * 8 * 3 * 256 * 2048
    before = resident()
    llm.sleep(level=2)
    assert before - resident() > 0.8 * num_bytes
    llm.wake_up()
    assert tokens(llm) == expected


@pytest.mark.parametrize("name", ["dense", "qwen3moe", "lfm2"])
@pytest.mark.parametrize("level", [1, 2])
def test_answers_and_branches_after_sleep(name: str, level: int) -> None:
    folder = tiny_folder(fresh_folder("sleep")) if name == "dense" else tiny_model(name, vocab_size=61)[1]
    llm = LLM(str(folder), **SIZES)
    expected = tokens(llm)
    branch = llm.open(PROMPT)
    llm.sleep(level)
    with pytest.raises(RequestError, match="wake_up"):
        llm.generate(PROMPT, PARAMS)
    if level == 2:
        llm.wake_up(tags=["weights"])
        assert llm.is_sleeping()
        llm.wake_up(tags=["kv_cache"])
    else:
        llm.wake_up()
    assert not llm.is_sleeping()
    assert branch.generate(PARAMS).outputs[0].token_ids == expected
    assert tokens(llm) == expected
    llm.engine.blocks.check_invariants()


@pytest.mark.full
@pytest.mark.parametrize("options", [{"kv_offload": "4MB"}, {"kv_offload_dir": "tier"}])
@pytest.mark.parametrize("level", [1, 2])
def test_conversations_come_back_from_the_tiers_after_sleep(
    tmp_path: Path, options: dict[str, str], level: int
) -> None:
    options = {name: str(tmp_path / value) if name == "kv_offload_dir" else value for name, value in options.items()}
    for folder in (tiny_folder(fresh_folder("sleep")), tiny_model("lfm2", vocab_size=61)[1]):
        llm = LLM(str(folder), **SIZES, **options)
        expected = tokens(llm)
        llm.sleep(level)
        llm.wake_up()
        [output] = llm.generate(PROMPT, PARAMS)
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens == 8
        assert llm.engine.stats().tiers.num_tier_hits == 8
        llm.close()


def test_new_weights_wake_those_that_sleep() -> None:
    """The order of a trainer: sleep, train, load the new weights, wake the cache."""
    old, new = tiny_folder(fresh_folder("sleep")), tiny_folder(fresh_folder("sleep"), seed=1)
    llm = LLM(str(old), **SIZES)
    tokens(llm)
    llm.sleep(level=2)
    llm.load_weights(new)
    assert llm.is_sleeping()
    llm.wake_up(tags=["kv_cache"])
    assert tokens(llm) == tokens(LLM(str(new), **SIZES))


def test_the_asyncio_form_keeps_requests_waiting() -> None:
    import asyncio

    async def generated(llm: AsyncLLM) -> Any:
        return await llm.generate(PROMPT, PARAMS)

    async def run() -> tuple[list[int], list[int]]:
        llm = AsyncLLM(str(tiny_folder(fresh_folder("sleep"))), **SIZES)
        try:
            [before] = await llm.generate(PROMPT, PARAMS)
            await llm.sleep()
            assert await llm.is_sleeping()
            waiting = asyncio.ensure_future(generated(llm))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await llm.wake_up()
            [after] = await waiting
            return before.outputs[0].token_ids, after.outputs[0].token_ids
        finally:
            await llm.close()

    before, after = asyncio.run(run())
    assert before == after


def test_what_cannot_sleep_says_so() -> None:
    folder = str(tiny_folder(fresh_folder("sleep")))
    llm = LLM(folder, **SIZES)
    with pytest.raises(ConfigError, match="level of sleep is 1"):
        llm.sleep(3)
    with pytest.raises(ConfigError, match="weights and kv_cache"):
        llm.wake_up(tags=["heads"])
    assert not llm.is_sleeping()
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    with pytest.raises(RequestError, match="in flight"):
        llm.sleep()
    stream.close()
    drafted = LLM(folder, speculative=SpeculativeConfig("draft", draft_model=folder), **SIZES)
    with pytest.raises(ConfigError, match="draft model"):
        drafted.sleep()
    assert np.isfinite(tokens(llm)).all()
    with pytest.raises(ConfigError, match="tensor_parallel_size 1"):
        LLM(folder, enable_sleep_mode=True, tensor_parallel_size=2, **SIZES)
    with LLM(folder, enable_sleep_mode=True, **SIZES) as awake:  # the CPU needs no mode for it
        expected = tokens(awake)
        awake.sleep()
        awake.wake_up()
        assert tokens(awake) == expected


@pytest.mark.parametrize("quantization", [None, "q8_0"])
def test_weights_that_slept_or_were_replaced_are_rounded_and_have_their_adapters(quantization: str | None) -> None:
    base = tiny_folder(fresh_folder("sleep"), intermediate_size=64)
    other = tiny_folder(fresh_folder("sleep"), intermediate_size=64, seed=1)
    options: Any = {"quantization": quantization, "lora_modules": {"a": adapter_folder(base)}, **SIZES}

    def found(llm: LLM) -> list[Any]:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
        each = [llm.generate(PROMPT, params, lora_request=name)[0].outputs[0] for name in (None, "a")]
        return [[entry.logprob for place in output.logprobs for entry in place.values()] for output in each]

    with LLM(base, **options) as llm, LLM(other, **options) as of_other:
        plain, adapted = found(llm)
        assert plain != adapted
        llm.sleep(level=2)
        llm.wake_up()
        assert found(llm) == [plain, adapted]
        llm.load_weights(other)
        assert found(llm) == found(of_other) != [plain, adapted]
