"""Slots and prefill are shared between owners: a client that holds every slot yields to one that waits."""

from __future__ import annotations

from typing import Any

import pytest

from bifolio import BeamSearchParams, SamplingParams
from bifolio.engine.engine import InferenceEngine
from bifolio.schedule import shares
from bifolio.schedule.shares import prefill_quotas
from helpers import drain, make_engine, output_ids, random_prompt, run_alone


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "PATIENCE", 0.0)
    monkeypatch.setattr(shares, "INTERVAL", 0.0)


def params(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **options)


def busy_engine(launch_ahead: int = 0, **options: Any) -> InferenceEngine:
    """Four slots, all taken by one owner for a long time."""
    engine = make_engine(max_num_seqs=4, max_model_len=100, num_blocks=200, launch_ahead=launch_ahead, **options)
    for number in range(4):
        prompt = random_prompt(6, seed=number, vocab_size=61)
        engine.add_request(f"long{number}", prompt, params(60), owner="busy")
    for _ in range(8):
        engine.step()
    return engine


@pytest.mark.full
@pytest.mark.parametrize("launch_ahead", [0, 1])
@pytest.mark.parametrize("prefix", [True, False])
def test_another_owner_gets_a_slot_and_no_output_changes(prefix: bool, launch_ahead: int) -> None:
    engine = busy_engine(launch_ahead, enable_prefix_caching=prefix)
    running = dict(engine.requests)
    short = engine.add_request("short", random_prompt(5, seed=9, vocab_size=61), params(4), owner="other")
    for _ in range(12):
        engine.step()
    assert short.is_finished
    assert not any(request.is_finished for request in running.values())
    drain(engine)
    for request in (*running.values(), short):
        assert output_ids(request) == output_ids(run_alone(request.prompt_token_ids, request.params))
    assert engine.blocks.num_used_blocks == 0


@pytest.mark.parametrize("owners", [("busy", "busy"), ("busy", ""), ("", "other")])
def test_no_slot_is_yielded_within_an_owner_or_without_one(owners: tuple[str, str]) -> None:
    engine = make_engine(max_num_seqs=2, max_model_len=100, num_blocks=200)
    for number in range(2):
        engine.add_request(f"long{number}", [5, 6, number + 7], params(40), owner=owners[0])
    for _ in range(6):
        engine.step()
    engine.add_request("short", [8, 9], params(2), owner=owners[1])
    drain(engine)
    assert engine.stats().num_preemptions == 0


def test_owners_with_one_slot_each_do_not_yield() -> None:
    engine = make_engine(max_num_seqs=2, max_model_len=100, num_blocks=200)
    for number in range(4):
        engine.add_request(f"r{number}", [5, 6, number + 7], params(20), owner=f"owner{number}")
    drain(engine)
    assert engine.stats().num_preemptions == 0


def test_a_beam_search_yields_as_a_whole_and_ends_as_it_would_alone() -> None:
    search = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
    alone = make_engine(max_num_seqs=4, num_blocks=200)
    expected = alone.add_beam_search("alone", [5, 6, 7], search)
    drain(alone)
    engine = make_engine(max_num_seqs=4, num_blocks=200)
    found = engine.add_beam_search("search", [5, 6, 7], search, owner="busy")
    for _ in range(6):
        engine.step()
    for number in range(6):  # one after the other: the search must get on between them
        short = engine.add_request(f"short{number}", [8, 9], params(2), owner="other")
        while not short.is_finished:
            engine.step()
    drain(engine)
    assert engine.stats().num_preemptions > 0
    assert output_ids(found) == output_ids(expected)


def test_prompts_of_two_owners_are_computed_side_by_side() -> None:
    engine = make_engine(max_num_seqs=4, max_model_len=120, num_blocks=200, token_budget=16, chunk_size=16)
    for number in range(3):
        prompt = random_prompt(100, seed=number, vocab_size=61)
        engine.add_request(f"long{number}", prompt, params(2), owner="busy")
    engine.step()
    short = engine.add_request("short", random_prompt(12, seed=7, vocab_size=61), params(1), owner="other")
    for _ in range(4):
        engine.step()
    assert short.is_finished


def test_quotas_fill_the_budget() -> None:
    engine = make_engine(max_num_seqs=4, max_model_len=120, num_blocks=200)
    for name, length, owner in (("a", 90, "x"), ("b", 90, "x"), ("c", 5, "y"), ("d", 60, "z")):
        engine.add_request(name, random_prompt(length, seed=ord(name), vocab_size=61), params(1), owner=owner)
    engine.batcher.admit_pending()
    quotas = prefill_quotas(engine.batcher.active_slots(), 45)
    named = [(slot.held.request.request_id, quota) for slot, quota in quotas]
    assert named == [("c", 5), ("d", 20), ("a", 20), ("b", 45)]


def test_a_prompt_that_waits_for_a_prefix_holds_up_no_other_owner() -> None:
    engine = make_engine(max_num_seqs=4, max_model_len=120, num_blocks=200, token_budget=16, chunk_size=16)
    prompt = random_prompt(100, seed=1, vocab_size=61)
    for name in ("first", "same"):
        engine.add_request(name, prompt, params(2), owner="busy")
    engine.step()
    short = engine.add_request("short", random_prompt(5, seed=2, vocab_size=61), params(1), owner="other")
    for _ in range(3):
        engine.step()
    assert short.is_finished
    drain(engine)
    assert engine.batcher.num_cached_tokens > 90  # the second was not computed again
