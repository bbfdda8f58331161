"""The keys and values themselves: one K and one V array per layer, holding all blocks.

    keys[layer]    [num_blocks, num_kv_heads, block_size, head_dim]
    values[layer]  the same

Inside a block one head's tokens are contiguous, which is the order in which attention reads them. Which block belongs
to whom is `KVCacheBlockManager`'s business; nothing here counts or frees. `Page` and `KvCacheEntry` are views of one
block and of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from bifolio.cache import q8_rows
from bifolio.config import KVDtype
from bifolio.errors import CacheError, ConfigError, MissingDependencyError
from bifolio.quant.bf16 import BF16_NAN, bf16_to_f32, f32_to_bf16

if TYPE_CHECKING:
    from bifolio.cache.block_manager import KVCacheBlockManager

Array = Any  # numpy.ndarray or torch.Tensor: the two share indexing, which is all that is used here
_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 1}
_NUMPY_DTYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "q8_0": np.uint8}


class KVStorage:
    """All keys and values of one model, in blocks.

    With the numpy backend, bf16 is held as uint16 and converted exactly (round to nearest even) at write and gather;
    q8_0 is held as rows of bytes (`q8_rows`), so that the last dimension is the bytes of a row.
    Memory is asked for lazily on the CPU: an untouched block costs nothing. `poison` starts every block as NaN, so
    that reading a slot nobody wrote shows; block 0, the padding target, stays zero, since padding may read it.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KVDtype = "f32",
        *,
        device: str = "cpu",
        backend: Literal["numpy", "torch"] = "numpy",
        poison: bool = False,
    ) -> None:
        if min(num_layers, num_blocks, block_size, num_kv_heads, head_dim) < 1:
            raise ConfigError("every dimension of the KV storage must be at least 1")
        if dtype not in _BYTES:
            raise ConfigError(f"the KV cache cannot be kept in {dtype!r}: choose one of {', '.join(_BYTES)}")
        if backend == "numpy" and device != "cpu":
            raise ConfigError(f"numpy arrays cannot lie on {device!r}: use backend='torch'")
        if dtype == "q8_0" and (backend != "numpy" or head_dim % q8_rows.BLOCK):
            raise ConfigError(
                f"a q8_0 cache needs the CPU kernels and heads of a multiple of {q8_rows.BLOCK} numbers, "
                f"not {head_dim} on {backend}: use f16"
            )
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        self.device, self.backend, self.poison = device, backend, poison
        row = q8_rows.row_bytes(head_dim) if dtype == "q8_0" else head_dim
        shape = (num_blocks, num_kv_heads, block_size, row)
        self.keys: list[Array] = [self._allocate(shape) for _ in range(num_layers)]  # [blocks, kv_heads, slots, head]
        self.values: list[Array] = [self._allocate(shape) for _ in range(num_layers)]  # the same
        if poison:
            self.poison_blocks(range(1, num_blocks))

    # -- size, before anything is allocated --------------------------------------------------------------------------

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "f32") -> int:
        """Bytes that one token takes in all layers, keys and values together."""
        row = q8_rows.row_bytes(head_dim) if dtype == "q8_0" else head_dim * _BYTES[dtype]
        return 2 * num_layers * num_kv_heads * row

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str = "f32") -> int:
        """Bytes that one block takes in all layers, keys and values together."""
        return block_size * KVStorage.bytes_per_token(num_layers, num_kv_heads, head_dim, dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool when every block is touched."""
        return self.num_blocks * self.bytes_per_block(
            self.num_layers, self.block_size, self.num_kv_heads, self.head_dim, self.dtype
        )

    # -- moving data -------------------------------------------------------------------------------------------------

    def write(self, layer: int, slots: Array, keys: Array, values: Array) -> None:
        """Store one layer's keys and values of t tokens.

        slots: i64[t], block_id * block_size + offset. keys, values: [t, num_kv_heads, head_dim]. Slots of block 0
        are for padding; what is written there is never read. A slot named twice gets either value.
        """
        blocks, offsets = slots // self.block_size, slots % self.block_size
        self.keys[layer][blocks, :, offsets] = self._encode(keys)
        self.values[layer][blocks, :, offsets] = self._encode(values)

    def gather(self, layer: int, block_ids: Sequence[int], length: int) -> tuple[Array, Array]:
        """Contiguous copies [length, num_kv_heads, head_dim] of keys and values; f32 from numpy, else as stored."""
        return self._gather(self.keys[layer], block_ids, length), self._gather(self.values[layer], block_ids, length)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst) in every layer, as if all sources were read before the first write."""
        pairs = list(copies)
        if not pairs:
            return
        sources, destinations = self._indices(src for src, _ in pairs), self._indices(dst for _, dst in pairs)
        for array in (*self.keys, *self.values):
            array[destinations] = array[sources]  # the right side is a new array: sources are read first

    def poison_blocks(self, block_ids: Iterable[int]) -> None:
        """Fill blocks with NaN: whoever reads them computes NaN. Fits `KVCacheBlockManager.on_free`."""
        targets = self._indices(block_ids)
        nan: Any = BF16_NAN if self.backend == "numpy" and self.dtype == "bf16" else float("nan")
        if self.dtype == "q8_0":
            nan = q8_rows.POISON
        for array in (*self.keys, *self.values):
            array[targets] = nan

    # -- views -------------------------------------------------------------------------------------------------------

    def page(self, block_id: int, manager: KVCacheBlockManager | None = None) -> Page:
        """A view of one block; `manager` is asked how much of it is in use."""
        return Page(self, block_id, manager)

    def entry(self, sequence_id: int, manager: KVCacheBlockManager) -> KvCacheEntry:
        """A view of one sequence."""
        return KvCacheEntry(self, sequence_id, manager)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _allocate(self, shape: tuple[int, ...]) -> Array:
        if self.backend == "numpy":
            return np.zeros(shape, dtype=_NUMPY_DTYPES[self.dtype])
        torch = _import_torch()
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[self.dtype]
        if self.device == "cpu":  # numpy's zeros are untouched pages; torch's are written
            return torch.from_numpy(np.zeros(shape, dtype=_NUMPY_DTYPES[self.dtype])).view(dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _encode(self, data: Array) -> Array:
        if self.backend == "torch":
            return data.to(self.keys[0].dtype)
        if self.dtype == "q8_0":
            return q8_rows.encode_rows(data)
        return f32_to_bf16(data) if self.dtype == "bf16" else data

    def _gather(self, array: Array, block_ids: Sequence[int], length: int) -> Array:
        if length > len(block_ids) * self.block_size:
            raise CacheError(f"{length} tokens are asked for and {len(block_ids)} blocks hold fewer")
        if self.backend == "torch":
            blocks = array[self._indices(block_ids)].transpose(1, 2)  # [n, slots, heads, head]
            return blocks.reshape(-1, self.num_kv_heads, self.head_dim)[:length]
        blocks = array[self._indices(block_ids)].transpose(0, 2, 1, 3)
        flat = blocks.reshape(-1, self.num_kv_heads, array.shape[-1])[:length]
        if self.dtype == "q8_0":
            return q8_rows.decode_rows(flat, self.head_dim)
        return bf16_to_f32(flat) if self.dtype == "bf16" else flat.astype(np.float32, copy=False)

    def _indices(self, block_ids: Iterable[int]) -> Array:
        indices = np.fromiter(block_ids, dtype=np.int64)
        if self.backend == "numpy":
            return indices
        return _import_torch().from_numpy(indices).to(self.device)


class Page:
    """One block of the cache, seen through all layers; never a copy."""

    def __init__(self, storage: KVStorage, block_id: int, manager: KVCacheBlockManager | None = None) -> None:
        if not 0 <= block_id < storage.num_blocks:
            raise CacheError(f"there is no block {block_id}: the storage has blocks 0 to {storage.num_blocks - 1}")
        self.block_id = block_id
        self._storage = storage
        self._manager = manager

    def keys(self, layer: int) -> Array:
        """View [num_kv_heads, block_size, head_dim], in the storage's own type."""
        return self._storage.keys[layer][self.block_id]

    def values(self, layer: int) -> Array:
        """View [num_kv_heads, block_size, head_dim], in the storage's own type."""
        return self._storage.values[layer][self.block_id]

    @property
    def used_slots(self) -> int:
        """Token slots of this block that a row was promised."""
        if self._manager is None:
            raise CacheError("how much of a page is used is the block manager's knowledge: storage.page(id, manager)")
        return self._manager.get_block(self.block_id).token_count


class KvCacheEntry:
    """The cache of one sequence, page by page; never a copy.

    For working on a sequence outside an engine's step: `append` takes and runs all pending copies itself.
    """

    def __init__(self, storage: KVStorage, sequence_id: int, manager: KVCacheBlockManager) -> None:
        if storage.block_size != manager.block_size or storage.num_blocks < manager.num_blocks:
            raise ConfigError("this storage and this block manager were not made for each other: the shapes differ")
        self.sequence_id = sequence_id
        self._storage = storage
        self._manager = manager

    @property
    def seq_len(self) -> int:
        """Tokens in the cache."""
        return self._manager.row_num_tokens(self.sequence_id)

    @property
    def needs_new_page(self) -> bool:
        """The next token does not fit into the last page."""
        return self.seq_len % self._manager.block_size == 0

    @property
    def block_ids(self) -> list[int]:
        """The sequence's blocks, in order of position."""
        return self._manager.row_block_ids(self.sequence_id)

    def reserve(self, num_tokens: int) -> None:
        """Make room for a forward pass that will write the next `num_tokens`; copies of shared blocks run now."""
        with self._manager.lock:
            self._manager.append(self.sequence_id, num_tokens)
            self._storage.copy_blocks(self._manager.take_copies())

    def append(self, keys: Array, values: Array) -> None:
        """Add the keys and values of one token, each [num_layers, num_kv_heads, head_dim].

        Raises `OutOfBlocksError` with nothing changed. What was there does not move.
        """
        storage, manager = self._storage, self._manager
        shape = (storage.num_layers, storage.num_kv_heads, storage.head_dim)
        if tuple(keys.shape) != shape or tuple(values.shape) != shape:
            raise CacheError(f"one token's keys and values have shape {shape}, not {tuple(keys.shape)}")
        with manager.lock:
            position = self.seq_len
            manager.append(self.sequence_id, 1)
            storage.copy_blocks(manager.take_copies())
            block_id = manager.row_block_ids(self.sequence_id)[-1]
            slot = storage._indices([block_id * storage.block_size + position % storage.block_size])
            for layer in range(storage.num_layers):
                storage.write(layer, slot, keys[layer][None], values[layer][None])

    def pages(self) -> list[Page]:
        """The sequence's pages, in order of position."""
        return [Page(self._storage, block_id, self._manager) for block_id in self.block_ids]

    def keys(self, layer: int) -> list[Array]:
        """One view [num_kv_heads, tokens, head_dim] per page, the last one cut at the sequence's end."""
        return self._views(self._storage.keys[layer])

    def values(self, layer: int) -> list[Array]:
        """One view [num_kv_heads, tokens, head_dim] per page, the last one cut at the sequence's end."""
        return self._views(self._storage.values[layer])

    def _views(self, array: Array) -> list[Array]:
        size = self._storage.block_size
        with self._manager.lock:
            counts = range(self.seq_len, 0, -size)  # tokens from each page's start to the end
            return [array[block_id][:, :count] for block_id, count in zip(self.block_ids, counts, strict=True)]


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("a KV storage on torch needs torch: pip install 'bifolio[gpu]'") from error
    return torch
