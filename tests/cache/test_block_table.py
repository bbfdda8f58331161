"""Positions to blocks and slots; the page table of the specs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bifolio.cache import BlockTable, KVCacheBlockManager, KvCacheEntry, PageTable
from bifolio.errors import CacheError, UnknownSequenceError
from helpers import kv_storage


def make(num_blocks: int = 17, block_size: int = 4) -> tuple[BlockTable, KVCacheBlockManager]:
    """The empty table of sequence 5, and its manager."""
    manager = KVCacheBlockManager(num_blocks, block_size)
    manager.open_table(5)
    return manager.table(5), manager


def shuffled_table(manager: KVCacheBlockManager) -> list[int]:
    """The blocks of sequence 1, which are not in order, as after some use."""
    for sequence_id in (91, 92, 93):
        manager.open_table(sequence_id)
        manager.append(sequence_id, 4)
    manager.release(91)
    manager.release(92)
    manager.open_table(1)
    manager.append(1, 14)
    return manager.block_ids_of(1)


def test_lookup_and_cache_index_agree_with_the_blocks() -> None:
    _, manager = make()
    blocks = shuffled_table(manager)
    table = manager.table(1)
    assert blocks != sorted(blocks)
    index = table.cache_index(0, 14)
    assert index.dtype == np.int64
    for position in range(14):
        block_id, offset = table.lookup(position)
        assert block_id == blocks[position // 4]
        assert offset == position % 4
        assert index[position] == block_id * 4 + offset
    np.testing.assert_array_equal(table.cache_index(3, 9), index[3:9])
    assert table.cache_index(5, 5).shape == (0,)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 15)])
def test_positions_outside_the_table_are_refused(start: int, end: int) -> None:
    _, manager = make()
    shuffled_table(manager)
    with pytest.raises(CacheError, match="outside"):
        manager.table(1).cache_index(start, end)
    with pytest.raises(CacheError, match="outside"):
        manager.table(1).lookup(14)
    with pytest.raises(UnknownSequenceError):
        manager.table(2)


def test_several_tables_are_padded_with_block_zero() -> None:
    _, manager = make()
    blocks = shuffled_table(manager)
    manager.open_table(2)
    array = manager.tables_array([1, 2, 93])
    assert array.dtype == np.int32
    assert array.tolist() == [blocks, [0] * 4, [*manager.block_ids_of(93), 0, 0, 0]]
    assert manager.tables_array([93, 2]).shape == (2, 1)
    assert manager.tables_array([]).shape == (0, 0)


def test_the_table_is_the_managers_own() -> None:
    table, manager = make()
    block_id = manager.allocate_block(5)
    assert table.block_ids == manager.get_sequence_blocks(5) == [block_id]
    manager.append(5, 3)
    assert table.num_tokens == manager.num_tokens_of(5) == 7
    manager.release(5)
    assert table.block_ids == []
    with pytest.raises(UnknownSequenceError):
        manager.table(5)


def test_sharing_a_block_continues_or_confirms() -> None:
    _, manager = make()
    for block_id in manager.allocate_blocks(1, 2):
        manager.share(block_id, 1)  # already there
    first, second = manager.block_ids_of(1)
    assert manager.ref_count(first) == 1
    manager.share(first, 2)
    manager.share(second, 2)
    assert manager.get_sequence_blocks(2) == [first, second]
    assert manager.ref_count(second) == 2
    with pytest.raises(CacheError, match="after the same"):
        manager.share(second, 3)
    with pytest.raises(CacheError, match="after the same"):
        manager.share(9, 3)  # free
    assert not manager.has_table(3)
    manager.check_invariants()


# -- the page table of one sequence ----------------------------------------------------------------------------------


def test_page_table_is_the_block_table() -> None:
    assert PageTable is BlockTable


def test_page_table_allocate_returns_unique_ids() -> None:
    table, manager = make()
    pages = [table.allocate(start) for start in range(0, 64, 4)]
    assert len(set(pages)) == 16
    assert 0 not in pages
    assert table.allocate(64) is None
    assert manager.num_free_blocks == 0
    with pytest.raises(CacheError, match="position 64"):
        table.allocate(0)


def test_page_table_free_recycles_pages() -> None:
    table, manager = make(num_blocks=4)
    pages = [table.allocate(start) for start in (0, 4, 8)]
    assert table.allocate(12) is None
    with pytest.raises(CacheError, match="last ones"):
        table.free([pages[0]])  # type: ignore[list-item]
    freed = table.free(pages[1:])  # type: ignore[arg-type]
    assert sorted(freed) == sorted(pages[1:])
    assert {table.allocate(4), table.allocate(8)} == set(pages[1:])
    assert table.free([]) == []
    assert sorted(manager.release(5)) == sorted(pages)
    assert manager.num_free_blocks == 3


def test_page_table_get_returns_the_page_of_a_position() -> None:
    manager = KVCacheBlockManager(6, 4)
    entry = KvCacheEntry.open(kv_storage(1, 6, 4, 1, 2), manager)
    table = entry.page_table
    assert table is manager.table(entry.sequence_id)
    assert table.get(0) is None
    first, second = table.allocate(0), table.allocate(4)
    found = [table.get(position) for position in (0, 3, 4, 7)]
    assert [page.block_id for page in found if page] == [first, first, second, second]
    assert all(page.used_slots == 4 for page in found if page)
    assert table.get(8) is None
    assert table.get(-1) is None


def test_page_table_concurrent_allocate() -> None:
    manager = KVCacheBlockManager(8 * 20 + 1, 4)

    def fill(sequence_id: int) -> list[int | None]:
        manager.open_table(sequence_id)
        return [manager.table(sequence_id).allocate(start) for start in range(0, 80, 4)]

    with ThreadPoolExecutor(8) as threads:
        pages = [page for batch in threads.map(fill, range(8)) for page in batch]
    assert sorted(page for page in pages if page is not None) == list(range(1, 161))
    manager.check_invariants()
