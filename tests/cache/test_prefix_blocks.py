"""Blocks found by content: prefix hits, salts, eviction, and what a write does to a named block."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.cache import BlockMove, KVCacheBlockManager
from cache.manager_helpers import PROMPT, computed, make, opened


def test_a_prefix_hit_shares_full_blocks_and_leaves_a_token_to_compute() -> None:
    manager = make()
    assert computed(manager, 1, PROMPT) == 0
    assert manager.num_cached_blocks == 2
    assert manager.open_table(2, PROMPT) == 8
    assert manager.block_ids_of(2) == manager.block_ids_of(1)[:2]
    assert manager.open_table(3, PROMPT[:8]) == 4  # all 8 are cached; one must be computed
    assert manager.open_table(4, PROMPT[:9]) == 8
    assert manager.open_table(5, PROMPT, max_cached=7) == 4
    assert manager.open_table(6, [*PROMPT[:4], 7, *PROMPT[5:]]) == 4
    assert manager.open_table(7, [7, *PROMPT]) == 0
    assert manager.open_table(8, []) == 0
    assert manager.cached_prefix_length(PROMPT) == 8
    manager.check_invariants()


def test_the_same_tokens_behind_another_prefix_are_not_found() -> None:
    manager = make()
    computed(manager, 1, [1, 1, 1, 1, 2, 2, 2, 2, 9])
    assert manager.open_table(2, [3, 3, 3, 3, 2, 2, 2, 2, 9]) == 0
    assert manager.open_table(3, [2, 2, 2, 2, 9]) == 0


def test_tenants_with_different_salts_do_not_share() -> None:
    manager = make()
    computed(manager, 1, PROMPT, salt=b"one")
    assert manager.open_table(2, PROMPT, salt=b"two") == 0
    assert manager.open_table(3, PROMPT) == 0
    assert manager.open_table(4, PROMPT, salt=b"one") == 8


def test_the_salt_and_the_chain_go_over_to_a_fork() -> None:
    manager = make()
    computed(manager, 1, PROMPT, salt=b"one")
    manager.fork(1, 2)
    tokens = [*PROMPT, 5, 6]
    manager.append(2, 2)
    manager.take_moves()
    manager.commit(2, tokens, 13)
    assert manager.open_table(3, tokens, salt=b"one") == 12
    assert manager.open_table(4, tokens) == 0


def test_a_released_prefix_is_found_again_until_it_is_evicted_tail_first() -> None:
    manager = make(num_blocks=5)
    computed(manager, 1, PROMPT)
    manager.release(1)
    assert manager.num_free_blocks == 4
    assert manager.cached_prefix_length(PROMPT) == 8
    opened(manager, 2, 8)  # two blocks are blank: nothing is evicted
    assert manager.cached_prefix_length(PROMPT) == 8
    manager.append(2, 4)  # the tail of the prefix goes first
    assert manager.cached_prefix_length(PROMPT) == 4
    manager.append(2, 4)
    assert manager.cached_prefix_length(PROMPT) == 0
    assert manager.num_cached_blocks == 0
    manager.check_invariants()


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    manager = make(num_blocks=4)
    for sequence_id, token in enumerate((1, 2, 3)):
        computed(manager, sequence_id, [token] * 4)
    for sequence_id in (0, 1, 2):
        manager.release(sequence_id)
    manager.open_table(9, [1] * 5)  # used again
    manager.release(9)
    opened(manager, 10, 4)
    assert [manager.cached_prefix_length([token] * 5) for token in (1, 2, 3)] == [4, 0, 4]


def test_only_full_blocks_are_named_and_commit_goes_on_where_it_stopped() -> None:
    manager = make()
    manager.open_table(1)
    manager.append(1, 11)
    manager.commit(1, PROMPT, 3)
    assert manager.num_cached_blocks == 0
    manager.commit(1, PROMPT, 7)
    assert manager.num_cached_blocks == 1
    manager.commit(1, PROMPT, 11)
    assert manager.num_cached_blocks == 2
    assert not manager.get_block(manager.block_ids_of(1)[2]).is_cached


def test_an_array_of_tokens_has_the_names_of_the_list() -> None:
    """A prompt is committed as an array; whoever comes with the same tokens in a list finds it."""
    manager = make()
    manager.open_table(1)
    manager.append(1, len(PROMPT))
    manager.commit(1, np.array(PROMPT, dtype=np.int32), len(PROMPT))
    assert manager.open_table(2, PROMPT) == 8
    manager.check_invariants()


def test_commit_costs_one_digest_for_each_new_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from bifolio.cache import block_table

    calls = []
    original = block_table.next_digest
    monkeypatch.setattr(block_table, "next_digest", lambda *args: calls.append(1) or original(*args))
    manager = KVCacheBlockManager(300, 4)
    tokens = list(range(1000))
    manager.open_table(1)
    for length in range(1, 1001):
        manager.append(1, 1)
        manager.commit(1, tokens, length)
    assert len(calls) == 250


def test_a_truncated_named_block_is_forgotten_when_it_is_written() -> None:
    manager = make()
    computed(manager, 1, PROMPT)
    manager.truncate(1, 6)
    assert manager.cached_prefix_length(PROMPT) == 8  # not written yet: still what its digest says
    manager.append(1, 1)
    assert manager.take_moves() == []
    assert manager.cached_prefix_length(PROMPT) == 4
    tokens = [*PROMPT[:6], 55, 56]
    manager.append(1, 1)
    manager.commit(1, tokens, 8)
    assert manager.cached_prefix_length([*tokens, 0]) == 8
    assert manager.cached_prefix_length(PROMPT) == 4
    manager.check_invariants()


def test_a_truncated_named_block_that_another_row_holds_is_copied() -> None:
    manager = make()
    computed(manager, 1, PROMPT)
    manager.open_table(2, PROMPT)
    manager.truncate(1, 6)
    shared = manager.block_ids_of(2)[1]
    manager.append(1, 1)
    assert manager.take_moves() == [BlockMove(shared, manager.block_ids_of(1)[1])]
    assert manager.cached_prefix_length(PROMPT) == 8
    manager.check_invariants()


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = KVCacheBlockManager(17, 4, enable_prefix_caching=False)
    computed(manager, 1, PROMPT)
    assert manager.num_cached_blocks == 0
    assert manager.open_table(2, PROMPT) == 0


def test_dropping_the_cache_forgets_what_is_there_and_what_grows_from_it() -> None:
    manager = make()
    computed(manager, 1, PROMPT)
    computed(manager, 2, [7] * 9)
    manager.release(2)
    manager.drop_cached()
    assert manager.num_cached_blocks == 0
    assert manager.cached_prefix_length(PROMPT) == 0
    manager.append(1, 1)
    manager.commit(1, [*PROMPT, 5], 12)
    assert manager.num_cached_blocks == 0
    computed(manager, 3, [*PROMPT, 5])
    assert manager.open_table(4, [*PROMPT, 5, 6]) == 12
    assert manager.block_ids_of(4) == manager.block_ids_of(3)
    manager.check_invariants()
