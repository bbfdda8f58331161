"""The block manager's verbs, one at a time; finding blocks by content is in `test_prefix_blocks.py`."""

from __future__ import annotations

import pytest

from bifolio.cache import PADDING_BLOCK, BlockMove, KVCacheBlockManager
from bifolio.errors import CacheError, ConfigError, OutOfBlocksError, UnknownSequenceError
from cache.manager_helpers import PROMPT, computed, make, opened


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (-3, 4), (8, 0), (8, -1)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError):
        KVCacheBlockManager(num_blocks, block_size)


# -- prefill and decode allocation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_prefill_block_allocation_covers_the_prompt(num_tokens: int, num_blocks: int) -> None:
    manager = make()
    assert manager.blocks_for(num_tokens) == num_blocks
    assert len(opened(manager, 1, num_tokens)) == num_blocks
    assert manager.num_used_blocks == num_blocks
    assert manager.num_free_blocks == 16 - num_blocks


def test_prefill_block_allocation_is_all_or_nothing() -> None:
    manager = make(num_blocks=5)
    opened(manager, 1, 8)
    manager.open_table(2)
    with pytest.raises(OutOfBlocksError, match="release"):
        manager.append(2, 9)
    assert manager.block_ids_of(2) == []
    assert manager.num_free_blocks == 2
    assert not manager.try_append(2, 9)
    assert not manager.try_append_many([(2, 4), (1, 5)])
    assert manager.num_tokens_of(1) == 8
    assert manager.try_append_many([(2, 4), (1, 4)])
    assert manager.num_free_blocks == 0


def test_one_token_each_is_all_or_nothing() -> None:
    manager = make(num_blocks=5)
    for sequence_id, num_tokens in ((1, 3), (2, 4), (3, 8)):
        opened(manager, sequence_id, num_tokens)
    manager.release(3)
    opened(manager, 3, 4)
    assert manager.num_free_blocks == 1
    assert not manager.try_append_each([1, 2, 3])
    assert [manager.num_tokens_of(sequence_id) for sequence_id in (1, 2, 3)] == [3, 4, 4]
    assert manager.try_append_each([1, 2])
    assert [manager.num_tokens_of(sequence_id) for sequence_id in (1, 2, 3)] == [4, 5, 4]
    assert manager.num_free_blocks == 0


def test_allocate_blocks_is_atomic_and_counts_whole_blocks() -> None:
    manager = make(num_blocks=5)
    first = manager.allocate_blocks(7, 3)
    assert len(set(first)) == 3
    assert manager.get_sequence_blocks(7) == first
    with pytest.raises(OutOfBlocksError):
        manager.allocate_blocks(8, 2)
    assert not manager.has_table(8)
    assert manager.allocate_block(8) is not None
    assert manager.allocate_block(8) is None
    assert sorted(manager.free_sequence(7)) == sorted(first)
    with pytest.raises(CacheError):
        manager.allocate_blocks(8, -1)


def test_decode_block_allocation_takes_a_block_only_when_the_last_is_full() -> None:
    manager = make()
    opened(manager, 1, 3)
    taken = []
    for _ in range(6):
        before = manager.num_free_blocks
        manager.append(1, 1)
        taken.append(before - manager.num_free_blocks)
    assert taken == [0, 1, 0, 0, 0, 1]
    assert manager.get_block(manager.block_ids_of(1)[-1]).used_slots == 1


def test_block_zero_is_never_handed_out() -> None:
    manager = make(num_blocks=9)
    assert sorted(opened(manager, 1, 32)) == list(range(1, 9))
    assert manager.num_free_blocks == 0
    assert PADDING_BLOCK not in manager.release(1)
    manager.check_invariants()


def test_zero_tokens_change_nothing_and_negative_ones_are_an_error() -> None:
    manager = make()
    opened(manager, 1, 2)
    manager.fork(1, 2)
    manager.append(2, 0)
    assert manager.take_moves() == []
    with pytest.raises(CacheError, match="truncate"):
        manager.append(1, -1)


def test_a_sequence_named_twice_in_a_batch_gets_the_sum() -> None:
    manager = make()
    manager.open_table(1)
    assert manager.blocks_needed([(1, 3), (1, 3)]) == 2
    assert manager.try_append_many([(1, 3), (1, 3)])
    assert manager.num_tokens_of(1) == 6
    manager.check_invariants()


# -- misuse ----------------------------------------------------------------------------------------------------------


def test_unknown_sequences_are_an_error() -> None:
    manager = make()
    for call in (
        lambda: manager.append(9, 1),
        lambda: manager.try_append_many([(9, 1)]),
        lambda: manager.blocks_needed([(9, 1)]),
        lambda: manager.fork(9, 10),
        lambda: manager.truncate(9, 0),
        lambda: manager.release(9),
        lambda: manager.commit(9, [1], 1),
        lambda: manager.block_ids_of(9),
        lambda: manager.take_changes([9]),
        lambda: manager.take_changes([9]),
    ):
        with pytest.raises(UnknownSequenceError, match="sequence 9"):
            call()


def test_a_batch_with_an_unknown_sequence_changes_nothing() -> None:
    manager = make()
    manager.open_table(1)
    with pytest.raises(UnknownSequenceError):
        manager.try_append_many([(1, 4), (9, 1)])
    assert manager.num_tokens_of(1) == 0
    assert manager.num_used_blocks == 0


def test_releasing_twice_is_an_error_and_frees_once() -> None:
    manager = make()
    opened(manager, 1, 8)
    manager.release(1)
    with pytest.raises(UnknownSequenceError):
        manager.release(1)
    assert manager.num_free_blocks == 16
    manager.check_invariants()


def test_ids_in_use_and_bad_lengths_are_refused() -> None:
    manager = make()
    opened(manager, 1, 5)
    with pytest.raises(CacheError, match="already"):
        manager.open_table(1)
    with pytest.raises(CacheError, match="already"):
        manager.fork(1, 1)
    for num_tokens in (-1, 6):
        with pytest.raises(CacheError, match="truncated"):
            manager.truncate(1, num_tokens)
    with pytest.raises(CacheError, match="cannot commit"):
        manager.commit(1, [1] * 6, 6)
    with pytest.raises(CacheError, match="token ids"):
        manager.commit(1, [1, 2], 5)
    with pytest.raises(CacheError, match="no block 99"):
        manager.ref_count(99)


def test_check_invariants_lists_what_is_broken() -> None:
    manager = make()
    opened(manager, 1, 5)
    manager._pool.ref_counts[1] += 1
    manager._pool.blank.append(2)
    with pytest.raises(CacheError, match=r"block 1 counts 2 references.*; block 2 is 1 times on the free list"):
        manager.check_invariants()


# -- fork and copy-on-write ------------------------------------------------------------------------------------------


def test_fork_shares_every_block_and_takes_none() -> None:
    manager = make()
    blocks = opened(manager, 1, 10)
    free = manager.num_free_blocks
    manager.fork(1, 2)
    assert manager.block_ids_of(2) == blocks
    assert manager.num_free_blocks == free
    assert [manager.ref_count(block_id) for block_id in blocks] == [2, 2, 2]
    assert manager.block_users(blocks[0]) == [1, 2]
    assert manager.release(1) == []
    assert manager.release(2) == blocks[::-1]


def test_writing_a_shared_tail_copies_it_and_n_sharers_need_one_copy_less() -> None:
    manager = make()
    tail = opened(manager, 1, 6)[-1]
    for child in (2, 3, 4):
        manager.fork(1, child)
    batch = [(sequence_id, 1) for sequence_id in (1, 2, 3, 4)]
    assert manager.blocks_needed(batch) == 3
    assert manager.try_append_many(batch)
    copies = manager.take_moves()
    assert [copy.src for copy in copies] == [tail] * 3
    tails = [manager.block_ids_of(sequence_id)[-1] for sequence_id, _ in batch]
    assert len(set(tails)) == 4
    assert tails[3] == tail  # the last to write keeps the original
    assert {copy.dst for copy in copies} == set(tails[:3])
    assert manager.take_moves() == []


def test_a_full_shared_tail_is_not_copied() -> None:
    manager = make()
    opened(manager, 1, 8)
    manager.fork(1, 2)
    manager.append(2, 1)
    assert manager.take_moves() == []
    assert manager.block_ids_of(1) == manager.block_ids_of(2)[:2]


def test_the_source_of_a_pending_copy_is_not_recycled() -> None:
    manager = make(num_blocks=4)
    tail = opened(manager, 1, 2)[-1]
    manager.fork(1, 2)
    manager.append(2, 1)
    assert manager.release(1) == []  # the only other holder leaves before the copy has run
    assert manager.ref_count(tail) == 0
    manager.open_table(3)
    assert manager.try_append(3, 4)
    assert not manager.try_append(3, 1)
    assert tail not in manager.block_ids_of(3)
    assert manager.take_moves() == [BlockMove(tail, manager.block_ids_of(2)[0])]
    assert manager.try_append(3, 1)
    assert manager.block_ids_of(3)[-1] == tail
    manager.check_invariants()


def test_a_copy_that_nobody_wants_any_more_is_cancelled() -> None:
    manager = make()
    tail = opened(manager, 1, 2)[-1]
    manager.fork(1, 2)
    manager.append(2, 1)
    manager.release(1)
    copied = manager.block_ids_of(2)[0]
    assert sorted(manager.release(2)) == sorted([tail, copied])
    assert manager.take_moves() == []
    assert manager.num_used_blocks == 0
    manager.check_invariants()


def test_a_row_that_waits_for_its_copy_cannot_be_forked_or_shared() -> None:
    manager = make()
    opened(manager, 1, 2)
    manager.fork(1, 2)
    manager.append(2, 1)
    with pytest.raises(CacheError, match="moves first"):
        manager.fork(2, 3)
    with pytest.raises(CacheError, match="moves first"):
        manager.share(manager.block_ids_of(2)[0], 3)
    assert not manager.has_table(3)
    manager.fork(1, 4)  # the source's holder can
    manager.take_moves()
    manager.fork(2, 3)
    manager.check_invariants()


def test_truncate_returns_the_blocks_that_nobody_else_holds() -> None:
    manager = make()
    blocks = opened(manager, 1, 10)
    manager.fork(1, 2)
    manager.append(2, 8)
    own = manager.block_ids_of(2)[2:]
    assert manager.truncate(2, 3) == own[::-1]
    assert manager.block_ids_of(2) == blocks[:1]
    assert manager.truncate(1, 8) == [blocks[2]]
    assert manager.truncate(1, 0) == [blocks[1]]  # block 0 of the row is still in sequence 2
    assert manager.num_tokens_of(1) == 0
    manager.check_invariants()


# -- device rows and the debug hook ----------------------------------------------------------------------------------


def test_row_changes_are_differences() -> None:
    manager = make()
    blocks = opened(manager, 1, 6)
    assert manager.take_changes([1]) == [(1, 0, blocks)]
    manager.append(1, 2)
    assert manager.take_changes([1]) == []
    manager.append(1, 1)
    manager.fork(1, 2)
    manager.append(1, 1)  # the tail is copied
    assert manager.take_changes([1, 2]) == [
        (1, 2, manager.block_ids_of(1)[2:]),
        (2, 0, manager.block_ids_of(2)),
    ]
    manager.truncate(1, 4)
    manager.append(1, 7)  # behind the first block nothing can be taken for granted
    assert manager.take_changes([1, 2]) == [(1, 1, manager.block_ids_of(1)[1:])]
    assert manager.take_changes([1, 2]) == []


def test_only_worthless_blocks_are_announced() -> None:
    manager = make(num_blocks=5)
    computed(manager, 1, PROMPT)
    named, partial = manager.block_ids_of(1)[:2], manager.block_ids_of(1)[2]
    announced: list[int] = []
    manager.on_free = announced.extend
    manager.release(1)
    assert announced == [partial]  # the others can still be found
    announced.clear()
    opened(manager, 2, 8)
    assert set(announced) == set(manager.block_ids_of(2))
    announced.clear()
    manager.append(2, 4)  # evicts
    assert announced == [named[1]]
    announced.clear()
    manager.drop_cached()
    assert announced == [named[0]]


def test_the_source_of_a_taken_copy_is_announced_only_when_handed_out() -> None:
    manager = make()
    tail = opened(manager, 1, 2)[-1]
    manager.fork(1, 2)
    manager.append(2, 1)
    announced: list[int] = []
    manager.on_free = announced.extend
    manager.release(1)
    manager.take_moves()
    assert announced == []
    opened(manager, 3, 4)
    assert announced == [tail]


def test_fresh_ids_meet_nobody() -> None:
    manager = make()
    manager.open_table(-1)
    ids = [manager.fresh_sequence_id() for _ in range(5)]
    assert len(set(ids)) == 5
    assert all(sequence_id < 0 and not manager.has_table(sequence_id) for sequence_id in ids)


def test_utilisation_counts_a_shared_block_once() -> None:
    manager = make()
    assert manager.utilisation() == 1.0
    opened(manager, 1, 6)
    manager.fork(1, 2)
    assert manager.utilisation() == 6 / 8


def test_paging_uses_over_ninety_percent_of_what_it_takes() -> None:
    """Spec: KV utilisation above 90 %; 100 sequences of 50 to 349 tokens in blocks of 16."""
    manager = KVCacheBlockManager(2000, 16)
    for sequence_id in range(100):
        opened(manager, sequence_id, 50 + 3 * sequence_id)
    assert manager.utilisation() > 0.9
