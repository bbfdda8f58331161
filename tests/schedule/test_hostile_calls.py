"""Misuse of the batcher and the planner: a named error, and nothing has changed afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from bifolio.cache import KVCacheBlockManager
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import BifolioError, ConfigError, PhaseError, RequestError
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.batcher import ContinuousBatcher
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.phases import PhaseManager
from helpers import drain, make_engine, random_prompt

NO_NUMBERS: list[Any] = [2.5, 1.0, True, "3", float("nan"), [], object()]


def running(count: int = 2) -> InferenceEngine:
    """An engine whose requests decode, with one more that waits."""
    engine = make_engine(max_num_seqs=count)
    for number in range(count + 1):
        engine.add_request(str(number), random_prompt(6, number, 61), SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    return engine


def snapshot(engine: InferenceEngine) -> Any:
    batcher, blocks = engine.batcher, engine.blocks
    slots = [(slot.index, slot.sequence, slot.sample_slots) for slot in batcher.slots]
    tables = {i: (list(t.block_ids), t.num_tokens) for i, t in blocks._tables.items()}
    return slots, batcher.waiting_in_order(), list(batcher._free), tables, blocks.num_free_blocks


@pytest.mark.parametrize("budget", [*NO_NUMBERS, None, -1])
def test_a_budget_is_a_whole_number(budget: Any) -> None:
    engine = running()
    before = snapshot(engine)
    with pytest.raises(PhaseError):
        engine.phases.plan(engine.batcher.active_slots(), budget)
    first = engine.batcher.active_slots()[0].held
    with pytest.raises(PhaseError):
        engine.phases.plan(engine.batcher.active_slots(), 64, {first.id: budget})
    assert snapshot(engine) == before
    engine.blocks.check_invariants()


def test_a_sequence_is_queued_once() -> None:
    engine = running()
    runs, waits = engine.requests["0"], engine.requests["2"]
    before = snapshot(engine)
    for request in (runs, waits):
        with pytest.raises(RequestError, match="once"):
            engine.batcher.add(request)
        with pytest.raises(RequestError, match="once"):
            engine.batcher.wait(request.sequences[0])
    with pytest.raises(RequestError, match="no slot"):
        engine.batcher.preempt(waits.sequences[0])
    with pytest.raises(RequestError, match="does not wait"):
        engine.batcher.admit_now(runs.sequences[0])
    with pytest.raises(RequestError, match="slot each"):
        engine.batcher.fork(runs.sequences[0], waits.sequences[0])
    assert snapshot(engine) == before
    drain(engine)
    engine.blocks.check_invariants()
    with pytest.raises(RequestError, match="once"):
        engine.batcher.add(runs)  # it has ended
    waits.sequences.clear()
    with pytest.raises(RequestError, match="no sequences"):
        engine.batcher.add(waits)


def test_a_preempted_sequence_waits_once() -> None:
    engine = running()
    sequence = engine.requests["1"].sequences[0]
    engine.batcher.preempt(sequence)
    with pytest.raises(RequestError):
        engine.batcher.preempt(sequence)
    assert engine.batcher.waiting_in_order().count(sequence) == 1
    drain(engine)
    engine.blocks.check_invariants()


@pytest.mark.parametrize("bad", [*NO_NUMBERS, -1, 0])
def test_sizes_are_whole_numbers(bad: Any) -> None:
    blocks = KVCacheBlockManager(8, 4)
    orchestrators = PrefillOrchestrator(blocks), DecodeOrchestrator(blocks)
    with pytest.raises(ConfigError):
        ContinuousBatcher(bad, blocks)
    with pytest.raises(ConfigError):
        PhaseManager(*orchestrators, chunk_size=bad)
    with pytest.raises(ConfigError):
        ContinuousBatcher(1, blocks).max_running = bad
    if bad != 0:
        with pytest.raises(ConfigError):
            ContinuousBatcher(1, blocks, max_waiting=bad)


def test_unknown_sequences_have_no_phase() -> None:
    phases = running().phases
    for bad in (*NO_NUMBERS, None, 10**9):
        with pytest.raises(BifolioError):
            phases.get_phase(bad)
