"""Storage of keys and values: one K and one V array per layer, holding all blocks.

    keys[layer]    [num_blocks, num_kv_heads, block_size, head_dim]
    values[layer]  the same

A recurrent layer has no blocks; its states are in `convolutions` and `recurrent`, one entry for each state id.
Within a block one head's tokens are contiguous, the order in which attention reads them. A kernel set creates its
storage (`KernelSet.new_storage`), since its kernels read and write it. Allocation of blocks to sequences is in
`KVCacheBlockManager`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from bifolio.config import KVDtype, ModelConfig
from bifolio.errors import CacheError, ConfigError, MissingDependencyError
from bifolio.kernels.block_copies import BlockCopies
from bifolio.kernels.q8_rows import Q8_BLOCK, Q8_POISON, decode_q8_rows, encode_q8_rows, q8_head_dim, q8_row_bytes
from bifolio.quant.formats import BF16_NAN, bf16_to_f32, f32_to_bf16

Array = Any  # numpy.ndarray or torch.Tensor: only indexing that both support is used here
_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8": 1, "q8_0": 1}
_NUMPY_DTYPES: dict[str, npt.DTypeLike] = {
    "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "fp8": np.uint8, "q8_0": np.uint8
}  # fmt: skip
FP8_NAN, FP8_LARGEST = 0x7F, 448.0  # of E4M3


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The sizes of one recurrent layer's state: f32[width - 1, channels] and f32[heads, key_size, value_size]."""

    width: int  # taps of the convolution
    channels: int
    heads: int = 0  # 0: the convolution has all of the state
    key_size: int = 0
    value_size: int = 0

    @property
    def bytes_per_state(self) -> int:
        return 4 * ((self.width - 1) * self.channels + self.heads * self.key_size * self.value_size)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The dimensions of a paged cache, and its size in bytes before allocation."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype = "f32"
    poison: bool = False  # blocks start as NaN, so that reads of unwritten entries are detected
    shared_values: bool = False  # values are the keys: attention over cached latents stores one row for both
    states: tuple[StateLayout, ...] = ()  # of the recurrent layers; `num_layers` counts the layers with attention
    num_states: int = 0  # state 0, the empty one, included
    heads: tuple[tuple[int, int], ...] = ()  # (num_kv_heads, head_dim) of each layer, where layers differ

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: KVDtype = "f32",
        poison: bool = False,
        num_states: int = 0,
    ) -> CacheLayout:
        """The cache of a model: keys and values of the layers that compute some, and states of recurrent layers.

        `num_states` counts for a model with such layers: the draft model of a hybrid has none.
        """
        own = config.recurrent
        state = None if own is None else StateLayout(own.width, own.channels, own.heads, own.key_size, own.value_size)
        layers = config.cached_layers
        keys: tuple[tuple[int, int], ...] = ()
        if config.mla is not None:
            keys = ((1, config.mla.index_size),) * len(config.indexed_layers)
        keys += tuple((1, columns) for _, columns in config.entry_rows)
        differ = keys or any(layer.head_dim or layer.kv_heads for layer in config.layers)
        rows = tuple((config.kv_heads(layer), config.head_size(layer)) for layer in layers)
        return cls(
            len(layers) + len(keys) or 1,  # without attention there are blocks that nothing reads: they name prefixes
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            poison,
            shared_values=config.mla is not None or config.compressed is not None,
            states=() if own is None or state is None else (state,) * len(config.recurrent_layers),
            num_states=0 if own is None else num_states,
            heads=(*rows, *keys) if differ else (),
        )

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim) < 1:
            raise ConfigError("every dimension of the KV storage must be at least 1")
        if len(self.heads) not in (0, self.num_layers) or any(min(heads) < 1 for heads in self.heads):
            raise ConfigError(f"the heads of {self.num_layers} layers of the KV storage are not {self.heads}")
        if self.dtype not in _BYTES:
            raise ConfigError(f"the KV cache cannot be stored as {self.dtype!r}: choose one of {', '.join(_BYTES)}")

    @property
    def layer_heads(self) -> tuple[tuple[int, int], ...]:
        """(num_kv_heads, head_dim) of each layer."""
        return self.heads or ((self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, keys and values together."""
        rows = sum(count * self.row_width(size) for count, size in self.layer_heads)
        return (1 if self.shared_values else 2) * rows * _BYTES[self.dtype]

    def row_width(self, head_dim: int) -> int:
        """Elements of the row of one head, in the storage's own type."""
        return q8_row_bytes(head_dim) if self.dtype == "q8_0" else head_dim

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in all layers, keys and values together."""
        return self.block_size * self.bytes_per_token

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one sequence's state in all recurrent layers."""
        return sum(state.bytes_per_state for state in self.states)


class BlockMover(Protocol):
    """A store of blocks: a `KVStorage`, or the storages of other processes."""

    def move_blocks(self, moves: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst), as if all sources were read before the first write."""
        ...

    def poison_blocks(self, block_ids: Iterable[int]) -> None:
        """Fill blocks with NaN."""
        ...


class KVStorage:
    """All keys and values of one model, in blocks.

    With the numpy backend, bf16 is held as uint16 and converted exactly (round to nearest even) at write and gather;
    q8_0 is held as rows of bytes (`encode_q8_rows`), so that the last dimension is the bytes of a row. fp8 is E4M3 on a
    GPU, where larger numbers than 448 become 448. Memory is
    allocated lazily on the CPU: an unused block takes none. Block 0, the padding block, is never poisoned, since
    padding may read it.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        device: str = "cpu",
        backend: Literal["numpy", "torch"] = "numpy",
        arena: Any = None,  # `SleepMemory`, whose `zeros` allocates all arrays; torch alone
    ) -> None:
        if backend == "numpy" and device != "cpu":
            raise ConfigError(f"numpy arrays cannot be stored on {device!r}: use backend='torch'")
        sizes = {size for _, size in layout.layer_heads}
        if layout.dtype == "q8_0" and (backend != "numpy" or any(size % Q8_BLOCK for size in sizes)):
            raise ConfigError(
                f"a q8_0 cache needs the CPU kernels and a head dimension that is a multiple of {Q8_BLOCK}, "
                f"not {', '.join(map(str, sorted(sizes)))} on {backend}: use f16"
            )
        if layout.dtype == "fp8" and backend == "numpy":
            raise ConfigError("an fp8 cache needs a GPU: use q8_0 on a CPU")
        self.layout = layout
        self.num_layers, self.num_blocks, self.block_size = layout.num_layers, layout.num_blocks, layout.block_size
        self.num_kv_heads, self.head_dim, self.dtype = layout.num_kv_heads, layout.head_dim, layout.dtype
        self.device, self.backend, self._arena = device, backend, arena
        shapes = [
            (self.num_blocks, count, self.block_size, layout.row_width(size)) for count, size in layout.layer_heads
        ]
        self.keys: list[Array] = [self._allocate(shape) for shape in shapes]
        self.values: list[Array] = self.keys if layout.shared_values else [self._allocate(shape) for shape in shapes]
        count = layout.num_states
        self.convolutions: list[Array] = [  # f32[states, width - 1, channels], the oldest token first
            self._zeros((count, state.width - 1, state.channels)) for state in layout.states
        ]
        self.recurrent: list[Array] = [  # f32[states, heads, key_size, value_size]; no heads: a convolution alone
            self._zeros((count, state.heads, state.key_size, state.value_size)) for state in layout.states
        ]
        if layout.poison:
            self.poison_blocks(range(1, self.num_blocks))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool when every block and every state is touched."""
        return self.num_blocks * self.layout.bytes_per_block + self.layout.num_states * self.layout.bytes_per_state

    @property
    def is_read_back(self) -> bool:
        """Whether attention reads new keys and values from here, too: with few bits cached prefixes would differ."""
        return self.dtype == "fp8"

    # -- moving data -------------------------------------------------------------------------------------------------

    def write(self, layer: int, index: Array, keys: Array, values: Array) -> None:
        """Store one layer's keys and values of t tokens.

        index: i64[t], block_id * block_size + offset. keys, values: [t, kv heads, head size] of the layer.
        Entries of block 0 are for padding and never read. For a repeated index either value may be stored. Shared
        values are not stored.
        """
        blocks, offsets = index // self.block_size, index % self.block_size
        self._cells(self.keys[layer])[blocks, :, offsets] = self._encode(keys)
        if not self.layout.shared_values:
            self._cells(self.values[layer])[blocks, :, offsets] = self._encode(values)

    def gather(self, layer: int, block_ids: Sequence[int], length: int) -> tuple[Array, Array]:
        """Contiguous copies [length, kv heads, head size] of keys and values; f32 from numpy, else as stored."""
        return self._gather(self.keys[layer], block_ids, length), self._gather(self.values[layer], block_ids, length)

    def keys_at(self, layer: int, block_ids: Array, positions: Array) -> Array:
        """Copies [*positions, kv heads, head size] of the keys at positions of a sequence; f32 from numpy."""
        array, places, offsets = self.keys[layer], positions // self.block_size, positions % self.block_size
        if self.backend == "torch":
            blocks = _import_torch().as_tensor(block_ids, device=self.device)[places].long()
            return self._cells(array)[blocks, :, offsets].view(array.dtype)
        return self._decoded(array[block_ids[places], :, offsets])

    def read_block(self, block_id: int) -> np.ndarray:
        """u8[block bytes]: a copy of one block, the keys of all layers and then the values, as stored."""
        return np.concatenate([_bytes_of(array[block_id]) for array in self._arrays()])

    def write_block(self, block_id: int, data: np.ndarray) -> None:
        """Store the bytes of `read_block` of a storage with the same layout."""
        self.write_blocks([block_id], data[None])

    def write_blocks(self, block_ids: Sequence[int], data: np.ndarray) -> None:
        """Store u8[n, block bytes]: one copy for each array, where the storage is in numpy's."""
        if data.dtype != np.uint8 or data.shape != (len(block_ids), self.layout.bytes_per_block):
            raise CacheError(f"a block has {self.layout.bytes_per_block} bytes, not {data.size // len(block_ids)}")
        _put_bytes(self._arrays(), block_ids, data)

    def pack_blocks(self, block_ids: Sequence[int], packed: Array) -> None:
        """Copy whole blocks to u8[n, block bytes] on the device, in the order of `read_block`; torch tensors alone."""
        from bifolio.kernels.torch_copies import pack

        pack([self._cells(array) for array in self._arrays()], self.indices(block_ids), packed)

    def unpack_blocks(self, block_ids: Sequence[int], packed: Array) -> None:
        """The reverse of `pack_blocks`."""
        from bifolio.kernels.torch_copies import unpack

        unpack([self._cells(array) for array in self._arrays()], self.indices(block_ids), packed)

    def new_copies(self, pinned_bytes: int) -> BlockCopies | None:
        """Copies between the device and `pinned_bytes` of host memory; None where the cache is in host memory."""
        if self.backend == "numpy":
            return None
        from bifolio.kernels.torch_copies import TorchCopies

        return TorchCopies(self, pinned_bytes)

    def read_state(self, state: int) -> np.ndarray:
        """u8[state bytes]: a copy of one state, all convolutions and then all recurrences."""
        return np.concatenate([_bytes_of(array[state]) for array in self._state_arrays()])

    def write_state(self, state: int, data: np.ndarray) -> None:
        """Store the bytes of `read_state` of a storage with the same layout."""
        if data.dtype != np.uint8 or data.shape != (self.layout.bytes_per_state,):
            raise CacheError(f"a state has {self.layout.bytes_per_state} bytes, not {data.size}")
        _put_bytes(self._state_arrays(), [state], data[None])

    def move_blocks(self, moves: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst) in every layer, as if all sources were read before the first write."""
        pairs = list(moves)
        if not pairs:
            return
        sources, destinations = self.indices(src for src, _ in pairs), self.indices(dst for _, dst in pairs)
        for array in map(self._cells, self._arrays()):
            array[destinations] = array[sources]  # the right side is a copy: sources are read first

    def poison_blocks(self, block_ids: Iterable[int]) -> None:
        """Fill blocks with NaN, so that a pass that reads them computes NaN. Fits `KVCacheBlockManager.on_free`."""
        targets = self.indices(block_ids)
        nan: Any = BF16_NAN if self.backend == "numpy" and self.dtype == "bf16" else float("nan")
        if self.dtype == "q8_0":
            nan = Q8_POISON
        elif self.dtype == "fp8":
            nan = FP8_NAN
        for array in map(self._cells, self._arrays()):
            array[targets] = nan

    def poison_state(self, state: int) -> None:
        """Fill a state with NaN: debugging, so that reads of states without content are noticed."""
        for array in self._state_arrays():
            array[state] = float("nan")

    # -- internal ----------------------------------------------------------------------------------------------------

    def _arrays(self) -> list[Array]:
        return self.keys if self.layout.shared_values else [*self.keys, *self.values]

    def _cells(self, array: Array) -> Array:
        """An array as torch indexes it: FP8 as bytes."""
        return array.view(_import_torch().uint8) if self.dtype == "fp8" else array

    def _state_arrays(self) -> list[Array]:
        return [*self.convolutions, *self.recurrent]

    def _allocate(self, shape: tuple[int, ...]) -> Array:
        if self.backend == "numpy":
            return np.zeros(shape, dtype=_NUMPY_DTYPES[self.dtype])
        torch = _import_torch()
        dtype = {
            "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn
        }[self.dtype]  # fmt: skip
        if self._arena is not None:
            return self._arena.zeros(shape, dtype)
        if self.device == "cpu":  # numpy's zeros are lazily mapped pages; torch's are written
            return torch.from_numpy(np.zeros(shape, dtype=_NUMPY_DTYPES[self.dtype])).view(dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        """f32 zeros, mapped lazily on a CPU."""
        if self._arena is not None:
            return self._arena.zeros(shape, _import_torch().float32)
        if self.backend == "numpy" or self.device == "cpu":
            zeros = np.zeros(shape, dtype=np.float32)
            return zeros if self.backend == "numpy" else _import_torch().from_numpy(zeros)
        return _import_torch().zeros(shape, device=self.device)

    def _encode(self, data: Array) -> Array:
        if self.dtype == "fp8":
            return self._cells(data.clamp(-FP8_LARGEST, FP8_LARGEST).to(self.keys[0].dtype))
        if self.backend == "torch":
            return data.to(self.keys[0].dtype)
        if self.dtype == "q8_0":
            return encode_q8_rows(data)
        return f32_to_bf16(data) if self.dtype == "bf16" else data

    def _gather(self, array: Array, block_ids: Sequence[int], length: int) -> Array:
        if length > len(block_ids) * self.block_size:
            raise CacheError(f"{length} tokens are requested and {len(block_ids)} blocks hold fewer")
        if self.backend == "torch":
            blocks = self._cells(array)[self.indices(block_ids)].view(array.dtype).transpose(1, 2)
            return blocks.reshape(-1, array.shape[1], array.shape[-1])[:length]
        blocks = array[self.indices(block_ids)].transpose(0, 2, 1, 3)
        return self._decoded(blocks.reshape(-1, array.shape[1], array.shape[-1])[:length])

    def _decoded(self, rows: np.ndarray) -> np.ndarray:
        """f32 of rows as stored by numpy."""
        if self.dtype == "q8_0":
            return decode_q8_rows(rows, q8_head_dim(rows.shape[-1]))
        return bf16_to_f32(rows) if self.dtype == "bf16" else rows.astype(np.float32, copy=False)

    def indices(self, numbers: Iterable[int]) -> Array:
        """i64[n] on the device of the keys and values."""
        indices = np.fromiter(numbers, dtype=np.int64)
        if self.backend == "numpy":
            return indices
        return _import_torch().from_numpy(indices).to(self.device)


def _bytes_of(array: Array) -> np.ndarray:
    """u8[n]: the bytes of a numpy array or of a tensor on any device."""
    if not isinstance(array, np.ndarray):
        array = array.reshape(-1).view(_import_torch().uint8).cpu().numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _put_bytes(arrays: Sequence[Array], indices: Sequence[int], data: np.ndarray) -> None:
    """Fill array[indices] of each array with its columns of u8[n, bytes], one part after the other."""
    start = 0
    for array in arrays:
        shape = tuple(array.shape[1:])
        part = data[:, start : start + math.prod(shape) * array.itemsize]
        start += part.shape[1]
        if isinstance(array, np.ndarray):
            array[indices] = part.view(array.dtype).reshape(len(indices), *shape)  # a view, split along its rows
        elif part.shape[1]:
            for index, own in zip(indices, part, strict=True):
                array[index] = _import_torch().from_numpy(own.copy()).to(array.device).view(array.dtype).reshape(shape)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("a KV storage on torch needs torch: pip install 'bifolio[gpu]'") from error
    return torch


def poison_in(storages: list[BlockMover]) -> Callable[[list[int]], None]:
    """A function that fills blocks with NaN in all of these storages, later ones included."""

    def poison(block_ids: list[int]) -> None:
        for storage in storages:
            storage.poison_blocks(block_ids)

    return poison
