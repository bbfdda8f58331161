"""Kept conversations: branch one without recomputing what it holds."""

from __future__ import annotations

import pytest

from bifolio.errors import RequestError
from bifolio.sampling_params import SamplingParams
from helpers import drain, make_engine, output_ids, random_prompt, run_alone

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = random_prompt(21, 4, 61)


def test_branches_equal_fresh_requests_and_compute_only_what_is_new() -> None:
    engine = make_engine(enable_prefix_caching=False)
    first = engine.add_request("talk", PROMPT, GREEDY)
    assert engine.keep("talk")
    drain(engine)
    held = PROMPT + output_ids(first)[0]
    computed = engine.stats().num_prefill_tokens
    turns = [[3, 4, 5], [6], [7, 8]]
    branches = [engine.fork("talk", f"branch {i}", turn, GREEDY) for i, turn in enumerate(turns)]
    drain(engine)
    for turn, branch in zip(turns, branches, strict=True):
        assert output_ids(branch) == output_ids(run_alone([*held, *turn], GREEDY))
    # the last token of the conversation was never computed; everything before it was
    assert engine.stats().num_prefill_tokens - computed == sum(len(turn) + 1 for turn in turns)
    assert engine.blocks.num_used_blocks > 0
    assert engine.release("talk")
    assert engine.blocks.num_used_blocks == 0
    engine.blocks.check_invariants()


def test_branches_of_several_samples() -> None:
    engine = make_engine()
    engine.add_request("talk", PROMPT, GREEDY)
    engine.keep("talk")
    drain(engine)
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=6, ignore_eos=True)
    branch = engine.fork("talk", "three", [9], params)
    drain(engine)
    assert output_ids(branch) == output_ids(run_alone(branch.prompt_token_ids, params))


def test_kept_conversations_make_way() -> None:
    """They are a convenience: requests that run never wait or fail for them."""
    engine = make_engine(num_blocks=34, block_size=4, max_model_len=128)
    for name in ("old", "new"):
        engine.add_request(name, random_prompt(30, len(name), 61), GREEDY)
        engine.keep(name)
        drain(engine)
    assert engine.blocks.num_used_blocks > 0
    big = engine.add_request("big", random_prompt(100, 5, 61), SamplingParams(temperature=0, max_tokens=20))
    drain(engine)
    assert (
        big.sequences[0].output_token_ids == run_alone(big.prompt_token_ids, big.params).sequences[0].output_token_ids
    )
    with pytest.raises(RequestError, match="send all of it"):
        engine.fork("old", "late", [3], GREEDY)


def test_a_branch_that_is_refused_leaves_nothing_behind() -> None:
    engine = make_engine(max_waiting=0)
    engine.batcher.max_waiting = None
    engine.add_request("talk", PROMPT, GREEDY)
    engine.keep("talk")
    drain(engine)
    used = engine.blocks.num_used_blocks
    engine.batcher.max_waiting = 0
    with pytest.raises(RequestError, match="waiting"):
        engine.fork("talk", "no room", [3], GREEDY)
    assert engine.blocks.num_used_blocks == used
    engine.release("talk")
    assert engine.blocks.num_used_blocks == 0


def test_unknown_and_aborted_conversations() -> None:
    engine = make_engine()
    assert not engine.keep("nobody")
    assert not engine.release("nobody")
    engine.add_request("gone", PROMPT, GREEDY)
    engine.keep("gone")
    engine.step()
    engine.abort("gone")
    drain(engine)
    assert engine.blocks.num_used_blocks == 0
    with pytest.raises(RequestError, match="no conversation"):
        engine.fork("gone", "x", [3], GREEDY)


def test_of_several_samples_one_is_kept() -> None:
    engine = make_engine()
    engine.add_request("talk", PROMPT, SamplingParams(temperature=0.9, seed=2, n=3, max_tokens=5, ignore_eos=True))
    engine.keep("talk")
    drain(engine)
    assert engine.release("talk")
    assert engine.blocks.num_used_blocks == 0


def test_a_branch_that_is_aborted_before_it_runs_gives_its_blocks_back() -> None:
    engine = make_engine(max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("first", random_prompt(9, vocab_size=61), params)
    engine.keep("first")
    drain(engine)
    held = engine.blocks.num_used_blocks
    engine.add_request("busy", random_prompt(5, seed=1, vocab_size=61), params)
    engine.step()
    engine.fork("first", "branch", [5, 6], params)
    engine.abort("branch")
    drain(engine)
    assert engine.blocks.num_used_blocks == held
    engine.release("first")
    assert engine.blocks.num_used_blocks == 0
    engine.blocks.check_invariants()
