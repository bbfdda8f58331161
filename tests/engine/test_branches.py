"""Branches: forks, appends, truncations and scores give the bits of the same tokens run alone."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from branch_trees import MODELS, Trees, kernels, outcome, run_alone

from bifolio.engine.branches import BranchOwner, BranchState
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import EmptyPromptError, PromptTooLongError, RequestError
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request
from helpers import cpu_kernel_names, drain, make_engine, random_prompt, tiny_loaded

pytestmark = pytest.mark.skipif("native" not in cpu_kernel_names(), reason="bits are promised by the native kernels")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = random_prompt(21, 4, 61)


def opened(engine: InferenceEngine, tokens: list[int]) -> tuple[BranchOwner, BranchState]:
    owner = BranchOwner(engine)
    branch = owner.open(tokens)
    computed(engine, owner, branch)
    return owner, branch


def computed(engine: InferenceEngine, owner: BranchOwner, branch: BranchState) -> Request | None:
    request = owner.missing(branch, f"compute-{branch.num_tokens}-{id(branch)}")
    drain(engine)
    if request is not None:
        owner.computed(branch, request)
    return request


def generated(engine: InferenceEngine, owner: BranchOwner, branch: BranchState, params: SamplingParams) -> Request:
    request = owner.generate(branch, f"generate-{branch.num_tokens}-{id(branch)}", params, advances=True)
    drain(engine)
    owner.generated(branch, request)
    return request


# -- random trees ----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_random_trees(name: str) -> None:
    results = preemptions = tier_hits = 0
    for seed in range(3):
        trees = Trees(MODELS[name](), seed)
        trees.run(60)
        results += trees.num_results
        stats = trees.engine.stats()
        preemptions += stats.num_preemptions
        tier_hits += stats.tiers.num_tier_hits
    assert results > 20
    assert preemptions > 0
    assert tier_hits > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_a_thousand_random_trees(name: str) -> None:
    for seed in range(100, 1100):
        Trees(MODELS[name](), seed).run(60)


# -- memory and work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "delta"])
def test_forks_cost_no_blocks_and_compute_only_what_is_new(name: str) -> None:
    model = MODELS[name]()
    states = 24 if model.config.recurrent is not None else 0
    engine = make_engine(model, kernels=kernels(), enable_prefix_caching=False, num_states=states)
    owner, root = opened(engine, PROMPT)
    assert engine.stats().num_prefill_tokens == len(PROMPT) - 1
    used = engine.blocks.num_used_blocks
    forks = [owner.fork(root) for _ in range(50)]
    assert engine.blocks.num_used_blocks == used
    for number, fork in enumerate(forks[:3]):
        owner.append(fork, [5 + number])
        request = generated(engine, owner, fork, GREEDY)
        assert outcome(request) == outcome(run_alone(model, [*PROMPT, 5 + number], GREEDY))
    assert engine.stats().num_prefill_tokens == len(PROMPT) - 1 + 3 * 2  # the root's last token and the appended one
    for branch in [*forks[1:], root]:
        owner.close(branch)
    kept = forks[0].num_tokens
    assert engine.blocks.num_used_blocks == engine.blocks.blocks_for(kept - 1)
    owner.close(forks[0])
    assert engine.blocks.num_used_blocks == 0


def test_a_fork_of_a_long_context_copies_nothing() -> None:
    """64 forks share one list of tokens and one table; their memory does not grow with the context."""
    sizes = []
    for length in (20, 190):
        engine = make_engine(kernels=kernels(), num_blocks=60, max_model_len=200, token_budget=200, chunk_size=200)
        owner, root = opened(engine, random_prompt(length, 3, 61))
        tables = engine.blocks.num_used_blocks
        owner.fork(root)
        tracemalloc.start()
        forks = [owner.fork(root) for _ in range(64)]
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert all(fork.trunk is root.trunk and fork.tail == root.tail for fork in forks)
        assert engine.blocks.num_used_blocks == tables
        assert forks[7].token_ids == root.token_ids
    assert abs(sizes[1] - sizes[0]) < 64 * 8  # less than one reference for each fork


def test_a_dropped_trunk_is_computed_again_with_the_same_bits() -> None:
    engine = make_engine(kernels=kernels(), enable_prefix_caching=False)
    owner, root = opened(engine, PROMPT)
    first = generated(engine, owner, root, GREEDY)
    fork = owner.fork(root)
    owner.truncate(fork, len(PROMPT))
    while engine.batcher.drop_kept():
        pass
    assert engine.blocks.num_used_blocks == 0
    assert outcome(generated(engine, owner, fork, GREEDY)) == outcome(first)


# -- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"temperature": 0.9}, {"temperature": 0.8, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0.7, "dry_multiplier": 0.9, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
])  # fmt: skip
def test_an_answer_in_parts_is_the_answer_in_one_call(options: dict[str, object]) -> None:
    """Noise, penalties and stop conditions read the whole answer, however many calls make it."""
    engine = make_engine(kernels=kernels())
    owner, branch = opened(engine, PROMPT)
    options = {"ignore_eos": True, **options}
    whole = run_alone(tiny_loaded(), PROMPT, SamplingParams(max_tokens=12, seed=5, logprobs=0, **options))
    parts = [generated(engine, owner, branch, SamplingParams(max_tokens=n, seed=5, logprobs=0, **options))
             for n in (1, 4, 7)]  # fmt: skip
    tokens = [token for part in parts for token in part.sequences[0].new_token_ids]
    assert tokens == whole.sequences[0].output_token_ids
    records = b"".join(part.sequences[0].logprobs.packed(part.num_given) for part in parts)
    assert records == whole.sequences[0].logprobs.packed()
    assert branch.token_ids == [*PROMPT, *tokens]


def test_completions_behind_an_answer() -> None:
    """Several completions fork from a branch whose last token alone is missing."""
    engine = make_engine(kernels=kernels())
    owner, branch = opened(engine, PROMPT)
    generated(engine, owner, branch, GREEDY)
    known, params = branch.token_ids, SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=5)
    request = owner.generate(branch, "three", params, advances=False)
    drain(engine)
    assert outcome(request) == outcome(run_alone(tiny_loaded(), known, params, num_given=6))
    assert branch.token_ids == known


# -- refusals --------------------------------------------------------------------------------------------------------


def test_refusals_change_nothing() -> None:
    engine = make_engine(kernels=kernels())
    owner, branch = opened(engine, PROMPT)
    used, tokens = engine.blocks.num_used_blocks, branch.token_ids
    with pytest.raises(EmptyPromptError, match="at least one token"):
        owner.open([])
    with pytest.raises(EmptyPromptError, match="continuation is empty"):
        owner.score(branch, "score", [])
    with pytest.raises(RequestError, match="cannot be truncated to 0"):
        owner.truncate(branch, 0)
    with pytest.raises(RequestError, match="fork it first"):
        owner.generate(branch, "many", SamplingParams(n=2), advances=True)
    with pytest.raises(RequestError, match=r"call score\(\)"):
        owner.generate(branch, "scored", SamplingParams(prompt_logprobs=1), advances=True)
    with pytest.raises(PromptTooLongError):
        owner.score(branch, "long", [3] * 200)
    assert (engine.blocks.num_used_blocks, branch.token_ids, branch.changing) == (used, tokens, None)
    owner.generate(branch, "busy", GREEDY, advances=True)
    with pytest.raises(RequestError, match="being continued"):
        owner.append(branch, [4])
    owner.close(owner.open([3]))
    engine.abort("busy")
    drain(engine)


def test_a_branch_that_is_closed_while_it_generates_leaves_nothing() -> None:
    engine = make_engine(kernels=kernels())
    owner, branch = opened(engine, PROMPT)
    request = owner.generate(branch, "late", GREEDY, advances=True)
    engine.step()
    owner.close(branch)
    drain(engine)
    owner.generated(branch, request)
    assert engine.blocks.num_used_blocks == 0
    with pytest.raises(RequestError, match="is closed"):
        owner.fork(branch)


def test_abandoned_branches_are_released_by_the_next_operation() -> None:
    engine = make_engine(kernels=kernels())
    owner, branch = opened(engine, PROMPT)
    owner.abandon(branch)
    other = owner.open([int(token) for token in np.arange(3, 9)])
    computed(engine, owner, other)
    owner.close(other)
    assert engine.blocks.num_used_blocks == 0
