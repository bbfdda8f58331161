"""`BlockCopies` of a storage on torch tensors: streams of their own on a GPU, plain copies elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bifolio.kernels.block_copies import HostRead
from bifolio.kernels.storage import KVStorage

PIECE_BYTES = 32 << 20  # that are unpacked by one launch
PINNED_PIECE_BYTES = 1 << 30  # of one allocation: torch rounds its size up to a power of two


class PinnedPool:
    """Slots of one size in pinned memory. A slot returns when the last array on it is dropped."""

    def __init__(self, slot_bytes: int, num_bytes: int, *, pinned: bool) -> None:
        self.slot_bytes = slot_bytes
        self._lock = threading.RLock()  # slots return whenever an array is collected
        self._pieces: list[torch.Tensor] = []
        self._free: list[int] = []  # addresses
        per_piece = max(PINNED_PIECE_BYTES // slot_bytes, 1)
        left = -(-num_bytes // slot_bytes)
        while left > 0:
            count = min(left, per_piece)
            left -= count
            piece = torch.empty(count * slot_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._pieces.append(piece)
            self._free += [piece.data_ptr() + slot_bytes * number for number in range(count)]
        self._free.reverse()

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> np.ndarray | None:
        """u8[slot bytes]; None if all slots are in use."""
        with self._lock:
            if not self._free:
                return None
            address = self._free.pop()
        slot = (ctypes.c_uint8 * self.slot_bytes).from_address(address)
        weakref.finalize(slot, self._return, address).atexit = False
        content: np.ndarray = np.frombuffer(memoryview(slot), np.uint8)  # it and its views hold the slot
        return content

    def _return(self, address: int) -> None:
        with self._lock:
            self._free.append(address)


class TorchCopies:
    """Copies of blocks and states; made on the thread that owns the engine, on its stream."""

    def __init__(self, storage: KVStorage, pinned_bytes: int) -> None:
        self._storage = storage
        self._device = torch.device(storage.device)
        self._block_bytes, self._state_bytes = storage.layout.bytes_per_block, storage.layout.bytes_per_state
        is_cuda = self._device.type == "cuda"
        cuda: Any = torch.cuda
        self._compute = cuda.current_stream(self._device) if is_cuda else None
        self._out = cuda.Stream(self._device) if is_cuda else None
        self._in = cuda.Stream(self._device) if is_cuda else None
        self._pool = PinnedPool(self._block_bytes, pinned_bytes, pinned=is_cuda)
        count = max(PIECE_BYTES // self._block_bytes, 1)
        self._pieces = torch.empty((count, self._block_bytes), dtype=torch.uint8, device=self._device)
        storage.pack_blocks([0], self._pieces[:1])  # kernels are compiled here, not beside the first steps
        storage.unpack_blocks([0], self._pieces[:1])

    def allocate(self, num_bytes: int) -> np.ndarray:
        slot = self._pool.take() if num_bytes == self._block_bytes else None
        return np.empty(num_bytes, np.uint8) if slot is None else slot

    # -- out of the device ---------------------------------------------------------------------------------------------
    def read_block(self, block_id: int) -> HostRead:
        with _on(self._compute):
            packed = self._room(self._block_bytes)
            self._storage.pack_blocks([block_id], packed.view(1, -1))
            return self._read(packed)

    def read_state(self, state: int) -> HostRead:
        with _on(self._compute):
            packed, start = self._room(self._state_bytes), 0
            for array in self._states():
                part = _bytes(array[state])
                packed[start : start + part.numel()] = part
                start += part.numel()
            return self._read(packed)

    def _room(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError("the device has no room for a copy of a block") from error

    def _read(self, packed: torch.Tensor) -> HostRead:
        """The copy to the host, which begins when it is waited for."""
        packed_at = self.mark()

        def finish() -> np.ndarray:
            content = self.allocate(packed.numel())
            with _on(self._out):
                _wait_for(self._out, packed_at)
                torch.from_numpy(content).copy_(packed, non_blocking=True)
                _synchronize(_recorded(self._out))
            return content

        return HostRead(packed.numel(), finish)

    # -- into the device -----------------------------------------------------------------------------------------------
    def mark(self) -> Any:
        return _recorded(self._compute)

    def write_blocks(self, block_ids: Sequence[int], blocks: Sequence[np.ndarray], after: Any) -> None:
        most = len(self._pieces)
        with _on(self._in):
            _wait_for(self._in, after)
            for first in range(0, len(block_ids), most):
                part = blocks[first : first + most]
                for piece, block in zip(self._pieces, part, strict=False):
                    piece.copy_(torch.from_numpy(block), non_blocking=True)
                self._storage.unpack_blocks(block_ids[first : first + most], self._pieces[: len(part)])

    def finish_writes(self) -> None:
        _synchronize(_recorded(self._in))

    def upload_state(self, data: np.ndarray) -> torch.Tensor:
        with _on(self._in):
            uploaded = torch.from_numpy(data).to(self._device, copy=True)
            _synchronize(_recorded(self._in))
        return uploaded

    def write_state(self, state: int, uploaded: torch.Tensor) -> None:
        with _on(self._compute):
            start = 0
            for array in self._states():
                target = _bytes(array[state])
                target.copy_(uploaded[start : start + target.numel()])
                start += target.numel()
            if self._compute is not None:
                uploaded.record_stream(self._compute)

    def _states(self) -> list[torch.Tensor]:
        return [*self._storage.convolutions, *self._storage.recurrent]


def pack(arrays: Sequence[torch.Tensor], ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy blocks of all arrays to u8[n, block bytes], one array after the other."""
    start = 0
    for array in arrays:
        part = array[ids].reshape(len(ids), -1).view(torch.uint8)
        packed[:, start : start + part.shape[1]] = part
        start += part.shape[1]


def unpack(arrays: Sequence[torch.Tensor], ids: torch.Tensor, packed: torch.Tensor) -> None:
    """The reverse of `pack`."""
    start = 0
    for array in arrays:
        size = array[0].numel() * array.element_size()
        part = packed[:, start : start + size].contiguous().view(array.dtype)
        array[ids] = part.reshape(len(ids), *array.shape[1:])
        start += size


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """u8[n]: a view of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _on(stream: Any) -> Any:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _recorded(stream: Any) -> Any:
    """An event behind all work queued on a stream so far; None without streams."""
    return None if stream is None else stream.record_event()


def _wait_for(stream: Any, event: Any) -> None:
    if event is not None:
        stream.wait_event(event)


def _synchronize(event: Any) -> None:
    if event is not None:
        event.synchronize()
