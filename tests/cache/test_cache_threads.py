"""Eight threads on the public verbs: nothing is lost, nothing leaks, nobody meets another's blocks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from bifolio.cache import BeamSearchBlockSharing, BlockShareManager, KVCacheBlockManager, SpeculativeDecodingSharing
from bifolio.errors import OutOfBlocksError

pytestmark = pytest.mark.full

NUM_THREADS = 8
PROMPT = list(range(24))  # common to all threads, so that they share cached blocks


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Threads give way inside the cache's own functions, at random, so that a missing lock shows."""
    rng = random.Random(0)

    def give_way(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "return") and "bifolio" in frame.f_code.co_filename and rng.random() < 0.1:
            time.sleep(0)

    threading.setprofile(give_way)
    yield
    threading.setprofile(None)  # type: ignore[arg-type]


def run_threads(work: Callable[[int], object], manager: KVCacheBlockManager) -> None:
    """`work` in eight threads that start together; afterwards nothing may be held."""
    run_together(work)
    manager.take_moves()
    manager.check_invariants()
    assert manager.sequence_ids() == []
    assert manager.num_free_blocks == manager.num_blocks - 1


def run_together(work: Callable[[int], object]) -> list[object]:
    barrier = threading.Barrier(NUM_THREADS)

    def start(number: int) -> object:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(start, range(NUM_THREADS)))


def test_eight_threads_on_the_verbs_lose_and_leak_nothing() -> None:
    manager = KVCacheBlockManager(60, 4)

    def work(number: int) -> None:
        rng = random.Random(number)
        lengths: dict[int, int] = {}
        for count in range(300):
            action = rng.choice(["open", "append", "append", "fork", "truncate", "release", "copies"])
            mine = list(lengths)
            if action == "open" or not mine:
                sequence_id = 1000 * number + count
                lengths[sequence_id] = manager.open_table(sequence_id, [*PROMPT, number, count])
            elif action == "append":
                sequence_id, num_tokens = rng.choice(mine), rng.randint(1, 9)
                if manager.try_append(sequence_id, num_tokens):
                    lengths[sequence_id] += num_tokens
            elif action == "fork" and len(mine) < 6:
                with manager.lock:  # copies of this row must not be pending
                    manager.take_moves()
                    manager.fork(mine[0], 1000 * number + 500 + count)
                lengths[1000 * number + 500 + count] = lengths[mine[0]]
            elif action == "truncate":
                sequence_id = rng.choice(mine)
                lengths[sequence_id] = rng.randint(0, lengths[sequence_id])
                manager.truncate(sequence_id, lengths[sequence_id])
            elif action == "release":
                sequence_id = rng.choice(mine)
                del lengths[sequence_id]
                manager.release(sequence_id)
            elif action == "copies":
                manager.take_moves()
            for sequence_id, length in lengths.items():
                assert manager.num_tokens_of(sequence_id) == length
                assert len(manager.block_ids_of(sequence_id)) == manager.blocks_for(length)
        for sequence_id in lengths:
            manager.release(sequence_id)

    run_threads(work, manager)


def test_eight_threads_committing_and_finding_the_same_prefix() -> None:
    manager = KVCacheBlockManager(40, 4)
    found = []

    def work(number: int) -> None:
        for count in range(100):
            sequence_id = 1000 * number + count
            tokens = [*PROMPT, number, count]
            held = manager.open_table(sequence_id, tokens)
            if manager.try_append(sequence_id, len(tokens) - held):
                manager.commit(sequence_id, tokens, len(tokens))
                found.append(held)
            manager.release(sequence_id)

    run_threads(work, manager)
    assert max(found) == 24
    assert manager.num_cached_blocks > 0


def test_concurrent_access_to_beams_and_drafts() -> None:
    manager = KVCacheBlockManager(60, 4)
    sharing = BlockShareManager(manager)

    def work(number: int) -> None:
        search = BeamSearchBlockSharing(sharing, 3)
        speculation = SpeculativeDecodingSharing(sharing, 5)
        for _ in range(40):
            base = manager.fresh_sequence_id()
            try:
                manager.allocate_blocks(base, 2)
            except OutOfBlocksError:
                continue
            beams = search.initialize_beams(base, 7)
            try:
                for beam in beams:
                    search.on_beam_divergence(beam, 7)
                speculation.allocate_speculative_blocks(beams[0], 8)
                speculation.verify_speculation(beams[0], number % 6)
            except OutOfBlocksError:
                pass
            assert sharing.get_stats().total_references >= 2
            search.cleanup_beams(beams)
            sharing.release_sequence(base)

    run_threads(work, manager)


def test_a_pool_that_is_fought_over_is_handed_out_exactly_once() -> None:
    manager = KVCacheBlockManager(2001, 4)
    taken: list[int] = []

    def take(number: int) -> None:
        while (block_id := manager.allocate_block(number)) is not None:
            taken.append(block_id)

    run_together(take)
    assert sorted(taken) == list(range(1, 2001))
    manager.check_invariants()
