"""Sharing between sequences: reference counts, beams, drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bifolio.cache import (
    BeamInfo,
    BeamSearchBlockSharing,
    BlockShareManager,
    KVCacheBlockManager,
    ShareStats,
    SpeculativeDecodingSharing,
)
from bifolio.errors import CacheError, ConfigError, OutOfBlocksError, UnknownSequenceError
from helpers import kv_storage


def make(num_tokens: int = 10, num_blocks: int = 33) -> tuple[BlockShareManager, KVCacheBlockManager]:
    """Sequence 1 with `num_tokens` tokens in blocks of 4."""
    manager = KVCacheBlockManager(num_blocks, 4)
    manager.open_table(1)
    manager.append(1, num_tokens)
    return BlockShareManager(manager), manager


# -- reference counting ----------------------------------------------------------------------------------------------


def test_share_block_counts_one_reference_per_sequence() -> None:
    sharing, manager = make()
    first, second, _ = manager.block_ids_of(1)
    assert not sharing.is_block_shared(first)
    sharing.share_block(first, [2, 3])
    assert sharing.get_reference_count(first) == 3
    sharing.share_block(first, [1, 2, 3, 3])  # nobody counts twice
    assert sharing.get_reference_count(first) == 3
    assert sharing.is_block_shared(first)
    assert sharing.get_block_users(first) == [1, 2, 3]
    assert not sharing.is_block_shared(second)
    assert sharing.get_reference_count(0) == 0
    manager.check_invariants()


def test_a_sequence_can_share_many_blocks() -> None:
    sharing, manager = make()
    blocks = manager.block_ids_of(1)
    for block_id in blocks:
        sharing.share_block(block_id, [2])
    assert sharing.get_sequence_blocks(2) == blocks
    assert manager.num_tokens_of(2) == 10  # the tail is shared as far as it is filled
    manager.append(2, 1)
    assert len(manager.take_moves()) == 1
    manager.check_invariants()


def test_a_block_cannot_be_shared_out_of_place_and_then_nobody_has_it() -> None:
    sharing, manager = make()
    first, second, _ = manager.block_ids_of(1)
    sharing.share_block(first, [2])
    with pytest.raises(CacheError, match="before it first"):
        sharing.share_block(second, [2, 3])  # 3 lacks the first block
    assert sharing.get_sequence_blocks(2) == [first]
    assert not manager.has_table(3)
    with pytest.raises(CacheError):
        sharing.share_block(30, [2])
    with pytest.raises(CacheError, match="no block 99"):
        sharing.share_block(99, [4])
    assert not manager.has_table(4)
    manager.check_invariants()


def test_release_sequence_returns_the_blocks_that_are_free_now() -> None:
    sharing, manager = make()
    first, second, tail = manager.block_ids_of(1)
    sharing.share_block(first, [2])
    assert sharing.release_sequence(1) == [tail, second]
    assert sharing.get_reference_count(first) == 1
    assert sharing.release_sequence(2) == [first]
    assert manager.num_used_blocks == 0
    with pytest.raises(UnknownSequenceError):
        sharing.release_sequence(2)
    with pytest.raises(UnknownSequenceError):
        sharing.get_sequence_blocks(2)


def test_committed_names_go_over_with_a_shared_block() -> None:
    sharing, manager = make(num_tokens=8)
    tokens = list(range(8))
    manager.commit(1, tokens, 8)
    for block_id in manager.block_ids_of(1):
        sharing.share_block(block_id, [2])
    manager.append(2, 4)
    manager.commit(2, [*tokens, 8, 9, 10, 11], 12)
    assert manager.cached_prefix_length([*range(12), 12]) == 12


def test_stats() -> None:
    sharing, manager = make()
    manager.fork(1, 2)
    manager.append(2, 1)
    stats = sharing.get_stats()
    assert stats == ShareStats(
        total_shared_blocks=2, total_blocks_referenced=4, total_references=6, average_reference_count=1.5
    )
    assert str(stats) == "ShareStats: Shared=2, Referenced=4, AvgRefCount=1.50"
    manager.release(1)
    manager.release(2)
    assert sharing.get_stats() == ShareStats(0, 0, 0, 0.0)


# -- beams -----------------------------------------------------------------------------------------------------------


def test_beams_share_their_prefix_and_take_no_block() -> None:
    sharing, manager = make()
    used = manager.num_used_blocks
    search = BeamSearchBlockSharing(sharing, 4)
    beams = search.initialize_beams(1, 10)
    assert len(set(beams)) == 4
    assert 1 not in beams
    assert manager.num_used_blocks == used
    assert all(sharing.get_sequence_blocks(beam) == manager.block_ids_of(1) for beam in beams)
    assert sharing.get_reference_count(manager.block_ids_of(1)[0]) == 5
    assert search.get_beam_info(beams[2]) == BeamInfo(beam_index=2, base_sequence_id=1, divergence_point=10)
    assert search.get_beam_info(1) is None


def test_beams_hold_only_the_prefix() -> None:
    sharing, manager = make()
    beams = BeamSearchBlockSharing(sharing, 2).initialize_beams(1, 5)
    assert [manager.num_tokens_of(beam) for beam in beams] == [5, 5]
    assert sharing.get_sequence_blocks(beams[0]) == manager.block_ids_of(1)[:2]
    for length in (-1, 11):
        with pytest.raises(CacheError, match="no prefix"):
            BeamSearchBlockSharing(sharing, 2).initialize_beams(1, length)
    with pytest.raises(UnknownSequenceError):
        BeamSearchBlockSharing(sharing, 2).initialize_beams(77, 1)


def test_beam_ids_never_collide() -> None:
    """Spec code makes them base * 1000 + i, which meets sequence 1000 and the beams of others."""
    sharing, manager = make()
    manager.open_table(1000)
    searches = [BeamSearchBlockSharing(sharing, 3) for _ in range(3)]
    ids = [beam for search in searches for beam in search.initialize_beams(1, 10)]
    assert len(set(ids)) == 9
    counter = iter(range(5000, 6000))
    assert BeamSearchBlockSharing(sharing, 2, fresh_id=counter.__next__).initialize_beams(1, 4) == [5000, 5001]
    manager.check_invariants()


def test_divergence_gives_each_beam_its_own_block() -> None:
    sharing, manager = make()
    search = BeamSearchBlockSharing(sharing, 3)
    beams = search.initialize_beams(1, 10)
    manager.release(1)
    for beam in beams:
        search.on_beam_divergence(beam, 10)
    assert len(manager.take_moves()) == 2  # three sharers of a tail need two copies
    assert len({sharing.get_sequence_blocks(beam)[2] for beam in beams}) == 3
    assert all(sharing.is_block_shared(block) for block in sharing.get_sequence_blocks(beams[0])[:2])
    assert [manager.num_tokens_of(beam) for beam in beams] == [11, 11, 11]
    manager.check_invariants()


def test_divergence_before_the_end_gives_back_what_followed() -> None:
    sharing, manager = make()
    search = BeamSearchBlockSharing(sharing, 1)
    (beam,) = search.initialize_beams(1, 10)
    search.on_beam_divergence(beam, 4)
    assert manager.num_tokens_of(beam) == 5
    assert manager.take_moves() == []  # at a block's edge there is nothing to copy
    assert sharing.get_sequence_blocks(beam)[0] == manager.block_ids_of(1)[0]
    assert sharing.get_sequence_blocks(beam)[1] not in manager.block_ids_of(1)
    info = search.get_beam_info(beam)
    assert info is not None
    assert info.divergence_point == 4
    with pytest.raises(CacheError, match="cannot diverge"):
        search.on_beam_divergence(beam, 6)
    with pytest.raises(CacheError, match="not a beam"):
        search.on_beam_divergence(1, 3)


def test_divergence_without_a_free_block_leaves_the_beam_at_the_point() -> None:
    sharing, manager = make(num_tokens=10, num_blocks=4)
    search = BeamSearchBlockSharing(sharing, 1)
    (beam,) = search.initialize_beams(1, 10)
    with pytest.raises(OutOfBlocksError):
        search.on_beam_divergence(beam, 9)
    assert manager.num_tokens_of(beam) == 9
    manager.release(1)
    manager.append(beam, 1)
    manager.check_invariants()


def test_cleanup_of_beams_frees_what_only_they_held() -> None:
    sharing, manager = make()
    search = BeamSearchBlockSharing(sharing, 3)
    beams = search.initialize_beams(1, 10)
    for beam in beams:
        search.on_beam_divergence(beam, 10)
    manager.take_moves()
    own = [sharing.get_sequence_blocks(beam)[2] for beam in beams]
    with pytest.raises(CacheError, match="not a beam"):
        search.cleanup_beams([beams[0], 1])
    assert manager.has_table(beams[0])
    assert sorted(search.cleanup_beams(beams)) == sorted(own)
    assert search.get_beam_info(beams[0]) is None
    assert manager.num_used_blocks == 3
    assert len(manager.release(1)) == 3
    with pytest.raises(ConfigError):
        BeamSearchBlockSharing(sharing, 0)


def test_sharing_reduces_memory() -> None:
    """Four beams over 1000 tokens of prompt and 20 of their own, against four whole copies."""
    manager = KVCacheBlockManager(1000, 16)
    sharing = BlockShareManager(manager)
    manager.open_table(1)
    manager.append(1, 1000)
    search = BeamSearchBlockSharing(sharing, 4)
    beams = search.initialize_beams(1, 1000)
    manager.release(1)
    for beam in beams:
        manager.append(beam, 20)
    without = 4 * manager.blocks_for(1020)
    assert manager.num_used_blocks == 62 + 4 * 2
    assert manager.num_used_blocks < 0.28 * without
    assert sharing.get_stats().total_references == without


# -- drafts ----------------------------------------------------------------------------------------------------------


def test_verified_drafts_keep_their_blocks_and_rejected_ones_give_them_back() -> None:
    sharing, manager = make(num_tokens=10)
    speculation = SpeculativeDecodingSharing(sharing, speculation_length=8)
    blocks = speculation.allocate_speculative_blocks(1, 10)
    assert blocks == manager.block_ids_of(1)[2:]
    assert manager.num_tokens_of(1) == 18
    kept, freed = speculation.verify_speculation(1, 4)
    assert kept == blocks[:2]
    assert freed == blocks[:1:-1]
    assert manager.num_tokens_of(1) == 14
    manager.check_invariants()


@pytest.mark.parametrize(("verified", "num_kept", "num_freed"), [(0, 0, 1), (1, 1, 1), (2, 1, 1), (3, 2, 0), (4, 2, 0)])
def test_verification_at_every_count(verified: int, num_kept: int, num_freed: int) -> None:
    sharing, manager = make(num_tokens=10)
    speculation = SpeculativeDecodingSharing(sharing)
    speculation.allocate_speculative_blocks(1, 10)
    kept, freed = speculation.verify_speculation(1, verified)
    assert (len(kept), len(freed)) == (num_kept, num_freed)
    assert manager.num_tokens_of(1) == 10 + verified


def test_rejecting_all_goes_back_to_the_start() -> None:
    sharing, manager = make(num_tokens=8)
    before = manager.block_ids_of(1)
    speculation = SpeculativeDecodingSharing(sharing, 5)
    blocks = speculation.allocate_speculative_blocks(1, 8)
    assert len(blocks) == 2
    assert sorted(speculation.reject_all_speculation(1)) == sorted(blocks)
    assert manager.block_ids_of(1) == before
    with pytest.raises(CacheError, match="no drafts"):
        speculation.reject_all_speculation(1)


def test_drafts_in_a_shared_tail_do_not_touch_the_other_sequence() -> None:
    sharing, manager = make(num_tokens=6)
    storage = kv_storage(1, 33, 4, 1, 1, poison=True)
    data = np.arange(6, dtype=np.float32).reshape(6, 1, 1)
    storage.write(0, manager.table(1).cache_index(0, 6), data, data)
    manager.fork(1, 2)
    speculation = SpeculativeDecodingSharing(sharing, 3)
    speculation.allocate_speculative_blocks(2, 6)
    storage.move_blocks(manager.take_moves())
    drafts = np.full((3, 1, 1), 99, dtype=np.float32)
    storage.write(0, manager.table(2).cache_index(6, 9), drafts, drafts)
    speculation.verify_speculation(2, 1)
    assert storage.gather(0, manager.block_ids_of(1), 6)[0].ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert storage.gather(0, manager.block_ids_of(2), 7)[0].ravel().tolist() == [0, 1, 2, 3, 4, 5, 99]


def test_misused_speculation_is_refused() -> None:
    sharing, manager = make(num_tokens=10, num_blocks=5)
    speculation = SpeculativeDecodingSharing(sharing)
    with pytest.raises(CacheError, match="not 9"):
        speculation.allocate_speculative_blocks(1, 9)
    with pytest.raises(UnknownSequenceError):
        speculation.allocate_speculative_blocks(2, 0)
    with pytest.raises(OutOfBlocksError):
        speculation.allocate_speculative_blocks(1, 10, num_tokens=12)
    with pytest.raises(CacheError, match="no drafts"):
        speculation.verify_speculation(1, 0)
    speculation.allocate_speculative_blocks(1, 10, num_tokens=2)
    with pytest.raises(CacheError, match="unverified drafts"):
        speculation.allocate_speculative_blocks(1, 10)
    with pytest.raises(CacheError, match="it has 2"):
        speculation.verify_speculation(1, 3)
    manager.release(1)
    with pytest.raises(CacheError, match="no drafts"):
        speculation.verify_speculation(1, 1)
    with pytest.raises(ConfigError):
        SpeculativeDecodingSharing(sharing, 0)


def test_drafts_are_verified_before_more_are_made() -> None:
    """A second reservation would take the unverified drafts for the base."""
    sharing, manager = make(num_tokens=6)
    speculation = SpeculativeDecodingSharing(sharing, 3)
    speculation.allocate_speculative_blocks(1, 6)
    with pytest.raises(CacheError, match="unverified drafts"):
        speculation.allocate_speculative_blocks(1, 9)
    kept, _ = speculation.verify_speculation(1, 1)
    assert kept == [manager.block_ids_of(1)[1]]
    assert manager.num_tokens_of(1) == 7


def test_drafts_are_forgotten_with_their_table() -> None:
    """A sequence that is released and opened again under the same id has no drafts."""
    sharing, manager = make(num_tokens=6)
    speculation = SpeculativeDecodingSharing(sharing, 3)
    speculation.allocate_speculative_blocks(1, 6)
    manager.release(1)
    manager.open_table(1)
    manager.append(1, 20)
    with pytest.raises(CacheError, match="no drafts"):
        speculation.verify_speculation(1, 0)
    assert manager.num_tokens_of(1) == 20
    speculation.allocate_speculative_blocks(1, 20)
    assert speculation.verify_speculation(1, 3)[1] == []
    assert manager.num_tokens_of(1) == 23


def test_no_drafts_lie_in_no_block() -> None:
    sharing, manager = make(num_tokens=6)
    speculation = SpeculativeDecodingSharing(sharing)
    before = manager.block_ids_of(1)
    assert speculation.allocate_speculative_blocks(1, 6, num_tokens=0) == []
    assert speculation.verify_speculation(1, 0) == ([], [])
    assert manager.block_ids_of(1) == before


def test_beams_are_started_all_or_none() -> None:
    sharing, manager = make(num_tokens=6)
    manager.open_table(50)
    ids = iter([40, 41, 50])  # the third is taken
    search = BeamSearchBlockSharing(sharing, 3, fresh_id=lambda: next(ids))
    with pytest.raises(CacheError, match="already has a block table"):
        search.initialize_beams(1, 6)
    assert sorted(manager.sequence_ids()) == [1, 50]
    assert search.get_beam_info(40) is None
    manager.check_invariants()


def test_cleanup_passes_over_beams_that_are_gone() -> None:
    sharing, manager = make(num_tokens=6)
    search = BeamSearchBlockSharing(sharing, 3)
    beams = search.initialize_beams(1, 6)
    manager.release(beams[1])
    manager.release(1)
    freed = search.cleanup_beams(beams)
    assert len(freed) == 2
    assert manager.num_used_blocks == 0
    assert all(search.get_beam_info(beam) is None for beam in beams)


def test_beams_are_reordered() -> None:
    """One beam ends, another branches into its place; the blocks are shared, and nothing leaks."""
    sharing, manager = make(num_tokens=6)
    search = BeamSearchBlockSharing(sharing, 3)
    first, second, third = search.initialize_beams(1, 6)
    search.reorder_beams([second, third], [(first, third), (first, second)])
    assert manager.block_ids_of(third) == manager.block_ids_of(first)
    assert search.get_beam_info(third).base_sequence_id == first  # type: ignore[union-attr]
    with pytest.raises(CacheError, match="no blocks to share"):
        search.reorder_beams([first], [(first, 77)])
    assert manager.has_table(first)
    assert not manager.has_table(77)
    manager.check_invariants()


@pytest.mark.parametrize("count", [1.5, 2.0, True])
def test_tokens_are_counted_in_whole_numbers(count: Any) -> None:
    _, manager = make(num_tokens=6)
    with pytest.raises(CacheError, match="whole number"):
        manager.append(1, count)
    assert manager.num_tokens_of(1) == 6
