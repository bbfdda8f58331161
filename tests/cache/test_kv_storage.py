"""Storing, gathering, copying and poisoning keys and values, with numpy and with torch; pages and entries as views."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from bifolio.cache import CacheLayout, KVCacheBlockManager, KvCacheEntry, KVStorage, Page
from bifolio.errors import CacheError, ConfigError, OutOfBlocksError
from helpers import kv_storage

BACKENDS = ["numpy", "torch"]
DTYPES = ["f32", "f16", "bf16"]
LAYERS, HEADS, HEAD = 2, 3, 8


def make(backend: str = "numpy", dtype: str = "f32", num_blocks: int = 6, block_size: int = 4, **kw: Any) -> KVStorage:
    if backend == "torch":
        pytest.importorskip("torch")
    return kv_storage(LAYERS, num_blocks, block_size, HEADS, HEAD, dtype, backend=backend, **kw)  # type: ignore[arg-type]


def arrays(storage: KVStorage, *values: np.ndarray) -> list[Any]:
    if storage.backend == "numpy":
        return list(values)
    import torch

    return [torch.from_numpy(value) for value in values]


def plain(array: Any) -> np.ndarray:
    return np.asarray(array if isinstance(array, np.ndarray) else array.float().numpy(), dtype=np.float32)


def some_data(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Small integers and halves: exact in every type."""
    keys = (np.arange(num_tokens * HEADS * HEAD, dtype=np.float32) % 128).reshape(num_tokens, HEADS, HEAD)
    return keys, 0.5 - keys


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
class TestEveryKind:
    def test_what_is_written_is_gathered(self, backend: str, dtype: str) -> None:
        storage = make(backend, dtype)
        keys, values = some_data(6)
        slots = np.array([12, 13, 14, 15, 4, 5])  # blocks 3 and 1
        storage.write(1, *arrays(storage, slots, keys, values))
        got_keys, got_values = storage.gather(1, [3, 1], 6)
        np.testing.assert_array_equal(plain(got_keys), keys)
        np.testing.assert_array_equal(plain(got_values), values)
        assert not plain(storage.gather(0, [3, 1], 6)[0]).any()  # the other layer is untouched

    def test_layout_is_block_head_slot(self, backend: str, dtype: str) -> None:
        storage = make(backend, dtype)
        assert tuple(storage.keys[0].shape) == (6, HEADS, 4, HEAD)
        keys, values = some_data(1)
        storage.write(0, *arrays(storage, np.array([2 * 4 + 3]), keys, values))
        block = storage.keys[0][2]
        if backend == "numpy" and dtype == "bf16":
            assert block.dtype == np.uint16
        else:
            np.testing.assert_array_equal(plain(block)[:, 3], keys[0])
        assert storage.keys[0][2][1].reshape(-1).shape == (4 * HEAD,)

    def test_copies_take_every_layer_and_read_before_they_write(self, backend: str, dtype: str) -> None:
        storage = make(backend, dtype)
        keys, values = some_data(8)
        slots = np.arange(4, 12)  # blocks 1 and 2
        for layer in range(LAYERS):
            storage.write(layer, *arrays(storage, slots, keys + layer, values))
        storage.move_blocks([(1, 2), (2, 3)])
        for layer in range(LAYERS):
            got_keys, got_values = storage.gather(layer, [2, 3], 8)
            np.testing.assert_array_equal(plain(got_keys), keys + layer)
            np.testing.assert_array_equal(plain(got_values), values)
        storage.move_blocks([])

    def test_poisoned_blocks_read_as_nan_and_others_do_not(self, backend: str, dtype: str) -> None:
        storage = make(backend, dtype)
        storage.poison_blocks([1, 4])
        for layer in range(LAYERS):
            for block_id in range(6):
                for array in storage.gather(layer, [block_id], 4):
                    assert np.isnan(plain(array)).all() == (block_id in (1, 4))
        keys, values = some_data(1)
        storage.write(0, *arrays(storage, np.array([4]), keys, values))
        np.testing.assert_array_equal(plain(storage.gather(0, [1], 1)[0]), keys)

    def test_poison_mode_starts_as_nan_except_for_padding(self, backend: str, dtype: str) -> None:
        storage = make(backend, dtype, poison=True)
        for block_id in range(6):
            keys = plain(storage.gather(0, [block_id], 4)[0])
            assert np.isnan(keys).all() if block_id else not keys.any()

    def test_values_are_rounded_to_nearest_even(self, backend: str, dtype: str) -> None:
        torch = pytest.importorskip("torch")
        storage = make(backend, dtype)
        keys = np.random.default_rng(0).standard_normal((4, HEADS, HEAD), dtype=np.float32)
        storage.write(0, *arrays(storage, np.arange(4, 8), keys, keys))
        kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
        expected = torch.from_numpy(keys).to(kind).float().numpy()
        np.testing.assert_array_equal(plain(storage.gather(0, [1], 4)[0]), expected)


def test_gather_of_nothing_and_of_too_much() -> None:
    storage = make()
    assert storage.gather(0, [], 0)[0].shape == (0, HEADS, HEAD)
    with pytest.raises(CacheError):
        storage.gather(0, [1], 5)


def test_sizes_are_known_before_anything_is_allocated() -> None:
    assert CacheLayout(30, 9, 16, 3, 64, "bf16").bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert CacheLayout(30, 9, 16, 3, 64).bytes_per_block == 16 * 2 * 30 * 3 * 64 * 4
    storage = make(dtype="f16")
    assert storage.num_bytes == sum(array.nbytes for array in (*storage.keys, *storage.values))


def test_a_large_pool_costs_nothing_until_it_is_touched() -> None:
    psutil = pytest.importorskip("psutil")
    before = psutil.Process().memory_info().rss
    storage = kv_storage(4, 16384, 16, 8, 64)
    assert storage.num_bytes == 4 << 30
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_impossible_storages_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        kv_storage(0, 4, 4, 1, 1)
    with pytest.raises(ConfigError, match="bf16"):
        kv_storage(1, 4, 4, 1, 1, "int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="torch"):
        kv_storage(1, 4, 4, 1, 1, device="cuda")


@pytest.mark.full
def test_the_cache_does_not_import_torch() -> None:
    code = "import sys, bifolio.cache as c; c.KVStorage(c.CacheLayout(1, 2, 4, 1, 1)); print('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout == "False\n"


# -- pages and entries -----------------------------------------------------------------------------------------------


def token(value: float) -> np.ndarray:
    return np.full((LAYERS, HEADS, HEAD), value, dtype=np.float32)


def entry_of(num_blocks: int = 6, block_size: int = 4) -> tuple[KvCacheEntry, KVStorage, KVCacheBlockManager]:
    manager = KVCacheBlockManager(num_blocks, block_size)
    storage = make(num_blocks=num_blocks, block_size=block_size, poison=True)
    manager.on_free = storage.poison_blocks
    manager.open_table(1)
    return KvCacheEntry(storage, 1, manager), storage, manager


def test_a_page_is_a_view() -> None:
    entry, storage, manager = entry_of()
    for value in range(6):
        entry.append(token(value), token(-value))
    first, second = entry.pages()
    assert isinstance(first, Page)
    assert (first.used_slots, second.used_slots) == (4, 2)
    assert np.shares_memory(second.keys(1), storage.keys[1])
    second.keys(1)[0, 1] = 77
    assert storage.gather(1, manager.block_ids_of(1), 6)[0][5, 0, 0] == 77
    with pytest.raises(CacheError, match="without a storage"):
        manager.get_block(2).keys(0)
    with pytest.raises(CacheError, match="no block 6"):
        manager.get_block(6)


def test_paged_kv_append_spans_pages() -> None:
    entry, storage, manager = entry_of()
    needed = []
    for value in range(10):
        needed.append(entry.needs_new_page)
        entry.append(token(value), token(-value))
    assert entry.seq_len == 10
    assert [index for index, new in enumerate(needed) if new] == [0, 4, 8]
    assert [view.shape[1] for view in entry.keys(0)] == [4, 4, 2]
    for layer in range(LAYERS):
        keys, values = np.concatenate(entry.keys(layer), axis=1), np.concatenate(entry.values(layer), axis=1)
        np.testing.assert_array_equal(keys[0, :, 0], np.arange(10))
        np.testing.assert_array_equal(values[2, :, 7], -np.arange(10))
        assert all(np.shares_memory(view, storage.keys[layer]) for view in entry.keys(layer))
    assert len(manager.block_ids_of(1)) == 3


def test_paged_kv_append_moves_nothing_that_was_there() -> None:
    entry, _, _ = entry_of()
    entry.append(token(1), token(1))
    view = entry.keys(0)[0]
    for value in range(2, 9):
        entry.append(token(value), token(value))
    assert np.shares_memory(view, entry.keys(0)[0])
    assert (view == 1).all()


def test_paged_kv_memory_bounded() -> None:
    entry, storage, manager = entry_of(num_blocks=4)
    size = storage.num_bytes
    for value in range(12):
        entry.append(token(value), token(value))
    with pytest.raises(OutOfBlocksError):
        entry.append(token(99), token(99))
    assert entry.seq_len == 12
    assert manager.num_free_blocks == 0
    assert storage.num_bytes == size == sum(array.nbytes for array in (*storage.keys, *storage.values))
    np.testing.assert_array_equal(storage.gather(0, manager.block_ids_of(1), 12)[0][:, 0, 0], np.arange(12))


def test_forked_entries_go_their_own_ways() -> None:
    entry, storage, manager = entry_of()
    for value in range(6):
        entry.append(token(value), token(value))
    manager.fork(1, 2)
    other = KvCacheEntry(storage, 2, manager)
    other.append(token(60), token(60))
    entry.append(token(6), token(6))
    assert [view[0, :, 0].tolist() for view in entry.keys(1)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [view[0, :, 0].tolist() for view in other.keys(1)] == [[0, 1, 2, 3], [4, 5, 60]]
    assert manager.num_used_blocks == 3


def test_wrong_shapes_and_mismatched_managers_are_refused() -> None:
    entry, storage, manager = entry_of()
    with pytest.raises(CacheError, match="shape"):
        entry.append(token(1)[0], token(1)[0])
    assert entry.seq_len == 0
    with pytest.raises(ConfigError):
        KvCacheEntry(storage, 1, KVCacheBlockManager(6, 8))
    with pytest.raises(ConfigError):
        KvCacheEntry(storage, 1, KVCacheBlockManager(7, 4))
    assert manager.num_used_blocks == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_on_torch(dtype: str) -> None:
    storage = make("torch", dtype, poison=True)
    manager = KVCacheBlockManager(6, 4)
    manager.open_table(1)
    entry = KvCacheEntry(storage, 1, manager)
    for value in range(6):
        entry.append(*arrays(storage, token(value), token(-value)))
    manager.fork(1, 2)
    KvCacheEntry(storage, 2, manager).append(*arrays(storage, token(60), token(60)))
    assert [view[0, :, 0].tolist() for view in entry.keys(1)] == [[0, 1, 2, 3], [4, 5]]
    assert [view[2, :, 7].tolist() for view in KvCacheEntry(storage, 2, manager).values(0)] == [
        [0, -1, -2, -3],
        [-4, -5, 60],
    ]
    entry.keys(0)[1][0, 0] = 9
    assert storage.keys[0][manager.block_ids_of(1)[1], 0, 0, 0] == 9  # a view


# -- poison ----------------------------------------------------------------------------------------------------------


def test_poison_a_freed_block_reads_as_nan() -> None:
    entry, storage, manager = entry_of()
    entry.append(token(1), token(1))
    (block_id,) = manager.block_ids_of(1)
    manager.release(1)
    assert np.isnan(storage.gather(0, [block_id], 4)[0]).all()


def test_poison_spares_a_cached_block_until_it_is_handed_out_again() -> None:
    entry, storage, manager = entry_of(num_blocks=3)
    for value in range(4):
        entry.append(token(value), token(value))
    (block_id,) = manager.block_ids_of(1)
    manager.commit(1, [1, 2, 3, 4], 4)
    manager.release(1)
    np.testing.assert_array_equal(storage.gather(0, [block_id], 4)[0][:, 0, 0], np.arange(4))
    manager.open_table(2)
    manager.append(2, 8)
    assert block_id in manager.block_ids_of(2)
    assert np.isnan(storage.gather(0, [block_id], 4)[0]).all()


def test_poison_does_not_reach_the_source_of_a_copy_before_it_is_copied() -> None:
    entry, storage, manager = entry_of()
    entry.append(token(5), token(5))
    manager.fork(1, 2)
    manager.append(2, 1)
    manager.release(1)
    storage.move_blocks(manager.take_moves())
    assert storage.gather(0, manager.block_ids_of(2), 1)[0][0, 0, 0] == 5
