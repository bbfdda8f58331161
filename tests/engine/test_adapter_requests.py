"""Requests with adapters: each has the output that it has alone, whatever runs, loads and unloads beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter_files import adapter_folder
from bifolio import LLM, LoRARequest, SamplingParams, SpeculativeConfig
from bifolio.engine.adapters import LoadedAdapter
from bifolio.errors import BifolioError, ConfigError, RequestError
from bifolio.measure.replay import replay
from bifolio.sequence import Request
from helpers import cpu_kernel_names, fresh_folder, random_prompt, tiny_folder

KERNELS = "native" if "native" in cpu_kernel_names() else "reference"
SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 400, "max_model_len": 64, "max_num_seqs": 16, "chunk_size": 8}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=9, logprobs=2, ignore_eos=True)


@cache
def base() -> Path:
    return tiny_folder()


@cache
def adapter(seed: int) -> Path:
    return adapter_folder(base(), rank=1 + seed % 7, seed=seed)


def make_llm(**options: Any) -> LLM:
    return LLM(base(), **{**SIZES, "kernels": KERNELS, "poison_free_blocks": True, **options})


def essence(request: Request) -> list[Any]:
    return [(s.output_token_ids, list(s.logprobs)) for s in request.sequences]


@cache
def alone(seed: int | None, prompt: tuple[int, ...]) -> list[Any]:
    """The tokens and logprobs of a request that runs on an engine of its own."""
    llm = make_llm(max_num_seqs=1, enable_prefix_caching=False)
    found = None if seed is None else llm.engine.adapters.load("a", adapter(seed))
    request = llm.engine.add_request("alone", prompt, PARAMS, adapter=found)
    while llm.engine.has_work:
        llm.engine.step()
    return essence(request)


needs_exact = pytest.mark.skipif(KERNELS != "native", reason="the reference kernels are not bit-identical")


@needs_exact
def test_sixteen_adapters_in_one_batch_have_their_solo_outputs() -> None:
    llm = make_llm(token_budget=64)
    prompts = [tuple(random_prompt(3 + seed, seed, 61)) for seed in range(16)]
    found = [llm.engine.adapters.load(f"a{seed}", adapter(seed)) for seed in range(16)]
    requests = [
        llm.engine.add_request(str(seed), prompts[seed], PARAMS, adapter=found[seed] if seed % 5 else None)
        for seed in range(16)
    ]
    largest = 0
    while llm.engine.has_work:
        llm.engine.step()
        largest = max(largest, llm.engine.batcher.num_running)
    assert largest == 16
    for seed, request in enumerate(requests):
        assert essence(request) == alone(seed if seed % 5 else None, prompts[seed]), seed
    assert alone(1, prompts[1]) != alone(2, prompts[1])


def test_cached_blocks_belong_to_one_version_of_one_adapter() -> None:
    llm = make_llm()
    prompt = random_prompt(20, vocab_size=61)

    def cached(name: str | None) -> int:
        found = None if name is None else llm.engine.adapters.get(name)
        request = llm.engine.add_request("r", prompt, PARAMS, adapter=found)
        while llm.engine.has_work:
            llm.engine.step()
        return request.metrics.num_cached_tokens

    llm.engine.adapters.load("a", adapter(1))
    llm.engine.adapters.load("same", adapter(1))
    llm.engine.adapters.load("b", adapter(2))
    assert [cached(name) for name in (None, "a", "b", None, "a", "b", "same")] == [0, 0, 0, 16, 16, 16, 16]
    llm.engine.adapters.load("a", adapter(3), in_place=True)
    assert [cached("a"), cached("a"), cached("same")] == [0, 16, 16]


def test_names_paths_and_sums(tmp_path: Path) -> None:
    llm = make_llm(lora_modules={"a": adapter(1), "both": [(adapter(1), 0.5), (adapter(2), 2.0)]}, max_loras=2)
    prompt, greedy = random_prompt(9, vocab_size=61), SamplingParams(temperature=0, max_tokens=6, logprobs=0)

    def logprobs(lora: Any) -> Any:
        output = llm.generate([prompt], greedy, lora_request=lora)[0].outputs[0]
        return [(token, found[token].logprob) for token, found in zip(output.token_ids, output.logprobs, strict=True)]

    plain, first = logprobs(None), logprobs("a")
    assert plain != first
    assert logprobs(LoRARequest("a", 1, str(adapter(1)))) == first
    assert logprobs([LoRARequest("a")]) == first
    second = logprobs(LoRARequest("b", 2, str(adapter(2))))
    assert second not in (plain, first)
    total = llm.engine.adapters.sum([("a", 0.5), ("b", 2.0)])
    assert total is not None
    assert total.digest == llm.engine.adapters.get("both").digest
    assert llm.engine.adapters.sum([("a", 0.0)]) is None
    with pytest.raises(RequestError, match="is loaded from"):
        llm.generate([prompt], greedy, lora_request=LoRARequest("a", 1, str(adapter(3))))
    third = logprobs(LoRARequest("a", 1, str(adapter(3)), load_inplace=True))
    assert third not in (plain, first, second)
    assert logprobs("a") == third
    with pytest.raises(RequestError, match="no adapter is called 'c'"):
        llm.generate([prompt], greedy, lora_request="c")
    with pytest.raises(RequestError, match="2 prompts and 1 lora_request"):
        llm.generate([prompt, prompt], greedy, lora_request=["a"])
    llm.lora = "b"  # of calls that name none
    assert logprobs(None) == second
    streamed = [result.token for result in llm.stream([prompt], greedy)]
    assert streamed == [token for token, _ in second]


def test_the_least_recently_used_adapters_leave_memory_and_come_back(tmp_path: Path) -> None:
    llm = make_llm(max_loras=2, lora_dir=tmp_path)
    store = llm.engine.adapters
    for seed in range(4):
        shutil.copytree(adapter(seed), tmp_path / f"a{seed}")
    digests = [store.get(f"a{seed}").digest for seed in range(4)]  # found in the folder by their names
    assert [each.loaded is not None for each in store.all()] == [False, False, True, True]
    assert [store.get(f"a{seed}").digest for seed in range(4)] == digests
    store.unload("a2")
    assert [each.name for each in store.all()] == ["a0", "a1", "a3"]
    for name in ("../a1", "a9", "", "a" * 300, 7):
        with pytest.raises(RequestError):
            store.get(name)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no adapter is called 'a9'"):
        store.unload("a9")


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for options, message in (
        ({"max_loras": 0}, "max_loras"),
        ({"max_lora_rank": True}, "max_lora_rank"),
        ({"lora_dir": tmp_path / "none"}, "is no folder"),
        ({"lora_modules": {"a": adapter(3)}, "max_lora_rank": 2}, "above max_lora_rank=2"),
        ({"lora_modules": {"": adapter(3)}}, "the name of an adapter"),
        ({"lora_modules": {"a": tmp_path}}, "is no adapter"),
    ):
        with pytest.raises(BifolioError, match=message):
            make_llm(**options)


@pytest.mark.full
def test_adapters_are_refused_where_they_do_not_run() -> None:
    if KERNELS != "native":
        pytest.skip("ranks need the native kernels")
    with pytest.raises(ConfigError, match="several on a CPU with deterministic=True"):
        make_llm(lora_modules={"a": adapter(1)}, tensor_parallel_size=2, deterministic=False)
    sizes = json.loads((base() / "config.json").read_text())
    shapes = {"A": (4, sizes["hidden_size"]), "B": (sizes["vocab_size"], 4)}
    tensors = {
        f"base_model.model.lm_head.lora_{side}.weight": np.ones(shape, np.float32) for side, shape in shapes.items()
    }
    head = adapter_folder(base(), tensors=tensors, target_modules=["lm_head"])
    with pytest.raises(ConfigError, match="the head or the embedding run in one process"):
        make_llm(lora_modules={"a": head}, tensor_parallel_size=2)


@pytest.mark.full
@pytest.mark.parametrize("speculative", [None, SpeculativeConfig("ngram", adaptive=False)])
def test_an_interrupted_and_a_preempted_request_keeps_its_adapter(speculative: SpeculativeConfig | None) -> None:
    llm = make_llm(num_blocks=22, speculative=speculative)
    prompts = [tuple(random_prompt(14, seed, 61)) for seed in range(5)]
    requests = [
        llm.engine.add_request(str(n), prompt, PARAMS, adapter=llm.engine.adapters.load(f"a{n}", adapter(n)))
        for n, prompt in enumerate(prompts)
    ]
    while llm.engine.has_work:
        llm.engine.step()
    assert sum(request.metrics.num_preemptions for request in requests) > 0
    for number, request in enumerate(requests):
        tokens = [token for token, *_ in alone(number, prompts[number])]
        assert [output for output, *_ in essence(request)] == tokens


# -- lives with loads, unloads and updates in flight -------------------------------------------------------------------
ACTIONS = st.lists(
    st.tuples(st.sampled_from(("add", "add", "add", "step", "step", "update", "unload", "abort", "fork")),
              st.integers(0, 3), st.integers(0, 5)),
    min_size=4, max_size=40,
)  # fmt: skip


def lives(llm: LLM, actions: list[tuple[str, int, int]]) -> Iterator[tuple[Request, int | None, tuple[int, ...]]]:
    """Run the actions; the requests that ended by themselves, with the version of their adapters and their prompts."""
    engine, store = llm.engine, llm.engine.adapters
    versions: dict[str, int] = {}
    running: list[tuple[Request, int | None, tuple[int, ...]]] = []
    for number, (action, place, value) in enumerate(actions):
        name = f"a{place}"
        if action == "update":
            store.load(name, adapter(value), in_place=True)
            versions[name] = value
        elif action == "unload" and name in versions:
            store.unload(name)
            del versions[name]
        elif action == "add":
            prompt = tuple(random_prompt(3 + 5 * (value % 3), value % 2, 61))
            own: LoadedAdapter | None = store.get(name) if name in versions else None
            running.append((engine.add_request(f"r{number}", prompt, PARAMS, adapter=own), versions.get(name), prompt))
        elif action == "abort" and running:
            engine.abort(running.pop(value % len(running))[0].request_id)
        else:
            for _ in range(1 + value):
                engine.step()
    while engine.has_work:
        engine.step()
    engine.blocks.check_invariants()
    assert engine.blocks.num_used_blocks == 0
    yield from running


@cache
def lasting_llm() -> LLM:
    return make_llm(num_blocks=40, max_num_seqs=5, max_loras=2)


@needs_exact
@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_lives_of_requests_with_changing_adapters(actions: list[tuple[str, int, int]]) -> None:
    llm = lasting_llm()
    for known in llm.engine.adapters.all():
        llm.engine.adapters.unload(known.name)
    for request, version, prompt in lives(llm, actions):
        assert request.error is None
        assert essence(request) == alone(version, prompt)


@needs_exact
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=5000, deadline=None)
@given(ACTIONS)
def test_five_thousand_lives(actions: list[tuple[str, int, int]]) -> None:
    test_lives_of_requests_with_changing_adapters.hypothesis.inner_test(actions)  # type: ignore[attr-defined]


def test_a_conversation_is_continued_with_its_adapter_from_its_blocks(tmp_path: Path) -> None:
    llm = make_llm()
    engine, prompt = llm.engine, random_prompt(18, vocab_size=61)
    first, second = (engine.adapters.load(f"a{seed}", adapter(seed)) for seed in (1, 2))

    def run(request: Request) -> Request:
        while engine.has_work:
            engine.step()
        return request

    parent = engine.add_request("parent", prompt, PARAMS, adapter=first)
    engine.keep("parent")
    run(parent)
    tokens = [*prompt, *parent.sequences[0].output_token_ids, 5, 6]
    same = run(engine.fork("parent", "same", [5, 6], PARAMS, adapter=first))
    other = run(engine.fork("parent", "other", [5, 6], PARAMS, adapter=second))
    if KERNELS == "native":
        assert essence(same) == alone(1, tuple(tokens))
        assert essence(other) == alone(2, tuple(tokens))
    assert essence(same) != essence(other)


def test_an_adapter_folder_that_is_replaced_is_a_new_version() -> None:
    llm = make_llm()
    folder = fresh_folder("versions")
    adapter_folder(base(), folder, seed=1)
    before = llm.engine.adapters.load("a", folder)
    shutil.rmtree(folder)
    adapter_folder(base(), folder, seed=2)
    assert llm.engine.adapters.load("a", folder) is before  # the same path: nothing is read
    after = llm.engine.adapters.load("a", folder, in_place=True)
    assert after.digest != before.digest


def test_an_answer_with_an_adapter_is_given_again() -> None:
    """A receipt names the adapter by its digest; the replay takes that one and no other."""
    folder = tiny_folder()
    adapters = {name: adapter_folder(folder, seed=seed) for seed, name in enumerate("ab", 1)}
    halved = {"half": [(str(adapters["a"]), 0.5)]}
    with LLM(folder, lora_modules={**adapters, **halved}, device="cpu", kernels="native") as llm:
        params, names = SamplingParams(max_tokens=6, temperature=1.0, logprobs=1), [None, "a", "b", "half"]
        prompts = [[3, 4, 5]] * len(names)
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=names, receipts=True)
        for name, output in zip(names, outputs, strict=True):
            for other in names:
                if other == name:
                    assert replay(llm, output.receipt, lora_request=other).is_equal
                    continue
                with pytest.raises(ConfigError, match="the receipt is of an"):
                    replay(llm, output.receipt, lora_request=other)
