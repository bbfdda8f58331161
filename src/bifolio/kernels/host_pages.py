"""`HostPages`: `Pages` of a device that is the host itself, so that an `Arena` can be tried without a GPU.

Unmapped memory is returned to the system, and mapped memory begins with garbage, as on a device.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from bifolio.errors import DeviceMemoryError

GARBAGE = 0xA5


class _Bytes:
    """Memory of the process, by its address."""

    def __init__(self, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def drop(self, start: int, num_bytes: int) -> None:
        """Return pages to the system; they are zeros when they are read again."""
        self._mapping.madvise(mmap.MADV_DONTNEED, start, num_bytes)


class HostPages:
    """Bookkeeping as strict as a driver's: a range is mapped once, and unmapped by its own handle."""

    device = torch.device("cpu")
    granularity = mmap.PAGESIZE

    def __init__(self, most: int | None = None) -> None:
        self.most = most  # bytes that can be mapped at a time; None: no limit
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> (bytes, handle)
        self.num_copied = 0  # bytes to the host and back
        self._ranges: dict[int, _Bytes] = {}
        self._handles = 0

    @property
    def num_mapped(self) -> int:
        return sum(size for size, _ in self.mapped.values())

    def reserve(self, num_bytes: int) -> int:
        taken = _Bytes(num_bytes)
        self._ranges[taken.address] = taken
        return taken.address

    def unreserve(self, address: int, num_bytes: int) -> None:
        if any(address <= start < address + num_bytes for start in self.mapped):
            raise DeviceMemoryError("a range with mapped memory is given back")
        del self._ranges[address]

    def map(self, address: int, num_bytes: int) -> int:
        if address in self.mapped or num_bytes % self.granularity or address % self.granularity:
            raise DeviceMemoryError(f"{num_bytes} bytes cannot be mapped at {address:#x}")
        if self.most is not None and self.num_mapped + num_bytes > self.most:
            raise DeviceMemoryError(f"no memory for {num_bytes} bytes")
        self._handles += 1
        self.mapped[address] = num_bytes, self._handles
        ctypes.memset(address, GARBAGE, num_bytes)
        return self._handles

    def unmap(self, address: int, num_bytes: int, handle: int) -> None:
        if self.mapped.pop(address, None) != (num_bytes, handle):
            raise DeviceMemoryError(f"{num_bytes} bytes at {address:#x} are not mapped by {handle}")
        base, taken = next(
            (base, taken) for base, taken in self._ranges.items() if base <= address < base + _size(taken)
        )
        taken.drop(address - base, num_bytes)

    def bytes_at(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        content = (ctypes.c_uint8 * num_bytes).from_address(address)
        content.owner = (owner, self._ranges[address])  # type: ignore[attr-defined]
        return torch.frombuffer(content, dtype=torch.uint8)

    def pin(self, num_bytes: int) -> _Bytes:
        return _Bytes(num_bytes)

    def to_host(self, target: int, source: int, num_bytes: int) -> None:
        self._copy(target, source, num_bytes)

    def to_device(self, target: int, source: int, num_bytes: int) -> None:
        self._copy(target, source, num_bytes)

    def clear(self, address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0, num_bytes)

    def synchronize(self) -> None:
        pass

    def release_cached(self) -> None:
        pass

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)
        self.num_copied += num_bytes


def _size(taken: _Bytes) -> int:
    return len(taken._mapping)
