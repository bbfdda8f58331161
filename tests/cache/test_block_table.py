"""Positions to blocks and slots; the page table of the specs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bifolio.cache import BlockTable, KVCacheBlockManager, KVStorage, PageTable
from bifolio.errors import CacheError, ConfigError, UnknownSequenceError


def make(num_blocks: int = 17, block_size: int = 4) -> tuple[BlockTable, KVCacheBlockManager]:
    manager = KVCacheBlockManager(num_blocks, block_size)
    return BlockTable(manager), manager


def shuffled_row(manager: KVCacheBlockManager) -> list[int]:
    """A row whose blocks are not in order, as after some use."""
    for sequence_id in (91, 92, 93):
        manager.open_row(sequence_id)
        manager.append(sequence_id, 4)
    manager.release(91)
    manager.release(92)
    manager.open_row(1)
    manager.append(1, 14)
    return manager.row_block_ids(1)


def test_lookup_and_slots_agree_with_the_row() -> None:
    table, manager = make()
    blocks = shuffled_row(manager)
    assert blocks != sorted(blocks)
    slots = table.slot_mapping(1, 0, 14)
    assert slots.dtype == np.int64
    for position in range(14):
        block_id, offset = table.lookup(1, position)
        assert block_id == blocks[position // 4]
        assert offset == position % 4
        assert slots[position] == block_id * 4 + offset
    np.testing.assert_array_equal(table.slot_mapping(1, 3, 9), slots[3:9])
    assert table.slot_mapping(1, 5, 5).shape == (0,)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 15)])
def test_positions_outside_the_row_are_refused(start: int, end: int) -> None:
    table, manager = make()
    shuffled_row(manager)
    with pytest.raises(CacheError, match="outside"):
        table.slot_mapping(1, start, end)
    with pytest.raises(CacheError, match="outside"):
        table.lookup(1, 14)
    with pytest.raises(UnknownSequenceError):
        table.lookup(2, 0)


def test_as_array_pads_with_block_zero() -> None:
    table, manager = make()
    blocks = shuffled_row(manager)
    manager.open_row(2)
    array = table.as_array([1, 2, 93], 6)
    assert array.dtype == np.int32
    assert array.tolist() == [[*blocks, 0, 0], [0] * 6, [*manager.row_block_ids(93), 0, 0, 0, 0, 0]]
    assert table.as_array([93, 2]).shape == (2, 1)
    assert table.as_array([]).shape == (0, 0)
    with pytest.raises(CacheError, match="max_blocks"):
        table.as_array([1], 3)


def test_the_table_follows_the_manager() -> None:
    table, manager = make()
    manager.open_row(1)
    block_id = table.allocate_and_append_block(1)
    assert table.get_sequence_blocks(1) == [block_id]
    manager.release(1)
    with pytest.raises(UnknownSequenceError):
        table.get_sequence_blocks(1)


def test_append_block_shares_or_confirms() -> None:
    table, manager = make()
    for block_id in manager.allocate_blocks(1, 2):
        table.append_block(1, block_id)  # already there
    first, second = manager.row_block_ids(1)
    assert manager.ref_count(first) == 1
    table.append_block(2, first)
    table.append_block(2, second)
    assert table.get_sequence_blocks(2) == [first, second]
    assert manager.ref_count(second) == 2
    with pytest.raises(CacheError, match="behind the same"):
        table.append_block(3, second)
    with pytest.raises(CacheError, match="behind the same"):
        table.append_block(3, 9)  # free
    assert not manager.has_row(3)
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
    assert sorted(table.close()) == sorted(pages)
    assert manager.num_free_blocks == 3
    assert table.close() == []


def test_page_table_get_returns_the_page_of_a_position() -> None:
    manager = KVCacheBlockManager(6, 4)
    storage = KVStorage(1, 6, 4, 1, 2)
    table = PageTable(manager, storage)
    assert table.get(0) is None
    first, second = table.allocate(0), table.allocate(4)
    found = [table.get(position) for position in (0, 3, 4, 7)]
    assert [page.block_id for page in found if page] == [first, first, second, second]
    assert table.get(8) is None
    assert table.get(-1) is None
    with pytest.raises(ConfigError):
        PageTable(manager).get(0)


def test_page_table_of_a_given_sequence() -> None:
    manager = KVCacheBlockManager(6, 4)
    manager.open_row(5)
    manager.append(5, 4)
    table = PageTable(manager, sequence_id=5)
    assert table.allocate(4) == manager.row_block_ids(5)[1]


def test_page_table_concurrent_allocate() -> None:
    manager = KVCacheBlockManager(8 * 20 + 1, 4)

    def fill(_: int) -> list[int | None]:
        table = PageTable(manager)
        return [table.allocate(start) for start in range(0, 80, 4)]

    with ThreadPoolExecutor(8) as threads:
        pages = [page for batch in threads.map(fill, range(8)) for page in batch]
    assert sorted(page for page in pages if page is not None) == list(range(1, 161))
    manager.check_invariants()
