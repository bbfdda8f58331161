"""Engines on hybrid models: a needle in a crowd, random lives, and long conversations that reuse their prefix.

Every answer equals that of an engine without a prefix cache, whatever states were found, restored, evicted or forked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from engine_traces import Trace
from hypothesis import HealthCheck, Phase, settings
from test_engine_machine import MAX_MODEL_LEN, EngineMachine
from test_engine_needle import EXACT, NEEDLES, PROMPT, crowded_engine, kernels_named, outcome, run_in_crowd

from bifolio import BeamSearchParams
from bifolio.config import CacheConfig, EngineConfig, SpeculativeConfig
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.memory import plan_memory
from bifolio.engine.state_plan import plan_states, with_states
from bifolio.errors import ConfigError, RequestError
from bifolio.sampling_params import SamplingParams
from helpers import (
    cpu_kernel_names,
    drain,
    kernels_of_long_runs,
    make_engine,
    output_ids,
    random_prompt,
    run_alone,
    tiny_loaded,
)
from hybrid_models import VOCABULARY, hybrid_config, recurrent_config, tiny_hybrid

KINDS = ("conv", "delta", "lru", "mamba", "rwkv", "wide conv")
KERNELS = [name for name in cpu_kernel_names() if name in ("reference", *EXACT)]
FAST_KERNELS = kernels_of_long_runs(KERNELS)
NUM_TRACES = 8


@pytest.mark.full
@pytest.mark.parametrize("kernel_name", FAST_KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_needle_in_a_crowd(kind: str, kernel_name: str) -> None:
    """Bit for bit on the native kernels."""
    kernels, events = kernels_named(kernel_name), 0
    for trace in range(NUM_TRACES):
        rng, needle = np.random.default_rng(trace), list(NEEDLES)[trace % len(NEEDLES)]
        request = run_in_crowd(crowded_engine(rng, kernels, tiny_hybrid(kind)), needle, rng)
        tokens, logprobs = outcome(request)
        alone = run_alone(PROMPT, NEEDLES[needle], kernels=kernels, model=tiny_hybrid(kind))
        expected_tokens, expected_logprobs = outcome(alone)
        assert tokens == expected_tokens, f"trace {trace}, {needle}"
        if kernel_name in EXACT:
            assert logprobs == expected_logprobs, f"trace {trace}, {needle}"
        events += request.metrics.num_preemptions + (request.metrics.num_cached_tokens > 0)
    assert events > 0  # preemptions and prefix hits


@cache
def solo(kind: str, prompt: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> tuple[list[list[int]], list[Any]]:
    request = run_alone(prompt, SamplingParams(**dict(options)), max_model_len=MAX_MODEL_LEN, model=tiny_hybrid(kind))
    return output_ids(request), [sequence.finish_reason for sequence in request.sequences]


def machine(kind: str) -> Any:
    """The state machine of engines on one hybrid, with few states and close checkpoints."""

    def new_engine(**options: Any) -> InferenceEngine:
        drafts = options["speculative"]
        most = options["max_num_seqs"] * (2 + (0 if drafts is None else drafts.length))
        return make_engine(
            tiny_hybrid(kind), num_states=4 + most, checkpoint_tokens=2 * options["block_size"], **options
        )

    attributes = {"new_engine": staticmethod(new_engine), "solo": staticmethod(partial(solo, kind))}
    case = type(f"{kind.capitalize()}Machine", (EngineMachine,), attributes).TestCase
    case.settings = settings(
        max_examples=12,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    return pytest.mark.full(case)


TestConv = machine("conv")
TestDelta = machine("delta")


@pytest.mark.full
@pytest.mark.parametrize("kernels", FAST_KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_traces(kind: str, kernels: str) -> None:
    for seed in range(6):
        assert Trace(seed, kernels, kind).run() == [], seed


@pytest.mark.full
@pytest.mark.parametrize("seed", [5038, 5079])  # completions forked behind two passes in flight kept all checkpoints
def test_traces_that_failed_once(seed: int) -> None:
    assert Trace(seed, "reference", "conv").run() == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(20_000, 22_000, 250))
def test_two_thousand_random_traces(first: int) -> None:
    for seed in range(first, first + 250):
        trace = Trace(seed, KERNELS[seed % len(KERNELS)], ("conv", "delta")[seed // 2 % 2])
        assert trace.run() == [], seed


# -- conversations ---------------------------------------------------------------------------------------------------

BLOCK, SPACING, TURNS = 4, 32, 20
ANSWER = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)


def conversation_engine(kind: str, kernels: str, **options: Any) -> InferenceEngine:
    return make_engine(
        tiny_hybrid(kind),
        kernels=kernels_named(kernels),
        block_size=BLOCK,
        num_blocks=600,
        max_model_len=512,
        chunk_size=16,
        checkpoint_tokens=SPACING,
        num_states=100,
        **options,
    )


@pytest.mark.full
@pytest.mark.parametrize("kernels", FAST_KERNELS)
@pytest.mark.parametrize("kind", [*KINDS, "lightning"])
def test_a_conversation_computes_its_new_tokens_alone(kind: str, kernels: str) -> None:
    """Twenty turns, with forks, beams and aborted turns in the middle: each costs its new tokens and one spacing."""
    engine = conversation_engine(kind, kernels)
    plain = conversation_engine(kind, kernels, enable_prefix_caching=False)
    history = random_prompt(21, seed=1, vocab_size=VOCABULARY)
    for turn in range(TURNS):
        name = f"turn {turn}"
        message = random_prompt(3 + turn % 6, seed=100 + turn, vocab_size=VOCABULARY)
        before, known = engine.stats().num_prefill_tokens, len(history)
        history += message
        if turn % 5 == 2:  # the user stops the answer, and asks for another
            engine.add_request("stopped", history, ANSWER)
            for _ in range(4):
                engine.step()
            engine.abort("stopped")
            drain(engine)
        request = engine.add_request(name, history, ANSWER)
        if turn % 3 == 1:
            engine.keep(name)
        drain(engine)
        if turn:
            computed = engine.stats().num_prefill_tokens - before
            aborted = len(message) + SPACING if turn % 5 == 2 else 0
            assert computed <= len(history) - known + SPACING + aborted, f"{name}: {computed} tokens"
        assert output_ids(request) == output_ids(_alone(plain, history)), name
        history += request.sequences[0].output_token_ids
        _branch(engine, plain, name, history, turn)
    assert engine.stats().states.num_held_states == 0
    engine.blocks.check_invariants()


def _alone(plain: InferenceEngine, prompt: list[int], beams: int = 0) -> Any:
    if beams:
        request = plain.add_beam_search("alone", prompt, BeamSearchParams(beams, max_tokens=5, ignore_eos=True))
    else:
        request = plain.add_request("alone", prompt, ANSWER)
    drain(plain)
    return request


def _branch(engine: InferenceEngine, plain: InferenceEngine, name: str, history: list[int], turn: int) -> None:
    """Side ways of a conversation: forks of a kept turn, or a beam search."""
    if turn % 3 == 1:
        for tail in ([7, 9], [40]):
            fork = engine.fork(name, f"{name}, fork {tail}", tail, ANSWER)
            before = engine.stats().num_prefill_tokens
            drain(engine)
            assert engine.stats().num_prefill_tokens - before <= len(tail) + 1, "the kept state is continued"
            assert output_ids(fork) == output_ids(_alone(plain, [*history, *tail]))
        engine.release(name)
    if turn % 4 == 3:
        search = engine.add_beam_search(f"{name}, beams", history, BeamSearchParams(3, max_tokens=5, ignore_eos=True))
        drain(engine)
        assert output_ids(search) == output_ids(_alone(plain, history, beams=3))


def test_a_prefix_is_restored_at_its_last_checkpoint() -> None:
    engine = conversation_engine("conv", "reference")
    prompt = random_prompt(103, seed=5, vocab_size=VOCABULARY)
    drain_request(engine, "first", prompt)
    diverging = [*prompt[:70], *random_prompt(9, seed=6, vocab_size=VOCABULARY)]
    second = drain_request(engine, "second", diverging)
    assert second.metrics.num_cached_tokens == 64  # the last multiple of the spacing
    third = drain_request(engine, "third", [*prompt[:-1], 5, 6, 7])
    assert third.metrics.num_cached_tokens == 100  # the end of the first prompt


def test_a_kept_conversation_whose_state_is_evicted_continues_from_a_checkpoint() -> None:
    engine = make_engine(tiny_hybrid("delta"), num_states=2 + 4 * 2 + 1, max_num_seqs=4, checkpoint_tokens=8)
    plain = make_engine(tiny_hybrid("delta"), enable_prefix_caching=False, max_num_seqs=4)
    prompt = random_prompt(22, seed=3, vocab_size=VOCABULARY)
    engine.add_request("kept", prompt, ANSWER)
    engine.keep("kept")
    drain(engine)
    kept = engine.batcher.kept("kept")
    assert kept is not None
    for number in range(8):  # their states evict that of the kept conversation
        drain_request(engine, f"other {number}", random_prompt(20, seed=50 + number, vocab_size=VOCABULARY))
    fork = engine.fork("kept", "fork", [8, 9], ANSWER)
    drain(engine)
    assert output_ids(fork) == output_ids(_alone(plain, [*kept.token_ids, 8, 9]))
    assert engine.stats().states.num_evicted_states > 0


def test_verified_drafts_continue_from_their_own_state() -> None:
    speculative = SpeculativeConfig("ngram", length=4, adaptive=False)
    prompt = [5, 6, 7, 8] * 5
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, allowed_token_ids=(5, 6, 7))
    for kind in KINDS:
        engine = make_engine(tiny_hybrid(kind), speculative=speculative)
        request = engine.add_request("drafts", prompt, params)
        drain(engine)
        sequence = request.sequences[0]
        assert 0 < sequence.num_accepted < sequence.num_drafted, kind  # some are accepted, some rejected
        assert output_ids(request) == output_ids(run_alone(prompt, params, model=tiny_hybrid(kind)))


@pytest.mark.parametrize("kernel_name", KERNELS)
def test_drafts_of_a_plain_model(kernel_name: str) -> None:
    """The draft model has no recurrent layers, hence no states, although the engine's cache has some."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    speculative = SpeculativeConfig("draft", adaptive=False)
    engine = make_engine(
        tiny_hybrid("conv"), kernels=kernels_named(kernel_name), speculative=speculative, draft_model=tiny_loaded()
    )
    request = engine.add_request("drafts", [5, 6, 7], params)
    drain(engine)
    assert request.error is None
    assert request.sequences[0].num_drafted > 0
    assert output_ids(request) == output_ids(run_alone([5, 6, 7], params, model=tiny_hybrid("conv")))


def drain_request(engine: InferenceEngine, name: str, prompt: list[int]) -> Any:
    request = engine.add_request(name, prompt, ANSWER)
    drain(engine)
    return request


# -- plans and refusals ----------------------------------------------------------------------------------------------


def engine_config(**cache: Any) -> EngineConfig:
    return EngineConfig(CacheConfig(64, 16, **cache), max_model_len=512, max_num_seqs=4)


def test_the_default_spacing_costs_as_much_as_the_keys_and_values_of_its_tokens() -> None:
    plan = plan_states(hybrid_config("conv"), engine_config())
    assert plan is not None
    assert plan.bytes_per_state == 2 * 4 * 2 * 32  # 2 layers of f32[2, 32]
    assert plan.spacing == 256  # a small state: the least spacing
    recurrent = replace(recurrent_config("delta"), key_size=64, value_size=64, channels=512)
    large = plan_states(hybrid_config("delta", recurrent=recurrent), engine_config())
    assert large is not None
    assert large.bytes_per_state == 2 * 4 * (2 * 512 + 4 * 64 * 64)
    assert large.spacing == 1088  # keys and values of a token take 128 bytes
    assert plan_states(hybrid_config("delta", recurrent=None, layers=()), engine_config()) is None


@pytest.mark.parametrize("caching", [True, False])
def test_memory_is_shared_by_blocks_and_states(caching: bool) -> None:
    """Twice the memory gives more blocks and more checkpoints; states of running sequences come first."""
    config, sizes = hybrid_config("delta"), engine_config(enable_prefix_caching=caching)
    states = plan_states(config, sizes)
    assert states is not None
    plans = [
        plan_memory(config, 0, memory=memory, max_model_len=64, max_num_seqs=4, states=states)
        for memory in (300_000, 600_000)
    ]
    for plan, memory in zip(plans, (300_000, 600_000), strict=True):
        assert memory * 0.9 < plan.cache_bytes <= memory + states.bytes_per_state
        assert any(line.startswith("states") for line in plan.lines())
    assert plans[0].num_blocks < plans[1].num_blocks
    assert (plans[0].num_states < plans[1].num_states) is caching
    with pytest.raises(ConfigError, match="max_num_seqs"):
        plan_memory(config, 0, memory=20_000, max_model_len=64, max_num_seqs=4, states=states)


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_states >= 10"):
        with_states(hybrid_config("conv"), engine_config(num_states=9))
    with pytest.raises(ConfigError, match="multiple of the block size"):
        with_states(hybrid_config("conv"), engine_config(checkpoint_tokens=24))


def test_what_hybrids_cannot_do_yet_is_refused() -> None:
    speculative = SpeculativeConfig("draft", adaptive=False)
    with pytest.raises(ConfigError, match="draft model with recurrent layers"):
        make_engine(tiny_hybrid("conv"), draft_model=tiny_hybrid("conv"), speculative=speculative)
    with pytest.raises(RequestError, match="beams"):
        make_engine(tiny_hybrid("conv"), num_blocks=34).add_beam_search(
            "wide", random_prompt(60, vocab_size=VOCABULARY), BeamSearchParams(4, max_tokens=20)
        )


def test_stats_count_states_and_checkpoints() -> None:
    engine = conversation_engine("delta", "reference")
    prompt = random_prompt(70, seed=9, vocab_size=VOCABULARY)
    drain_request(engine, "first", prompt)
    states = engine.stats().states
    assert states.num_states == 99
    assert states.num_held_states == 0
    assert states.num_checkpoints == 4  # after 32, 64 and 68 tokens, and the last full block of the answer
    drain_request(engine, "second", prompt)
    assert engine.stats().states.num_checkpoint_hits == 1
