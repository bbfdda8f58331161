"""`Arena`: device memory of weights and caches that is given back while an engine sleeps.

    addresses   |<------------- region: weights ------------->|      |<------- region: kv_cache ------->|
    awake       [ chunk ][ chunk ][ chunk ][ chunk ][ chunk ]        [ chunk ][ chunk ][ chunk ][ chunk ]
    asleep      reserved, without memory; contents in pinned          reserved, without memory; contents
                memory of the host                                    dropped

A region keeps its addresses for its whole life, so tensors and captured CUDA graphs that name them stay valid. Weights
do not change: their copy on the host is made once, and made again after an exchange of weights alone. The driver's
calls are those of `Pages`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import torch

from bifolio.errors import ConfigError, DeviceMemoryError

CHUNK_BYTES = 256 << 20  # that are mapped and copied together: copies of one overlap with the mapping of the next
ALIGNMENT = 512  # of tensors in a region, as of torch's own allocator
MOVED_BYTES = 1 << 30  # of weights that are in memory twice while they move into a region, at most
WEIGHTS, CACHE = "weights", "kv_cache"


class Pages(Protocol):
    """Reserving, mapping and copying of one device's memory. Copies are queued until `synchronize`."""

    device: torch.device
    granularity: int  # bytes; sizes and addresses of `reserve` and `map` are multiples of it

    def reserve(self, num_bytes: int) -> int:
        """The address of a range without memory."""
        ...

    def unreserve(self, address: int, num_bytes: int) -> None: ...

    def map(self, address: int, num_bytes: int) -> Any:
        """Put memory behind a part of a range; its contents are undefined. The handle is for `unmap`."""
        ...

    def unmap(self, address: int, num_bytes: int, handle: Any) -> None:
        """Give the memory back; no work on it is queued any more."""
        ...

    def bytes_at(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """u8[n] over mapped memory; `owner` lives as long as its storage."""
        ...

    def pin(self, num_bytes: int) -> Any:
        """Pinned memory of the host, with its `address`."""
        ...

    def to_host(self, target: int, source: int, num_bytes: int) -> None: ...

    def to_device(self, target: int, source: int, num_bytes: int) -> None: ...

    def clear(self, address: int, num_bytes: int) -> None:
        """Fill with zeros."""
        ...

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        ...

    def release_cached(self) -> None:
        """Return unused memory of other allocators to the device."""
        ...


class Region:
    """A range of addresses, in chunks of memory that come and go together."""

    def __init__(self, pages: Pages, part: str, num_bytes: int) -> None:
        self.pages, self.part = pages, part
        self.num_bytes = -(-num_bytes // pages.granularity) * pages.granularity
        self.address = pages.reserve(self.num_bytes)
        self.host: Any = None  # pinned memory for the contents
        self.is_saved = False  # `host` has the contents
        self._chunks = [
            (start, min(CHUNK_BYTES, self.num_bytes - start)) for start in range(0, self.num_bytes, CHUNK_BYTES)
        ]
        self._mapped: list[tuple[int, int, Any]] = []  # address, bytes and handle of chunks, from the first on
        weakref.finalize(self, _close, pages, self.address, self.num_bytes, self._mapped).atexit = False

    @property
    def is_mapped(self) -> bool:
        return len(self._mapped) == len(self._chunks)

    def map_to(self, stop: int) -> None:
        """Map the chunks up to this byte."""
        for start, size in self._chunks[len(self._mapped) :]:
            if start >= stop:
                break
            self._mapped.append((self.address + start, size, _map(self.pages, self.address + start, size)))

    def save(self) -> None:
        """Queue a copy of the contents to the host."""
        if self.host is None:
            self.host = self.pages.pin(self.num_bytes)
        for start, size in self._chunks:
            self.pages.to_host(self.host.address + start, self.address + start, size)

    def unmap(self) -> None:
        _unmap(self.pages, self._mapped)

    def restore(self) -> None:
        """Map all chunks, and queue a copy of the saved contents, or zeros; an error leaves the region unmapped."""
        try:
            for start, size in self._chunks:
                self.map_to(start + size)
                if self.is_saved:
                    self.pages.to_device(self.address + start, self.host.address + start, size)
                else:
                    self.pages.clear(self.address + start, size)
        except BaseException:
            self.pages.synchronize()
            self.unmap()
            raise

    def bytes(self) -> torch.Tensor:
        """u8[bytes of the region]; its storage keeps the region."""
        return self.pages.bytes_at(self.address, self.num_bytes, self)


class Arena:
    """The regions of one kernel set. A region lives as long as the tensors on it."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()

    # -- use -----------------------------------------------------------------------------------------------------------
    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the cache: asleep its contents are dropped, and it wakes as zeros."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(*shape, dtype=dtype, device=self._pages.device)
        region = self._new_region(CACHE, num_bytes)
        region.restore()
        self._pages.synchronize()
        return region.bytes()[:num_bytes].view(dtype).view(*shape)

    def adopt(self, tree: Any) -> None:
        """Move all tensors of a structure into a region of weights, in place; tensors keep shapes and strides."""
        groups = [group for group in _by_storage(tensors_of(tree)) if not self._holds(group[0])]
        sizes = [group[0].untyped_storage().nbytes() for group in groups]
        total = sum(map(_aligned, sizes))
        if not total:
            return
        region = self._new_region(WEIGHTS, total)
        region.map_to(1)
        whole, start, waiting = region.bytes(), 0, 0
        while groups:
            group, size = groups.pop(0), sizes.pop(0)
            region.map_to(start + _aligned(size))
            _move(group, whole, start)
            start += _aligned(size)
            waiting += size
            del group
            if waiting >= MOVED_BYTES or not groups:
                self._pages.synchronize()
                self._pages.release_cached()
                waiting = 0

    def refill(self, tree: Any, source: Any) -> None:
        """Copy the weights of another structure of the same shapes into the tensors of this one."""
        old, new = list(tensors_of(tree)), list(tensors_of(source))
        fits = len(old) == len(new) and all(_fits(a, b) for a, b in zip(old, new, strict=False))
        if not fits:
            raise ConfigError(
                "the new weights have other formats than those in use, whose memory they would take: make a new LLM"
            )
        self._pages.synchronize()
        pairs = {(a.data_ptr(), a.numel(), a.dtype): (a, b) for a, b in zip(old, new, strict=True)}
        for target, weights in pairs.values():
            target.copy_(weights)
        self._pages.synchronize()
        for region in self._of((WEIGHTS,)):
            region.is_saved = False

    # -- sleep ---------------------------------------------------------------------------------------------------------
    @property
    def keeps_weights(self) -> bool:
        """Whether sleeping weights can wake from the host."""
        return all(region.is_saved for region in self._of((WEIGHTS,)))

    def sleep(self, *, keep_weights: bool) -> None:
        """Give all memory back; weights are copied to the host first unless they are there already, or not kept."""
        self._pages.synchronize()
        weights = self._of((WEIGHTS,))
        saved = [region for region in weights if keep_weights and region.is_mapped and not region.is_saved]
        for region in saved:
            region.save()
        self._pages.synchronize()
        for region in saved:
            region.is_saved = True
        if not keep_weights:
            for region in weights:
                region.is_saved, region.host = False, None
        for region in list(self._regions):
            region.unmap()
        self._pages.release_cached()

    def wake(self, parts: Collection[str]) -> None:
        """Map the memory of these parts again, with its contents; an error leaves all of them asleep."""
        regions = [region for region in self._of(parts) if not region.is_mapped]
        woken: list[Region] = []
        try:
            for region in sorted(regions, key=lambda region: region.part == CACHE):
                woken.append(region)
                region.restore()
        except BaseException:
            self._pages.synchronize()
            for region in woken:
                region.unmap()
            raise
        self._pages.synchronize()

    def num_bytes(self, part: str) -> int:
        """Bytes of a part when it is awake."""
        return sum(region.num_bytes for region in self._of((part,)))

    # -- details -------------------------------------------------------------------------------------------------------
    def _new_region(self, part: str, num_bytes: int) -> Region:
        region = Region(self._pages, part, num_bytes)
        self._regions.add(region)
        return region

    def _of(self, parts: Collection[str]) -> list[Region]:
        return sorted((region for region in self._regions if region.part in parts), key=lambda region: region.address)

    def _holds(self, tensor: torch.Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        return any(region.address <= place < region.address + region.num_bytes for region in self._regions)


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of dataclasses, tuples, lists and dictionaries within each other, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_of(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            if field.name not in ("prepared_for", "host"):
                yield from tensors_of(getattr(tree, field.name))


def _by_storage(tensors: Iterator[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors on the same storage together, each once, and those that they are views of; empty ones are left out."""
    groups: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        for each in (tensor, tensor._base):  # a view keeps the storage of its base
            if each is not None and each.numel():
                groups.setdefault(each.untyped_storage().data_ptr(), {})[id(each)] = each
    return [list(group.values()) for group in groups.values()]


def _move(group: list[torch.Tensor], whole: torch.Tensor, start: int) -> None:
    """Copy the storage of some tensors to `whole`, from byte `start` on, and let them refer to it."""
    storage = group[0].untyped_storage()
    source = torch.empty(0, dtype=torch.uint8, device=group[0].device).set_(storage)
    whole[start : start + storage.nbytes()].copy_(source)
    target: Any = whole.untyped_storage()
    for tensor in group:
        first = start // tensor.element_size() + tensor.storage_offset()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = view.set_(target, first, tensor.shape, tensor.stride())


def _fits(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether a tensor can take the values of another one, without rounding."""
    is_exact = old.dtype == new.dtype or (old.dtype == torch.float32 and new.dtype in (torch.bfloat16, torch.float16))
    return is_exact and old.shape == new.shape


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _map(pages: Pages, address: int, num_bytes: int) -> Any:
    try:
        return pages.map(address, num_bytes)
    except DeviceMemoryError:
        pages.release_cached()
        return pages.map(address, num_bytes)


def _unmap(pages: Pages, mapped: list[tuple[int, int, Any]]) -> None:
    while mapped:
        pages.unmap(*mapped.pop())


def _close(pages: Pages, address: int, num_bytes: int, mapped: list[tuple[int, int, Any]]) -> None:
    """Give the memory and the addresses of a dropped region back; a process that ends gives back all."""
    if sys.is_finalizing():
        return
    pages.synchronize()
    _unmap(pages, mapped)
    pages.unreserve(address, num_bytes)
