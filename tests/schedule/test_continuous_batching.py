"""Requests join and leave the running batch between any two steps: the batcher alone, and inside an engine."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.errors import ConfigError, PhaseError, RequestError
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.batcher import ContinuousBatcher
from bifolio.schedule.plan import BatchSlot
from bifolio.sequence import FinishReason, Request, RequestPhase, Sequence, StepResult
from helpers import drain, make_engine, output_ids, random_prompt, run_alone, steps

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def new_request(blocks: KVCacheBlockManager, number: int, length: int = 5, n: int = 1, priority: int = 0) -> Request:
    prompt = random_prompt(length, seed=number, vocab_size=61)
    request = Request(f"r{number}", number, prompt, SamplingParams(n=n), 0, priority=priority, max_tokens=16)
    for index in range(n):
        parent = request.sequences[0] if index else None
        sequence_id = blocks.fresh_sequence_id()
        request.sequences.append(Sequence(sequence_id, request, index, list(prompt), length, 0, parent=parent))
    return request


def new_batcher(max_slots: int = 3, num_blocks: int = 64) -> tuple[ContinuousBatcher, KVCacheBlockManager]:
    blocks = KVCacheBlockManager(num_blocks, 4)
    return ContinuousBatcher(max_slots, blocks), blocks


def running(batcher: ContinuousBatcher) -> list[str | None]:
    return [slot.request_id for slot in batcher.active_slots()]


# -- the batcher alone -----------------------------------------------------------------------------------------------


def test_continuous_admits_to_free_slots() -> None:
    batcher, blocks = new_batcher(max_slots=3)
    requests = [new_request(blocks, i) for i in range(5)]
    for request in requests:
        batcher.add(request)
    assert (batcher.num_waiting, batcher.num_running) == (5, 0)
    admitted = batcher.admit_pending()
    assert [sequence.request.request_id for sequence in admitted] == ["r0", "r1", "r2"]
    assert [slot.index for slot in batcher.active_slots()] == [0, 1, 2]
    assert (batcher.num_waiting, batcher.num_running) == (2, 3)
    assert all(blocks.has_table(sequence.id) for sequence in admitted)


def test_continuous_evicts_on_complete() -> None:
    batcher, blocks = new_batcher(max_slots=2)
    requests = [new_request(blocks, i) for i in range(3)]
    for request in requests:
        batcher.add(request)
    batcher.admit_pending()
    blocks.append(requests[0].sequences[0].id, 5)
    requests[0].sequences[0].finish_reason = FinishReason.STOP
    assert [sequence.request.request_id for sequence in batcher.evict_completed()] == ["r0"]
    assert blocks.num_used_blocks == 0
    batcher.admit_pending()
    assert running(batcher) == ["r2", "r1"]  # the freed slot is taken; nobody else moves


def test_continuous_respects_max_slots() -> None:
    batcher, blocks = new_batcher(max_slots=3)
    rng = np.random.default_rng(0)
    for number in range(40):
        batcher.add(new_request(blocks, number, n=int(rng.integers(1, 4))))
        batcher.admit_pending()
        assert batcher.num_running <= 3
        assert len(batcher.active_slots()) == batcher.num_running
        for slot in batcher.active_slots():
            if rng.random() < 0.4:
                slot.held.finish_reason = FinishReason.LENGTH
        batcher.evict_completed()
    assert len(batcher.slots) == 3  # slots are permanent


def test_a_request_of_more_sequences_than_slots_is_refused() -> None:
    batcher, blocks = new_batcher(max_slots=3)
    with pytest.raises(RequestError, match="max_num_seqs >= 4"):
        batcher.add(new_request(blocks, 0, n=4))


def test_siblings_get_their_slots_together_or_wait() -> None:
    batcher, blocks = new_batcher(max_slots=3)
    batcher.add(new_request(blocks, 0, n=2))
    batcher.add(new_request(blocks, 1, n=2))
    batcher.admit_pending()
    assert running(batcher) == ["r0", "r0"]
    assert batcher.slots[0].sample_slots == (0, 1)


def test_a_full_queue_refuses() -> None:
    blocks = KVCacheBlockManager(64, 4)
    batcher = ContinuousBatcher(1, blocks, max_waiting=2)
    for number in range(2):
        batcher.add(new_request(blocks, number))
    with pytest.raises(RequestError, match="try again later"):
        batcher.add(new_request(blocks, 2))


def test_priority_goes_first_then_order_of_arrival() -> None:
    batcher, blocks = new_batcher(max_slots=4)
    for number, priority in enumerate([1, 0, 1, -3]):
        batcher.add(new_request(blocks, number, priority=priority))
    assert [sequence.request.request_id for sequence in batcher.admit_pending()] == ["r3", "r1", "r0", "r2"]


def test_preemption_gives_back_row_and_slot_and_keeps_the_place_in_line() -> None:
    batcher, blocks = new_batcher(max_slots=2)
    first, second = new_request(blocks, 0), new_request(blocks, 1)
    batcher.add(first)
    batcher.admit_pending()
    blocks.append(first.sequences[0].id, 5)
    first.sequences[0].num_computed = 5
    batcher.preempt(first.sequences[0])
    assert (batcher.num_running, blocks.num_used_blocks, first.sequences[0].num_computed) == (0, 0, 0)
    assert first.metrics.num_preemptions == 1
    batcher.add(second)
    assert [sequence.request.request_id for sequence in batcher.admit_pending()] == ["r0", "r1"]


def test_nobody_is_admitted_whose_blocks_are_not_there() -> None:
    batcher, blocks = new_batcher(max_slots=3, num_blocks=8)
    batcher.add(new_request(blocks, 0, length=20))
    batcher.admit_pending()
    blocks.append(batcher.slots[0].held.id, 20)
    batcher.add(new_request(blocks, 1, length=12))
    assert batcher.admit_pending() == []
    assert running(batcher) == ["r0"]
    assert blocks.sequence_ids() == [batcher.slots[0].held.id]  # the one who was tried holds nothing


@pytest.mark.parametrize("already", [0, 1, 3])
def test_prompts_that_come_together_are_counted_together(already: int) -> None:
    """Seven prompts of five blocks each in a cache for four, some of them admitted a step before: nothing of theirs is
    reserved yet, and their blocks are spoken for all the same."""
    batcher, blocks = new_batcher(max_slots=8, num_blocks=4 * 5 + 1)
    for number in range(already):
        batcher.add(new_request(blocks, number, length=20))
    assert len(batcher.admit_pending()) == already
    for number in range(already, 7):
        batcher.add(new_request(blocks, number, length=20))
    assert len(batcher.admit_pending()) == 4 - already
    assert blocks.num_free_blocks == 4 * 5
    assert blocks.try_append_many([(slot.held.id, 20) for slot in batcher.active_slots()])  # all four can go on


def test_step_admits_runs_and_evicts() -> None:
    batcher, blocks = new_batcher(max_slots=1)
    requests = [new_request(blocks, 0), new_request(blocks, 1)]
    for request in requests:
        batcher.add(request)

    def run_iteration(slots: list[BatchSlot]) -> list[StepResult]:
        results = []
        for slot in slots:
            slot.held.finish_reason = FinishReason.LENGTH
            results.append(StepResult(slot.held.request.request_id, 5, True, FinishReason.LENGTH))
        return results

    assert [result.request_id for result in batcher.step(run_iteration)] == ["r0"]
    assert batcher.num_running == 0
    assert [result.request_id for result in batcher.step(run_iteration)] == ["r1"]


def test_a_slot_reads_what_it_shows_from_its_sequence() -> None:
    slot = BatchSlot(4)
    assert (slot.request_id, slot.phase, slot.tokens_generated, slot.max_tokens) == (None, None, 0, 0)
    with pytest.raises(PhaseError, match="slot 4 is empty"):
        _ = slot.held
    request = new_request(KVCacheBlockManager(4, 4), 9)
    slot.sequence = request.sequences[0]
    slot.sequence.append_token(3)
    assert (slot.request_id, slot.phase, slot.tokens_generated, slot.max_tokens) == ("r9", RequestPhase.PREFILL, 1, 16)


# -- inside an engine ------------------------------------------------------------------------------------------------


def test_continuous_prefill_then_decode() -> None:
    engine = make_engine(chunk_size=4, token_budget=8)
    request = engine.add_request("r", random_prompt(9, vocab_size=61), GREEDY)
    sequence = request.sequences[0]
    seen = [(sequence.phase, sequence.num_computed, len(sequence.output_token_ids)) for _ in steps(engine)]
    prefill, decode, complete = RequestPhase.PREFILL, RequestPhase.DECODE, RequestPhase.COMPLETE
    assert seen == [
        (prefill, 4, 0),
        (prefill, 8, 0),
        (decode, 9, 1),
        (decode, 10, 2),
        (decode, 11, 3),
        (decode, 12, 4),
        (decode, 13, 5),
        (complete, 14, 6),
    ]


def test_continuous_interleaved_requests() -> None:
    """One that joins mid-batch gets its first token while the others go on, and ends with the tokens it has alone."""
    engine = make_engine(max_num_seqs=3)
    prompts = {
        name: random_prompt(length, seed=length, vocab_size=61) for name, length in zip("abc", (7, 3, 12), strict=True)
    }
    params = {
        name: SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for name, count in zip("abc", (12, 4, 9), strict=True)
    }
    requests = {name: engine.add_request(name, prompts[name], params[name]) for name in "ab"}
    for _ in range(3):
        engine.step()
    requests["c"] = engine.add_request("c", prompts["c"], params["c"])
    results = engine.step()
    assert {result.request_id for result in results} == {"a", "b", "c"}  # decodes and a prefill in one step
    drain(engine)
    for name in "abc":
        assert output_ids(requests[name]) == output_ids(run_alone(prompts[name], params[name]))


@pytest.mark.full
def test_sixteen_concurrent_requests_of_mixed_lengths() -> None:
    engine = make_engine(max_num_seqs=16, num_blocks=256, token_budget=40, chunk_size=16)
    rng = np.random.default_rng(5)
    jobs = []
    for i in range(40):
        prompt = random_prompt(int(rng.integers(1, 40)), seed=i, vocab_size=61)
        params = SamplingParams(temperature=0.8, seed=i, max_tokens=int(rng.integers(1, 24)), ignore_eos=True)
        jobs.append((prompt, params))
    requests = [engine.add_request(str(i), prompt, params) for i, (prompt, params) in enumerate(jobs)]
    most_running = most_decoding = 0
    for results in steps(engine):
        most_running = max(most_running, engine.batcher.num_running)
        most_decoding = max(most_decoding, len(results))
        assert engine.batcher.num_running <= 16
    assert (most_running, most_decoding) == (16, 16)
    for (prompt, params), request in zip(jobs, requests, strict=True):
        assert output_ids(request) == output_ids(run_alone(prompt, params))
        assert request.sequences[0].finish_reason is FinishReason.LENGTH
    assert engine.blocks.num_used_blocks == 0


def test_decodes_go_before_prefills_and_the_budget_holds() -> None:
    engine = make_engine(max_num_seqs=4, token_budget=6, chunk_size=32)
    engine.add_request("short", random_prompt(2, vocab_size=61), GREEDY)
    engine.step()
    engine.add_request("long", random_prompt(30, seed=1, vocab_size=61), GREEDY)
    honest, plans = engine.launch, []

    def spy(plan):  # type: ignore[no-untyped-def]
        plans.append(plan)
        return honest(plan)

    engine.launch = spy  # type: ignore[method-assign]
    drain(engine)
    assert all(plan.num_tokens <= 6 for plan in plans)
    mixed = [plan for plan in plans if plan.decodes and plan.prefills]
    assert [(plan.decodes[0].num_new, plan.prefills[0].num_new) for plan in mixed][:2] == [(1, 5), (1, 5)]
    for plan in plans:
        for item in plan.prefills:  # a chunk samples only when it reaches the end of what is known
            assert bool(item.sample_slots) == (item.start + item.num_new == len(item.sequence.request.prompt_token_ids))


def test_the_youngest_of_the_lowest_priority_is_preempted_and_still_finishes() -> None:
    engine = make_engine(num_blocks=9, max_model_len=28, max_num_seqs=3)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    prompts = [random_prompt(6, seed=i, vocab_size=61) for i in range(3)]
    priorities = [0, -1, 0]
    requests = [
        engine.add_request(str(i), prompt, params, priority=priority)
        for i, (prompt, priority) in enumerate(zip(prompts, priorities, strict=True))
    ]
    finished = []
    for results in steps(engine):
        finished += [result.request_id for result in results if result.finished]
    assert requests[1].metrics.num_preemptions == 0
    assert requests[2].metrics.num_preemptions > 0
    assert finished == ["1", "0", "2"]
    assert engine.stats().num_preemptions == sum(request.metrics.num_preemptions for request in requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert output_ids(request) == output_ids(run_alone(prompt, params))


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    """Requests with one long prompt that arrive together compute it once."""
    shared = random_prompt(61, 9, 61)
    engine = make_engine(num_blocks=400, max_model_len=120, max_num_seqs=8, chunk_size=16, token_budget=32)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    requests = [engine.add_request(str(i), [*shared, 3 + i], params) for i in range(6)]
    other = engine.add_request("other", random_prompt(20, 4, 61), params)
    drain(engine)
    for request in [*requests, other]:
        assert output_ids(request) == output_ids(run_alone(request.prompt_token_ids, params))
    assert sum(request.metrics.num_cached_tokens for request in requests[1:]) == 5 * 60
    assert engine.stats().num_prefill_tokens == 62 + 5 * 2 + 20


@pytest.mark.parametrize("count", [0, -3])
def test_a_batch_has_at_least_one_slot(count: int) -> None:
    with pytest.raises(ConfigError, match="max_slots must be at least 1"):
        ContinuousBatcher(count, KVCacheBlockManager(4, 4))
