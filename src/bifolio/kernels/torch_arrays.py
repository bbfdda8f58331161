"""The array and memory members of `KernelSet` for sets on torch tensors, on any device."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from bifolio.config import KVDtype
from bifolio.errors import ConfigError, DeviceMemoryError
from bifolio.kernels.interface import (
    Array,
    Batch,
    DeviceMemory,
    DeviceSlots,
    ExpertCalls,
    Network,
    Ranks,
    RoutedExperts,
    SharedMlp,
    SleepMemory,
    SlotSizes,
    Storage,
)
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.kernels.torch_dtypes import DTYPES
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

logger = logging.getLogger(__name__)
LARGEST_PINNED = 1 << 20  # bytes of an array that goes through pinned memory


def upload(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A copy on the device, on its way when this returns: from pageable memory it would wait for all queued work."""
    own = torch.from_numpy(np.array(array))
    if not str(device).startswith("cuda") or not 0 < own.nbytes <= LARGEST_PINNED:
        return own.to(device)
    return own.pin_memory().to(device, non_blocking=True)  # torch reuses the pinned memory after the copy


class TorchArrays:
    """Torch tensors; dense weights are in `dtype`."""

    array_backend = "torch"
    launches_ahead = False
    stores_fp8 = False
    activation_planes = 0
    ranks: Ranks | None = None
    arena: SleepMemory | None = None
    has_host_experts = False  # some experts are in the memory of the host
    host_turn: Any = None  # HostTurn of those experts, where a stream can call the kernels of the host

    def __init__(self, device: str = "cpu", dtype: str = "f32") -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"weights cannot be stored as {dtype!r}: choose one of {', '.join(DTYPES)}")
        self.device = device
        self.dtype = DTYPES[dtype]
        self.kv_dtype: KVDtype = dtype  # type: ignore[assignment]  # checked above

    def build_facts(self) -> dict[str, str]:
        facts = {"torch": str(torch.__version__)}
        return {**facts, "gpu": torch.cuda.get_device_name(self.device)} if self.device.startswith("cuda") else facts

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    # -- ranks of tensor parallelism ----------------------------------------------------------------------
    def all_gather(self, x: Array, widths: tuple[int, ...]) -> Array:
        return x if self.ranks is None else self.ranks.all_gather(self.exchanged(x), widths)

    def all_reduce(self, x: Array) -> Array:
        return x if self.ranks is None else self.ranks.all_reduce(self.exchanged(x))

    def exchanged(self, x: Array) -> Array:
        """The tensor that is sent to other ranks."""
        return x

    # -- arrays -----------------------------------------------------------------------------------------
    def from_host(self, array: np.ndarray) -> Array:
        """Copy to the device, also on the CPU: callers reuse their staging buffers."""
        return array.to(self.device) if isinstance(array, torch.Tensor) else upload(np.asarray(array), self.device)

    def to_host(self, array: Array) -> np.ndarray:
        tensor = array.detach()
        if tensor.dtype == torch.bfloat16:  # numpy has no such type
            tensor = tensor.float()
        return np.asarray(tensor.cpu().numpy())

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        """Copy to the host: asynchronously into pinned memory from a GPU, at once from elsewhere."""
        tensor = array.detach().float() if array.dtype == torch.bfloat16 else array.detach()
        if not tensor.is_cuda:
            return lambda: np.asarray(tensor.numpy())
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record()

        def wait() -> np.ndarray:
            event.synchronize()
            return np.asarray(pinned.numpy())

        return wait

    def with_rows(self, x: Array, parts: Sequence[tuple[np.ndarray, Array]]) -> Array:
        width = max(x.shape[1], *(rows.shape[1] for _, rows in parts))
        found = x.new_zeros((x.shape[0], width), dtype=torch.float32)
        found[:, : x.shape[1]] = x
        for places, rows in parts:
            found[self.from_host(np.asarray(places, np.int64))] = rows.float()
        return found

    @property
    def for_towers(self) -> Any:
        return self

    def join_columns(self, parts: Sequence[tuple[Array, int, int]], factors: Array | None = None) -> Array:
        joined = torch.cat([x[:, start:stop] for x, start, stop in parts], dim=1)
        return joined if factors is None else (joined * factors).to(joined.dtype)

    def take(self, x: Array, rows: Array) -> Array:
        return x[rows if isinstance(rows, torch.Tensor) else self.from_host(np.asarray(rows))]

    def sum_rows(self, x: Array, starts: Array) -> Array:
        lengths = self.from_host(np.diff(starts))  # unsafe: a check of lengths on a device would wait for it
        return torch.segment_reduce(x.float(), "sum", lengths=lengths, axis=0, unsafe=True)

    def given(self, batch: Batch, width: int, *, exact: bool = False) -> Array:
        return batch.given if batch.given is None or exact else batch.given.to(self.dtype)

    def tap(self, x: Array, column: int, batch: Batch) -> None:
        if batch.taps is not None:
            batch.taps[:, column : column + x.shape[1]] = x

    # -- memory -----------------------------------------------------------------------------------------
    def new_storage(self, layout: CacheLayout) -> KVStorage:
        return KVStorage(layout, device=self.device, backend="torch", arena=self.arena)

    def memory(self) -> DeviceMemory | None:
        return CudaMemory(self.device) if self.is_cuda else None

    def on_padding(self) -> AbstractContextManager[None]:
        idle: AbstractContextManager[None] = nullcontext() if self.host_turn is None else self.host_turn.idle()
        return idle

    def expert_calls(self) -> ExpertCalls | None:
        return None

    def release_memory(self) -> None:
        if self.is_cuda:
            gc.collect()  # frames of a failed step may be part of a cycle
            torch.cuda.empty_cache()

    def use_arena(self) -> None:
        if not self.is_cuda:
            return
        from bifolio.kernels.arena import Arena
        from bifolio.kernels.cuda.virtual_memory import CudaPages

        try:
            self.arena = Arena(CudaPages(self.device))
        except DeviceMemoryError as error:
            logger.warning("this engine cannot sleep: %s", error)

    # -- whole steps --------------------------------------------------------------------------------------
    def device_slots(self, network: Network, storage: Storage, sizes: SlotSizes) -> DeviceSlots | None:
        return None

    def top_logprobs(
        self, logits: Array, rows: np.ndarray, count: int
    ) -> Callable[[], tuple[np.ndarray, np.ndarray]] | None:
        """On a GPU, copy the top tokens to the host instead of all logits."""
        if not logits.is_cuda:
            return None
        if len(rows) != logits.shape[0] or not np.array_equal(rows, np.arange(len(rows))):
            logits = self.take(logits, rows)
        values, ids = torch.topk(logits, min(count, logits.shape[1]), dim=-1)
        logprobs = values - torch.logsumexp(logits, dim=-1, keepdim=True)
        packed = self.fetch(torch.cat([ids.to(torch.float64), logprobs.to(torch.float64)], dim=1))  # one copy

        def wait() -> tuple[np.ndarray, np.ndarray]:
            found = packed()
            half = found.shape[1] // 2
            return found[:, :half].astype(np.int64), found[:, half:].astype(np.float32)

        return wait

    # -- weights ------------------------------------------------------------------------------------------
    def fold_shared(self, routed: RoutedExperts, shared: SharedMlp) -> RoutedExperts | None:
        return None

    def tensor(self, value: QuantizedTensor | Array) -> torch.Tensor:
        """A weight as a dense tensor of the set's dtype on its device."""
        if isinstance(value, QuantizedTensor):
            value = dense(value)
        elif isinstance(value, np.ndarray):
            value = torch.from_numpy(np.array(value))
        return value.to(device=self.device, dtype=self.dtype)

    def vector(self, value: Array) -> torch.Tensor:
        """A norm's weights: f32 on the set's device."""
        tensor = torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
        return tensor.to(device=self.device, dtype=torch.float32)


def dense(value: QuantizedTensor) -> torch.Tensor:
    """The values of a file's tensor; 16-bit types keep their bytes, quantised ones become float32."""
    if value.format is QuantFormat.BF16:
        words = np.array(value.data).view(np.int16).reshape(value.shape)
        return torch.from_numpy(words).view(torch.bfloat16)
    if value.format is QuantFormat.F16:
        return torch.from_numpy(np.array(value.data).view(np.float16).reshape(value.shape))
    return torch.from_numpy(np.array(value.dequantize()))


class CudaMemory:
    """One GPU's memory, as reported by torch."""

    def __init__(self, device: str) -> None:
        self._cuda: Any = torch.cuda
        self._device = torch.device(device)
        self._before = 0

    def free_bytes(self) -> int:
        gc.collect()  # an engine that was dropped is a cycle, and holds its cache until then
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        return int(self._cuda.mem_get_info(self._device)[0])

    def start_peak(self) -> None:
        self._cuda.synchronize(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        self._before = self._cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        self._cuda.synchronize(self._device)
        return int(self._cuda.max_memory_allocated(self._device)) - self._before
