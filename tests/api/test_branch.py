"""`LLM.open` and `AsyncLLM.open`: branches of text, from several threads and tasks."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from adapter_files import adapter_folder
from bifolio import LLM, Grammar, SamplingParams
from bifolio.api.async_llm import AsyncLLM
from bifolio.errors import ConfigError, EngineDeadError, RequestError, SnapshotError
from helpers import random_prompt, tiny_folder, tiny_loaded

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = "Once upon a time a little fox lived in a quiet wood."


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make_llm() -> LLM:
    return LLM(tiny_loaded(tokenizer=True), num_blocks=96, block_size=4, max_model_len=160, max_num_seqs=4, threads=1)


def test_a_branch_goes_on_like_one_call() -> None:
    llm = make_llm()
    [whole] = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    with llm.open(PROMPT) as branch:
        first, second = branch.generate(GREEDY), branch.generate(GREEDY)
        assert first.outputs[0].token_ids + second.outputs[0].token_ids == whole.outputs[0].token_ids
        assert first.outputs[0].text + second.outputs[0].text == whole.outputs[0].text
        assert branch.answer_token_ids == whole.outputs[0].token_ids
        assert branch.text.startswith(PROMPT)
        assert len(branch) == len(whole.prompt_token_ids) + 12
    assert llm.engine.blocks.num_used_blocks == 0


def test_forks_differ_and_the_root_stays() -> None:
    llm = make_llm()
    root = llm.open(PROMPT)
    tokens = root.token_ids
    forks = root.fork(4)
    texts = []
    for number, fork in enumerate(forks):
        fork.append(f" The {number} fox", to_answer=bool(number % 2))
        output = fork.generate(GREEDY).outputs[0]
        [alone] = llm.generate({"prompt_token_ids": fork.token_ids[: -len(output.token_ids)]}, GREEDY)
        assert output.token_ids == alone.outputs[0].token_ids
        texts.append(output.text)
    assert root.token_ids == tokens
    assert forks[1].answer_token_ids[-6:] != forks[0].answer_token_ids
    assert root.truncate(-2).token_ids == tokens[:-2]
    for branch in [root, *forks]:
        branch.close()
    assert llm.engine.blocks.num_used_blocks == 0


def test_scores_are_the_logprobs_of_the_whole_text() -> None:
    llm = make_llm()
    branch = llm.open(PROMPT)
    continuations = [" The fox liked to read", [7], [5, 9, 11]]
    scores = branch.score(continuations)
    for score in scores:
        whole = SamplingParams(max_tokens=0, prompt_logprobs=0)
        [output] = llm.generate({"prompt_token_ids": branch.token_ids + score.token_ids}, whole)
        assert output.prompt_logprobs is not None
        expected = [one.logprob for one in output.prompt_logprobs[-len(score.token_ids) :] if one is not None]
        assert score.logprobs == expected
        assert score.total == pytest.approx(sum(expected))
    best = branch.generate(GREEDY, advance=False).outputs[0].token_ids
    [greedy] = branch.score([best])
    assert greedy.is_greedy
    assert not scores[2].is_greedy


def test_a_grammar_goes_on_in_a_fork() -> None:
    """A fork in the middle of a JSON value continues the value."""
    llm = make_llm()
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
                                               "b": {"type": "boolean"}}, "required": ["a", "b"]}  # fmt: skip
    grammar = Grammar.json_schema(schema)
    begin = SamplingParams(temperature=1.0, seed=1, max_tokens=5, grammar=grammar)
    rest = SamplingParams(temperature=1.0, seed=2, max_tokens=60, grammar=grammar)
    branch = llm.open(PROMPT)
    start = branch.generate(begin).outputs[0]
    assert start.finish_reason == "length"
    values = []
    for number, fork in enumerate(branch.fork(3)):
        output = fork.generate(SamplingParams(**{**vars_of(rest), "seed": number})).outputs[0]
        assert output.finish_reason == "stop"
        values.append(json.loads(start.text + output.text))
    assert all(set(value) == {"a", "b"} for value in values)


def vars_of(params: SamplingParams) -> dict[str, object]:
    return {"temperature": params.temperature, "max_tokens": params.max_tokens, "grammar": params.grammar}


def test_stop_texts_are_found_across_calls() -> None:
    llm = make_llm()
    [whole] = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    text = whole.outputs[0].text
    stop = text[4:12]
    [expected] = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=stop))
    branch, parts = llm.open(PROMPT), []
    for _ in range(20):
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, stop=stop)
        parts.append(branch.generate(params).outputs[0])
        if parts[-1].finish_reason == "stop":
            break
    assert parts[-1].stop_reason == stop
    assert [token for part in parts for token in part.token_ids] == expected.outputs[0].token_ids


def test_branches_of_several_threads() -> None:
    llm, texts = make_llm(), {}
    root = llm.open(PROMPT)

    def run(number: int) -> None:
        [fork] = root.fork()
        fork.append(f" {number}")
        texts[number] = fork.generate(GREEDY).outputs[0].text
        fork.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [fork] = root.fork()
    assert fork.append(" 3").generate(GREEDY).outputs[0].text == texts[3]
    assert len(texts) == 6


def test_wrong_calls_are_refused() -> None:
    llm = make_llm()
    branch = llm.open(PROMPT)
    with pytest.raises(RequestError, match="pass \\[text\\]"):
        branch.score("one text")
    with pytest.raises(RequestError, match="number of forks"):
        branch.fork(0)
    with pytest.raises(RequestError, match="cannot be truncated"):
        branch.truncate(-500)
    branch.close()
    with pytest.raises(RequestError, match="is closed"):
        branch.generate(GREEDY)
    other = llm.open(PROMPT)
    llm.close()
    with pytest.raises(EngineDeadError):
        other.generate(GREEDY)


def test_branches_that_are_forgotten_give_their_blocks_back() -> None:
    llm = make_llm()
    branch = llm.open(PROMPT)
    forks = branch.fork(3)
    forks[0].generate(GREEDY)
    del branch, forks
    gc.collect()
    with llm.open("a") as last:
        last.generate(GREEDY)
    assert llm.engine.blocks.num_used_blocks == 0


@pytest.mark.anyio
async def test_the_asyncio_twin() -> None:
    llm = make_llm()
    expected = llm.open(PROMPT).append(" 2").generate(GREEDY).outputs[0].token_ids
    async with AsyncLLM(llm) as running:
        with pytest.raises(ConfigError, match="AsyncLLM runs the engine"):
            llm.open(PROMPT)
        async with await running.open(PROMPT) as root:
            forks = await root.fork(4)
            await asyncio.gather(*(fork.append(f" {number}") for number, fork in enumerate(forks)))
            outputs = await asyncio.gather(*(fork.generate(GREEDY) for fork in forks))
            assert outputs[2].outputs[0].token_ids == expected
            scores = await forks[0].score([[5], [6, 7]])
            assert [len(score.logprobs) for score in scores] == [1, 2]
            with pytest.raises(RequestError, match="being continued"):
                await asyncio.gather(forks[1].generate(GREEDY), forks[1].append(" more"))
            await forks[0].truncate(3)
            for fork in forks:
                await fork.close()


@pytest.mark.anyio
async def test_a_cancelled_call_leaves_the_branch_as_it_was() -> None:
    async with AsyncLLM(make_llm()) as running:
        branch = await running.open(PROMPT)
        tokens = branch.token_ids
        task = asyncio.create_task(branch.generate(SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert branch.token_ids == tokens
        assert len((await branch.generate(GREEDY)).outputs[0].token_ids) == 6


def test_a_branch_keeps_the_adapter_that_it_was_opened_with(tmp_path: Path) -> None:
    folder = tiny_folder(tokenizer=True)
    modules = {name: str(adapter_folder(folder, seed=seed)) for seed, name in enumerate("ab")}
    options: dict[str, Any] = {"lora_modules": modules, "block_size": 4, "num_blocks": 100, "max_model_len": 96}
    first, more = random_prompt(30, vocab_size=90), random_prompt(5, seed=1, vocab_size=90)
    prompt = {"prompt_token_ids": first}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    texts = {}
    with LLM(folder, **options) as llm:
        for name in (None, "a", "b"):
            [alone] = llm.generate(prompt, params, lora_request=name)
            [later] = llm.generate({"prompt_token_ids": [*first, *more]}, params, lora_request=name)
            with llm.open(prompt, lora_request=name) as root:
                [fork] = root.fork()
                assert root.generate(params).outputs[0].logprobs == alone.outputs[0].logprobs
                saved = tmp_path / f"{name}.text"
                llm.save(root, saved)
                assert fork.append(more).generate(params).outputs[0].logprobs == later.outputs[0].logprobs
                again = fork.truncate(30).generate(params)
                assert again.outputs[0].logprobs == alone.outputs[0].logprobs
                texts[name] = root.token_ids
                with pytest.raises(RequestError, match="leave lora_request out"):
                    llm.save(root, saved, lora_request="a")
        assert len({tuple(tokens) for tokens in texts.values()}) == 3
    with LLM(folder, **options) as llm:
        for name, tokens in texts.items():
            [expected] = llm.generate({"prompt_token_ids": tokens}, params, lora_request=name)
            llm.reset_prefix_cache()
            with llm.load(tmp_path / f"{name}.text", lora_request=name) as branch:
                found = branch.generate(params)
                assert found.outputs[0].logprobs == expected.outputs[0].logprobs
                assert found.metrics.num_cached_tokens >= 32
            for other in {None, "a", "b"} - {name}:
                with pytest.raises(SnapshotError, match="the same lora_request"):
                    llm.load(tmp_path / f"{name}.text", lora_request=other)
