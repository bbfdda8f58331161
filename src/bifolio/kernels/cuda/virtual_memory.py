"""`CudaPages`: virtual memory management of the CUDA driver, through ctypes.

A range of addresses is reserved once. Physical memory of the device is mapped into it and unmapped again, and the
addresses in tensors and captured graphs stay valid. Pinned memory of the host is made of huge pages, filled by several
threads: `cudaHostAlloc` takes longer than the copy itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from bifolio.errors import DeviceMemoryError

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
VMM_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
PINNED, DEVICE, READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, ..._PROT_READWRITE
RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
HUGE_PAGE = 2 << 20
PINNED_CHUNK = 256 << 20  # bytes that one thread fills and pins at a time
PINNING_THREADS = 8


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ADDRESS, _SIZE, _FLAGS, _STREAM = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (ctypes.c_void_p, ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.c_void_p,),
    "cuCtxSynchronize": (),
    "cuStreamCreate": (ctypes.c_void_p, ctypes.c_uint),
    "cuMemGetAllocationGranularity": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (ctypes.c_void_p, _SIZE, _SIZE, _ADDRESS, _FLAGS),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemCreate": (ctypes.c_void_p, _SIZE, ctypes.c_void_p, _FLAGS),
    "cuMemRelease": (ctypes.c_uint64,),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, ctypes.c_uint64, _FLAGS),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemSetAccess": (_ADDRESS, _SIZE, ctypes.c_void_p, _SIZE),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, _ADDRESS, _SIZE, _STREAM),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, ctypes.c_void_p, _SIZE, _STREAM),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_ubyte, _SIZE, _STREAM),
    "cuMemHostRegister_v2": (ctypes.c_void_p, _SIZE, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuGetErrorString": (ctypes.c_int, ctypes.c_void_p),
}


class _Bytes:
    """Bytes on the device for `torch.as_tensor`, and their owner."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
            "stream": None,
        }  # fmt: skip


class PinnedBytes:
    """Pinned memory of the host; it is given back when the object is dropped."""

    def __init__(self, pages: CudaPages, num_bytes: int) -> None:
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.address = -(-start // HUGE_PAGE) * HUGE_PAGE
        registered: list[int] = []
        weakref.finalize(self, _unpin, pages, registered, mapping).atexit = False

        def pin(offset: int) -> None:
            size = min(PINNED_CHUNK, num_bytes - offset)
            ctypes.memset(self.address + offset, 0, size)  # of the pages, by several threads
            with pages.current():
                call("cuMemHostRegister_v2", self.address + offset, size, PORTABLE)
            registered.append(self.address + offset)

        with ThreadPoolExecutor(min(PINNING_THREADS, os.cpu_count() or 1), "bifolio-pinning") as threads:
            list(threads.map(pin, range(0, num_bytes, PINNED_CHUNK)))


def _unpin(pages: CudaPages, registered: list[int], mapping: mmap.mmap) -> None:
    if sys.is_finalizing():
        return
    with pages.current():
        for address in registered:
            call("cuMemHostUnregister", address)
    del mapping


class CudaPages:
    """`Pages` of one GPU, in the context that torch uses."""

    def __init__(self, device: str) -> None:
        self.device = torch.zeros(1, device=device).device  # with its number; creates the context
        number, self._context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        call("cuDeviceGet", ctypes.byref(number), self.device.index or 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number.value)
        supported = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(supported), VMM_SUPPORTED, number.value)
        if not supported.value:
            raise DeviceMemoryError(f"the driver of {device} cannot map memory at given addresses")
        location = _Location(DEVICE, number.value)
        self._properties = _Properties(PINNED, 0, location, None)
        self._access = _Access(location, READ_WRITE)
        size = ctypes.c_size_t()
        with self.current():
            call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), RECOMMENDED)
            call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        self.granularity = max(size.value, 1)
        self._stream = stream

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context the current one of this thread."""
        call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    # -- addresses and memory ------------------------------------------------------------------------------------------
    def reserve(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        with self.current():
            call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
        return address.value

    def unreserve(self, address: int, num_bytes: int) -> None:
        with self.current():
            call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int) -> int:
        handle = ctypes.c_uint64()
        with self.current():
            call("cuMemCreate", ctypes.byref(handle), num_bytes, ctypes.byref(self._properties), 0)
            try:
                call("cuMemMap", address, num_bytes, 0, handle.value, 0)
                try:
                    call("cuMemSetAccess", address, num_bytes, ctypes.byref(self._access), 1)
                except BaseException:
                    call("cuMemUnmap", address, num_bytes)
                    raise
            except BaseException:
                call("cuMemRelease", handle.value)
                raise
        return handle.value

    def unmap(self, address: int, num_bytes: int, handle: int) -> None:
        with self.current():
            call("cuMemUnmap", address, num_bytes)
            call("cuMemRelease", handle)

    def bytes_at(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        found = torch.as_tensor(_Bytes(address, num_bytes, owner), device=self.device)
        if found.data_ptr() != address:
            raise DeviceMemoryError("torch copies memory at given addresses instead of using it")
        return found

    # -- copies --------------------------------------------------------------------------------------------------------
    def pin(self, num_bytes: int) -> PinnedBytes:
        try:
            return PinnedBytes(self, num_bytes)
        except (MemoryError, OSError) as error:
            raise DeviceMemoryError(f"the host has no {num_bytes >> 20} MiB for sleeping weights: {error}") from error

    def to_host(self, target: int, source: int, num_bytes: int) -> None:
        with self.current():
            call("cuMemcpyDtoHAsync_v2", target, source, num_bytes, self._stream)

    def to_device(self, target: int, source: int, num_bytes: int) -> None:
        with self.current():
            call("cuMemcpyHtoDAsync_v2", target, source, num_bytes, self._stream)

    def clear(self, address: int, num_bytes: int) -> None:
        with self.current():
            call("cuMemsetD8Async", address, 0, num_bytes, self._stream)

    def synchronize(self) -> None:
        with self.current():
            call("cuCtxSynchronize")

    def release_cached(self) -> None:
        torch.cuda.empty_cache()


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver; DeviceMemoryError where it fails."""
    driver = _driver()
    status = getattr(driver, name)(*arguments)
    if not status:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    advice = ": let other engines sleep, or end them" if status == OUT_OF_MEMORY else ""
    raise DeviceMemoryError(f"{name} of the CUDA driver: {(text.value or b'').decode()} ({status}){advice}")


@cache
def _driver() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
    except (OSError, AttributeError) as error:
        raise DeviceMemoryError(f"the CUDA driver cannot map memory at given addresses: {error}") from error
    return library
