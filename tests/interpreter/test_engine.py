"""Engines on the Triton kernels, in the interpreter: the whole way from prompts to tokens on tiny models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bifolio import LLM, SpeculativeConfig
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.select import CANDIDATES, Wanted
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.cache import CudaStorage
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.sampling.grammar import Grammar
from bifolio.sampling_params import SamplingParams
from helpers import (
    make_engine,
    make_runner,
    open_entry,
    output_ids,
    random_prompt,
    run_chunks,
    tiny_folder,
    tiny_loaded,
    tiny_model,
)

TOKENS = random_prompt(11, seed=4, vocab_size=61)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt2"])
def test_logits_equal_the_reference(architecture: str) -> None:
    """In one chunk, in several, and token by token."""
    model = load_folder(tiny_model(architecture)[1])
    vocab = model.config.vocab_size
    tokens = [token % vocab for token in TOKENS]
    expected = None
    for kernels in (TorchKernels("cpu"), TritonKernels("cpu", "f32")):
        runner, blocks = make_runner(model, kernels=kernels, poison=True)
        logits = [
            run_chunks(runner, open_entry(runner, blocks), tokens, 11),
            run_chunks(runner, open_entry(runner, blocks), tokens, 6),
            run_chunks(runner, open_entry(runner, blocks), tokens[:3], 1, decode=True),
        ]
        if expected is None:
            expected = logits
            continue
        for ours, theirs in zip(logits, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=1e-4)


PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.4}
SAMPLING: dict[str, list[dict[str, Any]]] = {  # requests of one batch
    "plain": [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 6, "n": 2}],
    "logprobs": [{"logprobs": 0}, {"temperature": 1.0, "seed": 5, "logprobs": 4}, {"temperature": 1.0, "seed": 6}],
    "penalties": [
        PENALTIES,
        {"temperature": 1.0, "seed": 5, "n": 2, **PENALTIES},
        {"temperature": 0.9, "seed": 6, "top_p": 0.8},
    ],
    "bans": [
        {"logit_bias": {5: 9.0, 6: 8.0}, "bad_words_token_ids": ((5,),)},
        {"temperature": 1.0, "seed": 5, "allowed_token_ids": (3, 4, 5, 6, 7), "logprobs": 2},
        {"temperature": 1.0, "seed": 6, "min_tokens": 3, "stop_token_ids": tuple(range(0, 60, 10))},
    ],
}


def generate(engine: Any, options: list[SamplingParams]) -> tuple[list[Any], list[float]]:
    """Tokens, ranks and most likely tokens of every sequence; and all logprobs."""
    prompts = [random_prompt(4 + 3 * index, seed=index, vocab_size=61) for index in range(len(options))]
    requests = [engine.add_request(str(i), p, o) for i, (p, o) in enumerate(zip(prompts, options, strict=True))]
    while engine.has_work:
        engine.step()
    assert all(request.error is None for request in requests)
    entries = [entry for request in requests for sequence in request.sequences for entry in sequence.logprobs]
    tops = [(entry.token_id, entry.rank, [token for token, _ in entry.top]) for entry in entries]
    scores = [score for entry in entries for score in (entry.logprob, *(top for _, top in entry.top))]
    return [*(output_ids(request) for request in requests), tops], scores


def assert_same(engine: Any, options: list[SamplingParams], expected: tuple[list[Any], list[float]]) -> None:
    """Logits of two kernel sets differ in their last bits, so logprobs do too."""
    found = generate(engine, options)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-4)


def parameters(each: list[dict[str, Any]], **common: Any) -> list[SamplingParams]:
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **common}
    return [SamplingParams(**{"max_tokens": 2 + index, **options, **own}) for index, own in enumerate(each)]


def draw_on_device(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a draw on the host is an error."""

    def no_draws_here(*_: Any) -> Any:
        raise AssertionError("drawn on the host")

    monkeypatch.setattr(engine.slots, "_draw_here", no_draws_here)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_overlapped_steps_on_the_kernels(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, tables and draws on the "device" give what the reference gives on the host."""
    options = parameters(SAMPLING[sampling])
    expected = generate(make_engine(), options)
    engine = make_engine(kernels=TritonKernels("cpu", "f32"))
    draw_on_device(engine, monkeypatch)
    assert_same(engine, options, expected)
    assert engine.stats().num_steps < 20


def test_counts_survive_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted sequence takes a slot with its history, which the device counts anew."""
    options = parameters([{"seed": index, **PENALTIES} for index in range(3)], temperature=1.0, max_tokens=6)
    expected = generate(make_engine(), options)
    engine = make_engine(kernels=TritonKernels("cpu", "f32"), num_blocks=10, max_model_len=28)
    draw_on_device(engine, monkeypatch)
    assert_same(engine, options, expected)
    assert engine.stats().num_preemptions > 0


def test_counts_follow_drafts() -> None:
    """Drafts are verified on the host; a step without drafts draws on the device, with all tokens counted."""
    config = SpeculativeConfig("ngram", adaptive=False)
    options = parameters(
        [{"seed": index, "frequency_penalty": -1.0} for index in range(2)], temperature=0.5, max_tokens=7
    )
    expected = generate(make_engine(), options)
    engine = make_engine(kernels=TritonKernels("cpu", "f32"), speculative=config)
    sent: list[int] = []
    device: Any = engine.slots.device
    set_history = device.set_history
    device.set_history = lambda slot, prompt, output: (sent.append(len(output)), set_history(slot, prompt, output))
    assert_same(engine, options, expected)
    assert engine.speculator is not None
    assert engine.speculator.stats.num_draft_tokens > 0
    assert max(sent) > 0


def test_a_grammar_is_drawn_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are launched ahead; its mask comes when the token before it is known, and the draw follows."""
    pytest.importorskip("llguidance")
    model = tiny_loaded(tokenizer=True)
    each = [
        {"grammar": Grammar.regex("[a-f]{3,4}"), "seed": 1, "logprobs": 1},
        {"seed": 2},
        {"grammar": {"enum": [7]}, "seed": 3},
        {"grammar": Grammar.regex("[a-f]{9}"), "seed": 4, **PENALTIES},
    ]
    options = parameters(each, temperature=1.0, max_tokens=6)
    expected = generate(make_engine(model), options)
    engine = make_engine(model, kernels=TritonKernels("cpu", "f32"))
    draw_on_device(engine, monkeypatch)
    assert_same(engine, options, expected)
    assert engine.stats().num_steps <= 8  # prompts, then a step for each token


def test_greedy_draws_run_ahead_of_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no mask until the grammar forbids a token; that one is drawn again with a mask, from known tokens."""
    pytest.importorskip("llguidance")
    model = tiny_loaded(tokenizer=True)
    each = [{"grammar": Grammar.regex("[ -~]{1,40}"), "logprobs": 1}, {}, {"grammar": Grammar.regex("(.|\\n){1,40}")}]
    options = parameters(each, temperature=0.0, max_tokens=6)
    expected = generate(make_engine(model), options)
    engine = make_engine(model, kernels=TritonKernels("cpu", "f32"))
    draw_on_device(engine, monkeypatch)
    switched: list[bool] = []
    device: Any = engine.slots.device
    set_mask = device.set_mask
    device.set_mask = lambda slot, is_used: (switched.append(is_used), set_mask(slot, is_used))
    assert_same(engine, options, expected)
    assert set(switched) == {False, True}


def test_a_grammar_behind_a_shared_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes whose draws are late read common prefixes once too, and their rows come back in the order of the slots."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr("bifolio.kernels.shared_prefix.MIN_SAVED", 1)
    model, params = tiny_loaded(tokenizer=True), {"temperature": 1.0, "max_tokens": 2}
    beginning = random_prompt(66, seed=1, vocab_size=61)
    options = [
        SamplingParams(grammar=Grammar.regex("[a-f]{9}"), seed=1, **params),
        SamplingParams(ignore_eos=True, seed=2, **params),
        SamplingParams(grammar=Grammar.regex("[g-z]{9}"), seed=3, **params),
    ]
    prompts = [[*beginning, 3], [5, 6, 7], [*beginning, 4]]
    outcomes, shared = [], []
    for kernels in (ReferenceKernels(), TritonKernels("cpu", "f32")):
        engine = make_engine(model, kernels=kernels)
        if engine.slots.device is not None:
            graphs: Any = engine.slots.device.decodes  # type: ignore[attr-defined]
            launch = graphs.launch

            def watched(slots: Any, mode: Any, work: Any = None, launch: Any = launch, **options: Any) -> Any:
                shared.append((mode is None, work is not None))
                return launch(slots, mode, work, **options)

            graphs.launch = watched
        requests = [engine.add_request(str(i), p, o) for i, (p, o) in enumerate(zip(prompts, options, strict=True))]
        while engine.has_work:
            engine.step()
        outcomes.append([output_ids(request) for request in requests])
    assert outcomes[0] == outcomes[1]
    assert (True, True) in shared


def test_a_shared_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples of one long prompt beside a stranger: the tokens are those of an engine that shares nothing."""
    monkeypatch.setattr("bifolio.kernels.shared_prefix.MIN_SAVED", 1)
    shared: list[int] = []
    expected: list[Any] = []
    for kernels in (None, TritonKernels("cpu", "f32")):
        options: dict[str, Any] = {} if kernels is None else {"kernels": kernels}
        engine = make_engine(num_blocks=64, **options)
        if kernels is not None:
            graphs: Any = engine.slots.device.decodes  # type: ignore[union-attr]
            launch = graphs.launch

            def watched(slots: Any, mode: str, work: Any = None, launch: Any = launch, **options: Any) -> Any:
                shared.append(0 if work is None else int(work.skipped.max()))
                return launch(slots, mode, work, **options)

            graphs.launch = watched
        params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=2, ignore_eos=True)
        requests = [
            engine.add_request("many", random_prompt(70, seed=1, vocab_size=61), params),
            engine.add_request("stranger", random_prompt(5, seed=2, vocab_size=61), params),
        ]
        while engine.has_work:
            engine.step()
        expected.append([output_ids(request) for request in requests])
    assert expected[0] == expected[1]
    assert max(shared) == 64


def test_deterministic_output_is_the_same_in_a_crowd() -> None:
    """Alone, in company, in chunks and after a preemption: the same logprobs, bit for bit."""

    def run(company: int, **options: Any) -> list[Any]:
        kernels = TritonKernels("cpu", "f16", deterministic=True)
        engine = make_engine(kernels=kernels, **options)
        for index in range(company):
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            engine.add_request(f"other-{index}", random_prompt(5 + index, seed=20 + index, vocab_size=61), params)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
        needle = engine.add_request("needle", random_prompt(19, seed=9, vocab_size=61), params)
        while engine.has_work:
            engine.step()
        sequence = needle.sequences[0]
        return [(entry.token_id, entry.logprob) for entry in sequence.logprobs]

    alone = run(0)
    assert len(alone) == 3
    assert run(3) == alone
    assert run(2, chunk_size=7, token_budget=9) == alone


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_offline_api_keeps_its_slots_on_the_device(deterministic: bool) -> None:
    """What a user of a GPU gets, settings included; greedy output equals the plain engine's."""
    folder = tiny_folder()
    prompts = [random_prompt(5 + index, seed=index, vocab_size=61) for index in range(2)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    wanted = Wanted("cpu", None, "int8", "f32", deterministic)
    kernels = CANDIDATES["triton"].make(wanted)
    llm = LLM(folder, kernels=kernels, block_size=16, max_model_len=64, num_blocks=20, deterministic=deterministic)
    assert llm.engine.slots.device is not None
    assert isinstance(llm.engine.storages[0], CudaStorage)
    assert kernels.deterministic is deterministic  # type: ignore[attr-defined]
    ours = llm.generate(prompts, params)
    theirs = LLM(folder, kernels=ReferenceKernels(), max_model_len=64).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in ours] == [t.outputs[0].token_ids for t in theirs]
