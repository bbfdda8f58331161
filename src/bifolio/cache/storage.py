"""Views, not copies, of the stored keys and values: `Page` of one block, `KvCacheEntry` of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bifolio.cache.table_states import StatePass, StateRequest
from bifolio.counts import whole
from bifolio.errors import CacheError, ConfigError
from bifolio.kernels.storage import CacheLayout, KVStorage

if TYPE_CHECKING:
    from bifolio.cache.block_manager import KVCacheBlockManager
    from bifolio.cache.block_table import BlockTable

__all__ = ["CacheLayout", "KVStorage", "KvCacheEntry", "Page"]
Array = Any


@dataclass(frozen=True, slots=True)
class Page:
    """Snapshot of one block of the cache; with a storage, also its keys and values."""

    block_id: int
    used_slots: int  # tokens reserved in the block, the maximum over its tables
    ref_count: int  # tables that hold the block
    is_cached: bool  # found by content: a new sequence with this prefix would share it
    storage: KVStorage | None = None

    def of(self, storage: KVStorage) -> Page:
        """The same page with its keys and values in `storage`."""
        return replace(self, storage=storage)

    def keys(self, layer: int) -> Array:
        """View [num_kv_heads, block_size, head_dim], in the storage's own type."""
        return _of_layer(self._storage().keys, layer)[self.block_id]

    def values(self, layer: int) -> Array:
        """View [num_kv_heads, block_size, head_dim], in the storage's own type."""
        return _of_layer(self._storage().values, layer)[self.block_id]

    def _storage(self) -> KVStorage:
        if self.storage is None:
            raise CacheError("this page was made without a storage: use page.of(storage)")
        return self.storage


class KvCacheEntry:
    """The cache of one sequence, page by page.

    For passes outside an engine's plan (embeddings, `LanguageModel.decode`): `reserve` and `append` run pending moves.
    An entry opened with a capacity holds the blocks of all its tokens from the start.

    |<-------- seq_len -------->|<-- held ahead of use -->|
    """

    def __init__(self, storage: KVStorage, sequence_id: int, manager: KVCacheBlockManager) -> None:
        if storage.block_size != manager.block_size or storage.num_blocks < manager.num_blocks:
            raise ConfigError(
                "the storage and the block manager differ in block size or number of blocks: create both with the "
                "same values"
            )
        self.sequence_id = sequence_id
        self.storage = storage
        self._manager = manager
        self._num_ahead = 0  # tokens that the table has room for beyond `seq_len`
        self.rope: int | None = None  # the frequencies of its keys, chosen by its first pass (`bifolio.long_rope`)

    @classmethod
    def open(cls, storage: KVStorage, manager: KVCacheBlockManager, capacity: int = 0) -> KvCacheEntry:
        """The entry of a new, empty sequence; `OutOfBlocksError` when `capacity` tokens do not fit now."""
        capacity = whole("capacity", capacity)
        with manager.lock:
            sequence_id = manager.fresh_sequence_id()
            manager.open_table(sequence_id)
            entry = cls(storage, sequence_id, manager)
            try:
                manager.append(sequence_id, capacity)
            except CacheError:
                entry.close()
                raise
            entry._num_ahead = capacity
        return entry

    @property
    def page_table(self) -> BlockTable:
        return self._manager.table(self.sequence_id)

    @property
    def seq_len(self) -> int:
        """Tokens in the cache."""
        return self.page_table.num_tokens - self._num_ahead

    @property
    def capacity(self) -> int:
        """Tokens in the cache and held ahead of use."""
        return self.page_table.num_tokens

    @property
    def needs_new_page(self) -> bool:
        """The next token does not fit into the last page."""
        return self.seq_len % self._manager.block_size == 0

    @property
    def block_ids(self) -> list[int]:
        """The sequence's blocks, in order of position."""
        return self._manager.block_ids_of(self.sequence_id)[: self._manager.blocks_for(self.seq_len)]

    def reserve(self, num_tokens: int) -> list[StatePass]:
        """Make room for a pass that will write the next `num_tokens`; shared blocks are copied now.

        Returns the recurrent states of the pass: one entry, or none if the model has no recurrent layers.
        """
        num_tokens = whole("a number of tokens", num_tokens)
        with self._manager.lock:
            start = self.seq_len
            held = min(num_tokens, self._num_ahead)
            self._manager.append(self.sequence_id, num_tokens - held)
            self._num_ahead -= held
            self._manager.run_moves([self.storage])
            if not self._manager.has_states:
                return []
            return self._manager.use_states([StateRequest(self.sequence_id, start, num_tokens)])

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; blocks held ahead of use stay held."""
        if whole("a number of tokens", num_tokens, most=self.seq_len) == 0:
            self.rope = None
        if self._manager.has_states:
            self._num_ahead = 0
            self._manager.truncate(self.sequence_id, num_tokens)
        elif self._num_ahead:
            self._num_ahead += self.seq_len - num_tokens
        else:
            self._manager.truncate(self.sequence_id, num_tokens)

    def close(self) -> None:
        """Release the sequence's blocks."""
        self._manager.release(self.sequence_id)

    def append(self, keys: Array, values: Array) -> None:
        """Add the keys and values of one token, each [num_layers, num_kv_heads, head_dim], or a list by layer.

        Raises `OutOfBlocksError` with nothing changed. Earlier entries stay in place.
        """
        storage, manager = self.storage, self._manager
        expected = list(storage.layout.layer_heads)
        try:
            found = [[tuple(rows.shape) for rows in part] for part in (keys, values)]
        except (TypeError, AttributeError):
            raise CacheError("one token's keys and values are arrays, or lists of arrays by layer") from None
        if found != [expected, expected]:
            raise CacheError(f"one token's keys and values have shape {expected} by layer, not {found[0]}")
        with manager.lock:
            position = self.seq_len
            self.reserve(1)
            index = storage.indices(self.page_table.cache_index(position, position + 1))
            for layer in range(storage.num_layers):
                storage.write(layer, index, keys[layer][None], values[layer][None])

    def pages(self) -> list[Page]:
        """The sequence's pages, in order of position."""
        return [self._manager.get_block(block_id).of(self.storage) for block_id in self.block_ids]

    def keys(self, layer: int) -> list[Array]:
        """One view [num_kv_heads, tokens, head_dim] per page, the last one cut at the sequence's end."""
        return self._views(_of_layer(self.storage.keys, layer))

    def values(self, layer: int) -> list[Array]:
        """One view [num_kv_heads, tokens, head_dim] per page, the last one cut at the sequence's end."""
        return self._views(_of_layer(self.storage.values, layer))

    def _views(self, array: Array) -> list[Array]:
        size = self.storage.block_size
        with self._manager.lock:
            counts = range(self.seq_len, 0, -size)  # tokens from each page's start to the end
            return [array[block_id][:, :count] for block_id, count in zip(self.block_ids, counts, strict=True)]


def _of_layer(arrays: Any, layer: int) -> Array:
    return arrays[whole("a layer", layer, most=len(arrays) - 1)]
