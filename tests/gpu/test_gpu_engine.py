"""The engine on a GPU: captured, overlapped steps give what the CPU gives, and in deterministic mode the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_engine_needle
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_engine_machine import EngineMachine

from bifolio import LLM, BeamSearchParams, SamplingParams, SpeculativeConfig
from bifolio.api.outputs import request_output
from bifolio.errors import ConfigError
from bifolio.sampling.grammar import Grammar
from built_engines import built_engine
from draft_heads import eagle_folder
from helpers import drain, kv_storage, output_ids, random_prompt, run_alone, tiny_folder, tiny_loaded

VOCAB = 61
EXACT_DTYPE = "bf16"  # of tests to the last bit
NewEngine = Callable[..., Any]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0, "seed": 3},
    "warm": {"temperature": 1.7, "seed": 4},
    "top-k": {"temperature": 1.0, "seed": 5, "top_k": 7},
    "top-p": {"temperature": 0.9, "seed": 6, "top_p": 0.7},
    "min-p": {"temperature": 1.2, "seed": 7, "min_p": 0.1, "typical_p": 0.9},
    "penalties": {"temperature": 0.8, "seed": 8, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "bias": {"temperature": 1.0, "seed": 9, "logit_bias": {5: 4.0}, "bad_words_token_ids": ((6,),)},
    "several": {"temperature": 1.0, "seed": 10, "n": 3},
    "logprobs": {"temperature": 0.7, "seed": 11, "logprobs": 3, "prompt_logprobs": 2},
    "stops": {"temperature": 1.0, "seed": 12, "stop_token_ids": tuple(range(30, 40)), "min_tokens": 3},
}

ON_DEVICE: dict[str, dict[str, Any]] = {  # drawn inside the captured step
    **{name: SAMPLING[name] for name in ("greedy", "plain", "top-k", "top-p", "penalties", "bias", "several")},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    "logprobs": {"temperature": 0.7, "seed": 11, "logprobs": 20},
    "best": {"temperature": 0.9, "seed": 12, "n": 1, "best_of": 2},
    "typical": {"temperature": 1.2, "seed": 15, "typical_p": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "allowed": {"temperature": 1.0, "seed": 13, "allowed_token_ids": tuple(range(5, 25)), "frequency_penalty": 0.5},
    "stops": {"temperature": 1.0, "seed": 14, "stop_token_ids": tuple(range(30, 36)), "min_tokens": 6},
}


@pytest.fixture(scope="module")
def folder() -> Any:
    return tiny_folder()


# -- output ---------------------------------------------------------------------------------------------------------
def test_every_kind_of_sampling_in_one_batch(new_engine: NewEngine) -> None:
    """All together on the GPU, each alone on the CPU's reference kernels: the same tokens, and the same logprobs."""
    options = [SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **each}) for each in SAMPLING.values()]
    prompts = [random_prompt(5 + 2 * number, seed=number, vocab_size=VOCAB) for number in range(len(options))]
    engine = new_engine(max_num_seqs=24, num_blocks=400)
    requests = [engine.add_request(str(i), p, o) for i, (p, o) in enumerate(zip(prompts, options, strict=True))]
    drain(engine)
    for name, prompt, params, request in zip(SAMPLING, prompts, options, requests, strict=True):
        expected = run_alone(prompt, params)
        assert output_ids(request) == output_ids(expected), name
        for ours, theirs in zip(request.sequences, expected.sequences, strict=True):
            assert [e.logprob for e in ours.logprobs] == pytest.approx([e.logprob for e in theirs.logprobs], abs=1e-4)
    assert engine.blocks.num_used_blocks == 0


@pytest.mark.usefixtures("own_kernels")
def test_options_inside_the_captured_step(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is drawn on the host; tokens, ranks and logprobs are those of the CPU's reference kernels."""
    options = [SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **each}) for each in ON_DEVICE.values()]
    prompts = [random_prompt(5 + 2 * number, seed=number, vocab_size=VOCAB) for number in range(len(options))]
    engine = new_engine(max_num_seqs=24, num_blocks=400)
    monkeypatch.setattr(engine.slots, "_draw_here", None)
    requests = [engine.add_request(str(i), p, o) for i, (p, o) in enumerate(zip(prompts, options, strict=True))]
    drain(engine)
    for name, prompt, params, request in zip(ON_DEVICE, prompts, options, requests, strict=True):
        expected = run_alone(prompt, params)
        assert output_ids(request) == output_ids(expected), name
        for ours, theirs in zip(request.sequences, expected.sequences, strict=True):
            assert [e.logprob for e in ours.logprobs] == pytest.approx([e.logprob for e in theirs.logprobs], abs=1e-4)
            assert [len(e.top) for e in ours.logprobs] == [len(e.top) for e in theirs.logprobs]
    assert engine.blocks.num_used_blocks == 0


@pytest.mark.usefixtures("own_kernels")
def test_grammars_are_drawn_behind_the_captured_pass(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the requests follow a grammar; all take part in every step, drawn on the device, and equal the CPU's."""
    pytest.importorskip("llguidance")
    model, pattern = tiny_loaded(tokenizer=True), Grammar.regex("[a-f]{6,9}")
    vocab = model.config.vocab_size
    options = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=10, grammar=pattern if number % 2 else None)
        for number in range(6)
    ]
    outcomes = []
    for make in (built_engine, new_engine):
        engine = make(model=model, max_num_seqs=8)
        if make is new_engine:
            monkeypatch.setattr(engine.slots, "_draw_here", None)
        prompts = [random_prompt(5 + number, seed=number, vocab_size=vocab) for number in range(len(options))]
        requests = [engine.add_request(str(i), p, o) for i, (p, o) in enumerate(zip(prompts, options, strict=True))]
        num_steps = drain(engine)
        assert all(request.error is None for request in requests)
        outcomes.append([output_ids(request) for request in requests])
    assert outcomes[0] == outcomes[1]
    assert num_steps <= 14  # one for each token, some for the prompts and the last tokens


def test_a_life_at_random(new_engine: NewEngine) -> None:
    """The engine's state machine: adds, aborts, steps, preemptions and drafts in any order."""

    class Machine(EngineMachine):
        new_engine: Any = None

    Machine.new_engine = staticmethod(new_engine)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=8,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("needle", list(test_engine_needle.NEEDLES))
def test_a_needle_in_a_crowd_is_the_same_to_the_last_bit(
    needle: str, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deterministic(model: Any = None, **options: Any) -> Any:
        return new_engine(EXACT_DTYPE, deterministic=True, model=model, **options)

    monkeypatch.setattr(test_engine_needle, "make_engine", deterministic)
    engine = deterministic(chunk_size=512, token_budget=512)
    alone = engine.add_request("alone", test_engine_needle.PROMPT, test_engine_needle.NEEDLES[needle])
    drain(engine)
    for trace in range(3):
        rng = np.random.default_rng(100 * trace + len(needle))
        crowded = test_engine_needle.crowded_engine(rng, None)  # type: ignore[arg-type]
        request = test_engine_needle.run_in_crowd(crowded, needle, rng)
        assert test_engine_needle.outcome(request) == test_engine_needle.outcome(alone), f"trace {trace}"


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("config", [
    SpeculativeConfig("ngram", adaptive=False),
    SpeculativeConfig("draft", draft_model="target", adaptive=False, length=3),
    SpeculativeConfig("eagle", draft_model="head", adaptive=False, length=3),
    SpeculativeConfig("eagle", draft_model="head", length=2),
], ids=["ngram", "draft", "eagle", "eagle, adaptive"])  # fmt: skip
def test_speculation_changes_nothing(config: SpeculativeConfig, folder: Any, gpu_kernels: Callable[..., Any]) -> None:
    from dataclasses import replace

    prompts = [random_prompt(1 + i % 4, i, VOCAB) * 4 for i in range(5)]
    params = [
        SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=14, logprobs=0, ignore_eos=True)
        for i in range(5)
    ]
    outcomes = []
    paths = {"target": str(folder), "head": str(eagle_folder())}
    drafter = None if config.draft_model is None else paths[config.draft_model]
    for speculative in (None, replace(config, draft_model=drafter)):
        llm = LLM(folder, kernels=gpu_kernels(EXACT_DTYPE, deterministic=True), num_blocks=200, block_size=4,
                  max_model_len=96, max_num_seqs=8, speculative=speculative)  # fmt: skip
        outputs = llm.generate(prompts, params)
        outcomes.append([(o.outputs[0].token_ids, [t.logprob for t in o.outputs[0].logprobs or []]) for o in outputs])
        assert llm.engine.blocks.num_used_blocks == 0
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.num_draft_tokens > 0 or config.adaptive
    assert outcomes[0] == outcomes[1]


def test_beams_and_samples_under_preemption(new_engine: NewEngine) -> None:
    """A pool that is too small for all: blocks are shared, copied on write, taken away and computed again."""
    prompts = [random_prompt(9 + n, n, VOCAB) for n in range(4)]
    beams = BeamSearchParams(3, max_tokens=10, ignore_eos=True)
    samples = SamplingParams(temperature=0.9, seed=4, max_tokens=10, ignore_eos=True, n=2)
    outcomes = []
    for make in (built_engine, new_engine):
        engine = make(num_blocks=23, max_model_len=40, max_num_seqs=9, chunk_size=5, token_budget=17)
        searches = [engine.add_beam_search(f"b{i}", p, beams) for i, p in enumerate(prompts)]
        others = [engine.add_request(f"s{i}", p, samples) for i, p in enumerate(prompts)]
        while engine.has_work:
            engine.step()
            engine.blocks.check_invariants()
        assert any(request.metrics.num_preemptions for request in (*searches, *others))
        assert engine.blocks.num_used_blocks == 0
        tokens = [[output.token_ids for output in request_output(request).outputs] for request in searches]
        outcomes.append((tokens, [output_ids(request) for request in others]))
    assert outcomes[0] == outcomes[1]


# -- memory ---------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("own_kernels")
def test_blocks_are_copied_in_every_layer(device: str) -> None:
    import torch

    from bifolio.cache.storage import CacheLayout
    from bifolio.kernels.triton.cache import CudaStorage

    shape = (3, 12, 4, 2, 16)  # layers, blocks, slots, heads, head size
    ours = CudaStorage(CacheLayout(*shape, "bf16"), device=device, backend="torch")
    theirs = kv_storage(*shape, "bf16", backend="numpy")
    rng = np.random.default_rng(0)
    slots = np.arange(4, 40)
    for layer in range(3):
        keys, values = (rng.integers(-99, 99, (36, 2, 16)).astype(np.float32) for _ in range(2))
        theirs.write(layer, slots, keys, values)
        ours.write(layer, *(torch.from_numpy(array).to(device) for array in (slots, keys, values)))
    copies = [(1, 10), (2, 11), (9, 3)]
    for storage in (ours, theirs):
        storage.move_blocks(copies)
        storage.move_blocks([])
    for layer in range(3):
        for got, expected in zip(
            ours.gather(layer, [10, 11, 3, 4], 16), theirs.gather(layer, [10, 11, 3, 4], 16), strict=True
        ):
            np.testing.assert_array_equal(got.float().cpu().numpy(), expected)


def test_a_step_that_runs_out_of_memory_is_taken_back(new_engine: NewEngine, device: str) -> None:
    import torch

    engine = new_engine()
    launch, calls = engine.decode_executor.launch, iter(range(10**6))

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) in (2, 3):
            if device == "cpu":
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            torch.empty(1 << 45, dtype=torch.uint8, device=device)
        return launch(*arguments, **options)

    engine.decode_executor.launch = failing
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    prompts = [random_prompt(5 + 3 * number, seed=number, vocab_size=VOCAB) for number in range(5)]
    requests = [engine.add_request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
    drain(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.metrics.num_preemptions > 0
        assert output_ids(request) == output_ids(run_alone(prompt, params))
    assert engine.blocks.num_used_blocks == 0


def test_the_cache_is_what_fits_beside_a_step_that_was_tried(device: str, folder: Any) -> None:
    if device == "cpu":
        pytest.skip("the interpreter has no memory of its own")
    import torch

    llm = LLM(folder, device=device, max_num_seqs=16, max_model_len=200, gpu_memory_utilization=0.1)
    assert llm.engine.slots.device is not None
    assert llm.engine.runner.kernels.name == "triton"
    assert (llm.engine.config.cache.block_size, llm.engine.config.cache.dtype) == (64, "bf16")
    assert llm.plan.step_bytes > 0
    assert llm.plan.cache_bytes < llm.plan.free_bytes <= torch.cuda.mem_get_info(device)[1]
    outputs = llm.generate([random_prompt(9, vocab_size=VOCAB)] * 3, SamplingParams(temperature=0, max_tokens=5))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        LLM(folder, device=device, max_model_len=256, gpu_memory_utilization=1e-9)


@pytest.mark.full
def test_a_closed_llm_gives_back_its_memory(device: str, release_gpu: None) -> None:
    """At once, and while it is still referred to: the next one finds it free."""
    import torch

    if device == "cpu":
        pytest.skip("needs a GPU")
    allocated = []
    for num_blocks in (200, 40_000):  # the workspace of cuBLAS stays from the first on
        llm = LLM(tiny_folder(), device=device, num_blocks=num_blocks, max_num_seqs=8)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        cache, used = llm.plan.cache_bytes, torch.cuda.memory_allocated(device)
        llm.close()
        allocated.append(torch.cuda.memory_allocated(device))
    assert used > allocated[0] + 0.9 * cache
    assert allocated[1] < allocated[0] + 0.1 * cache
