"""Misuse of the public methods of the cache: a named error, and nothing has changed afterwards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bifolio.cache import (
    BeamSearchBlockSharing,
    BlockShareManager,
    KVCacheBlockManager,
    KvCacheEntry,
    SpeculativeDecodingSharing,
)
from bifolio.cache.table_states import StateRequest
from bifolio.errors import BifolioError, CacheError, ConfigError, PhaseError, UnknownSequenceError
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from helpers import kv_storage

SIZE = 4
NO_NUMBERS: list[Any] = [2.5, 1.0, True, np.bool_(True), None, "3", float("nan"), [], np.float32(1), object()]
NO_COUNTS: list[Any] = [*NO_NUMBERS, -99, 10**9]


class Scene:
    """A manager with tables that share blocks, cached prefixes, drafts, beams and an entry with room ahead of use."""

    def __init__(self, num_states: int = 0) -> None:
        self.blocks = blocks = KVCacheBlockManager(32, SIZE, num_states=num_states)
        self.storage = kv_storage(1, 32, SIZE, 1, 8)
        self.shares = BlockShareManager(blocks)
        self.prefill, self.decode = PrefillOrchestrator(blocks), DecodeOrchestrator(blocks)
        self.speculation = SpeculativeDecodingSharing(self.shares)
        self.search = BeamSearchBlockSharing(self.shares, 3)
        for sequence_id, length in ((1, 10), (2, 5)):
            blocks.open_table(sequence_id)
            blocks.append(sequence_id, length)
            blocks.commit(sequence_id, list(range(length)), length)
        self.first, self.second, self.third = self.search.initialize_beams(1, 6)
        blocks.fork(2, 3)
        self.speculation.allocate_speculative_blocks(2, 5, 3)
        self.entry = KvCacheEntry.open(self.storage, blocks, 9)
        self.entry.reserve(3)
        blocks.open_table(9)
        self.released = blocks.table(9)
        blocks.release(9)
        blocks.open_table(9)  # another sequence has the id now
        blocks.take_moves()

    def snapshot(self) -> Any:
        blocks = self.blocks
        found, pool = blocks._tables, blocks._pool
        tables = {i: (list(t.block_ids), t.num_tokens, list(t.chain), t.first_changed) for i, t in found.items()}
        infos = {i: (n.beam_index, n.base_sequence_id) for i, n in self.search._beam_infos.items()}
        drafts = {i: base for i, (_, base) in self.speculation._drafts.items()}
        free = (list(pool.blank), list(pool.evictable), list(pool.ref_counts), dict(pool.cached), dict(pool.moves))
        return tables, free, infos, drafts, self.entry.seq_len, self.entry.capacity, blocks._next_fresh_id


def calls(scene: Scene, bad: Any) -> dict[str, Callable[[], Any]]:
    """Every public method that changes state, with `bad` in place of each of its numbers."""
    blocks, shares, search, drafts = scene.blocks, scene.shares, scene.search, scene.speculation
    return {
        "open_table": lambda: blocks.open_table(bad),
        "open_table, limit": lambda: blocks.open_table(77, range(9), max_cached=bad),
        "open_table, tokens": lambda: blocks.open_table(77, [bad] * 9),
        "open_table, salt": lambda: blocks.open_table(77, (), salt=bad),
        "append": lambda: blocks.append(1, bad),
        "append, id": lambda: blocks.append(bad, 1),
        "try_append_many": lambda: blocks.try_append_many([(1, 1), (2, bad)]),
        "try_append_many, twice": lambda: blocks.try_append_many([(1, 5), (1, bad)]),
        "try_append_many, pairs": lambda: blocks.try_append_many([bad]),
        "try_append_each": lambda: blocks.try_append_each([1, bad]),
        "fork": lambda: blocks.fork(bad, 77),
        "fork, child": lambda: blocks.fork(1, bad),
        "truncate": lambda: blocks.truncate(1, bad),
        "release": lambda: blocks.release(bad),
        "share": lambda: blocks.share(bad, 77),
        "share, id": lambda: blocks.share(blocks.block_ids_of(1)[0], bad),
        "commit": lambda: blocks.commit(1, list(range(10)), bad),
        "commit, tokens": lambda: blocks.commit(scene.third, [0, 1, 2, 3, bad, 5, 6, 7], 8),
        "take_changes": lambda: blocks.take_changes([1, bad]),
        "allocate_blocks": lambda: blocks.allocate_blocks(1, bad),
        "allocate_blocks, id": lambda: blocks.allocate_blocks(bad, 1),
        "allocate": lambda: blocks.table(1).allocate(bad),
        "free": lambda: blocks.table(1).free([bad]),
        "free, list": lambda: blocks.table(1).free(bad),
        "lookup": lambda: blocks.table(1).lookup(bad),
        "cache_index": lambda: blocks.table(1).cache_index(0, bad),
        "blocks_needed": lambda: blocks.blocks_needed([(1, bad)]),
        "ref_count": lambda: blocks.ref_count(bad),
        "get_block": lambda: blocks.get_block(bad),
        "share_block": lambda: shares.share_block(blocks.block_ids_of(1)[0], [77, bad]),
        "initialize_beams": lambda: search.initialize_beams(1, bad),
        "initialize_beams, ids": lambda: search.initialize_beams(1, 6, [70, bad]),
        "reorder_beams": lambda: search.reorder_beams([scene.second], [(scene.first, 70), (bad, 71)]),
        "reorder_beams, child": lambda: search.reorder_beams([scene.second], [(scene.first, 70), (scene.third, bad)]),
        "reorder_beams, pairs": lambda: search.reorder_beams([scene.second], [bad]),
        "on_beam_divergence": lambda: search.on_beam_divergence(scene.first, bad),
        "cleanup_beams": lambda: search.cleanup_beams([scene.first, bad]),
        "allocate_speculative": lambda: drafts.allocate_speculative_blocks(1, 10, bad),
        "allocate_speculative, length": lambda: drafts.allocate_speculative_blocks(1, bad),
        "verify_speculation": lambda: drafts.verify_speculation(2, bad),
        "reserve": lambda: scene.entry.reserve(bad),
        "truncate of an entry": lambda: scene.entry.truncate(bad),
        "open of an entry": lambda: KvCacheEntry.open(scene.storage, blocks, bad),
        "append of an entry": lambda: scene.entry.append(bad, bad),
        "keys of an entry": lambda: scene.entry.keys(bad),
        "prefill_allocate_blocks": lambda: scene.prefill.prefill_allocate_blocks(77, bad),
        "allocate_decode_block": lambda: scene.decode.allocate_decode_block(1, bad),
        "reserve of decodes": lambda: scene.decode.reserve([1, bad]),
    }


ALLOWED = {  # (call, kind of the value) that are no misuse
    ("open_table", int), ("fork, child", int), ("allocate_blocks, id", int), ("initialize_beams, ids", int),
    ("open_table, limit", int), ("open_table, limit", type(None)), ("open_table, tokens", int),
    ("open_table, tokens", bool), ("open_table, tokens", np.bool_), ("commit, tokens", int), ("commit, tokens", bool),
    ("commit, tokens", np.bool_), ("reorder_beams, child", int), ("share, id", int), ("share_block", int),
    ("try_append_many", int), ("try_append_many, twice", int), ("blocks_needed", int),  # too many: an answer
    ("free, list", list), ("allocate_speculative", type(None)),
}  # fmt: skip


@pytest.mark.parametrize("name", calls(Scene(), 0))
def test_a_refused_call_changes_nothing(name: str) -> None:
    for bad in NO_COUNTS:
        scene = Scene()
        before = scene.snapshot()
        try:
            calls(scene, bad)[name]()
        except BifolioError as error:
            text, after = str(error), scene.snapshot()
        else:
            text, after = "", before
        assert after[:-1] == before[:-1], (name, bad)
        assert text or (name, type(bad)) in ALLOWED, (name, bad)
        scene.blocks.check_invariants()


def test_random_misuse_between_proper_calls() -> None:
    """The same scene goes on: what a refused call left behind would show in a later one."""
    rng = random.Random(5)
    scene = Scene()
    names = list(calls(scene, 0))
    for step in range(400):
        bad = rng.choice([*NO_COUNTS, 1, 2, 3, 7, scene.first, scene.second])
        with contextlib.suppress(BifolioError):
            calls(scene, bad)[rng.choice(names)]()
        scene.blocks.check_invariants()
        scene.blocks.run_moves([])
        if step % 20 == 19:
            scene = Scene()


@pytest.mark.parametrize("bad", [*NO_NUMBERS[:6], -1, 0])
def test_sizes_are_whole_numbers(bad: Any) -> None:
    shares = BlockShareManager(KVCacheBlockManager(8, SIZE))
    for make in (
        lambda: KVCacheBlockManager(bad, SIZE),
        lambda: KVCacheBlockManager(8, bad),
        lambda: BeamSearchBlockSharing(shares, bad),
        lambda: SpeculativeDecodingSharing(shares, bad),
    ):
        with pytest.raises(ConfigError):
            make()


def test_a_step_reserves_each_sequence_once() -> None:
    scene = Scene()
    with pytest.raises(CacheError, match="twice"):
        scene.decode.reserve([1, 1])
    scene.blocks.check_invariants()
    assert scene.blocks.num_tokens_of(1) == 10


def test_a_released_table_does_not_allocate_for_the_next_owner() -> None:
    scene = Scene()
    with pytest.raises(UnknownSequenceError, match="released"):
        scene.released.allocate(0)
    with pytest.raises(UnknownSequenceError, match="released"):
        scene.released.free([])
    assert scene.blocks.block_ids_of(9) == []


def test_an_entry_is_not_truncated_to_more_than_it_holds() -> None:
    scene = Scene()
    for length in (4, 9, 10):
        with pytest.raises(CacheError):
            scene.entry.truncate(length)
    assert (scene.entry.seq_len, scene.entry.capacity) == (3, 9)


def test_beams_are_reordered_all_or_none() -> None:
    scene = Scene()
    before = scene.snapshot()
    for forks in ([(scene.first, 70), (scene.first, scene.third)], [(scene.first, 70), (scene.first, 70)]):
        with pytest.raises(CacheError):
            scene.search.reorder_beams([scene.second], forks)
        assert scene.snapshot() == before
    scene.search.reorder_beams([scene.second], [(scene.first, scene.second)])
    scene.blocks.check_invariants()


def test_every_beam_has_an_index_of_its_own() -> None:
    rng, scene = random.Random(1), Scene()
    beams = [scene.first, scene.second, scene.third]
    for _ in range(24):
        parent = rng.choice(beams)
        dropped = [beam for beam in beams if beam != parent and rng.random() < 0.6]
        scene.search.reorder_beams(dropped, [(parent, beam) for beam in dropped])
        infos = [scene.search.get_beam_info(beam) for beam in beams]
        assert sorted(info.beam_index for info in infos if info is not None) == [0, 1, 2]
        scene.blocks.check_invariants()


def test_queries_without_a_range_are_named() -> None:
    scene = Scene()
    query: Any = np.zeros((2, 1, 8), np.float32)
    kernel: Any = None
    for ranges in ({}, {1: (0,)}, {1: (0.0, 2.0)}, {1: (-1, 1)}, {1: None}):
        with pytest.raises(PhaseError):
            scene.prefill.batch_prefill({1: query}, ranges, kernel)  # type: ignore[arg-type]
    for lengths in ({}, {1: -1}, {1: 1.5}):
        with pytest.raises(PhaseError):
            scene.decode.batch_decode({1: query}, lengths, kernel)  # type: ignore[arg-type]


def test_states_are_used_once_for_each_sequence() -> None:
    blocks = KVCacheBlockManager(32, SIZE, num_states=8)
    blocks.open_table(1)
    blocks.append(1, 8)
    for requests in ([StateRequest(1, 0, 4)] * 2, [StateRequest(7, 0, 1)], [StateRequest(1, 0, 2.0)],
                     [StateRequest(1, 0, 0)], [StateRequest(1, 0, 2, 2)]):  # type: ignore[list-item]  # fmt: skip
        with pytest.raises(CacheError):
            blocks.use_states(requests)
        blocks.check_invariants()
