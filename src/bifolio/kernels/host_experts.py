"""Experts in the memory of the host, beside a network on a device: the CPU's kernels compute them there.

The rows of a pass and their routing are written to the host, and the sum of the experts is copied back. The CPU's
kernels take the formats of files as they are, so a mixture needs the device's memory for its other weights alone. On a
GPU the stream itself calls these kernels between two of its own (`ExpertCalls`), without Python: such a pass is
captured as any other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bifolio.errors import ConfigError
from bifolio.kernels.interface import AdapterUse, ExpertCalls, Experts, KernelSet, Routing
from bifolio.kernels.torch_arrays import TorchArrays

OF_EXPERTS = "adapters of experts do not go with cpu_experts: leave one of them out, or merge the adapter"
MOST_CALLED = 256  # rows that the stream hands over, or those of all slots; the host waits for more, of prompts


@dataclass(slots=True)
class HostRows:
    """Pinned memory for rows on their way to experts of the host and back; the device writes and reads it itself."""

    sent: torch.Tensor  # f32[rows, d + 2 * choices]  x, the numbers of experts as int32, and their weights
    mixed: torch.Tensor  # f32[rows, d]
    on_device: torch.Tensor  # `sent`, as the device addresses it

    @classmethod
    def new(cls, rows: int, width: int, choices: int) -> HostRows:
        sent = torch.zeros((rows, width + 2 * choices), dtype=torch.float32, pin_memory=True)
        mixed = torch.zeros((rows, width), dtype=torch.float32, pin_memory=True)
        return cls(sent, mixed, device_view(sent))


@dataclass(slots=True)
class HostTurn:
    """The memory that all layers of a device share, since its stream runs them one after another."""

    calls: ExpertCalls
    room: Any  # of the calls
    most: int = MOST_CALLED
    row_seconds: float = 0.0  # of one layer and row of prompts, as measured last; 0.0: not yet
    rows: list[HostRows] = field(default_factory=list)  # captured steps keep the smaller ones

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Experts of the host answer with zeros at once: for steps on padding, which are measured or captured."""
        self.room.is_idle = True
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # launched steps read the flag when they run
            self.room.is_idle = False

    def rows_for(self, count: int, width: int, choices: int) -> HostRows:
        fitting = (own for own in self.rows if own.sent.shape[1] == width + 2 * choices and len(own.sent) >= count)
        found = next(fitting, None)
        if found is None:
            found = HostRows.new(max(count, self.most), width, choices)
            self.rows.append(found)
        return found


class HostExperts:
    """The prepared form of such experts. `device` is the kernel set of the rest of the network."""

    def __init__(self, experts: Experts, device: TorchArrays) -> None:
        self._host: KernelSet = experts.host
        self._experts = self._host.prepare_experts(experts)
        self._device = device
        calls = self._host.expert_calls()  # None: kernels in Python, which no stream can call
        self._calls: dict[int, tuple[HostRows, Any]] = {}  # of each number of rows
        if calls is not None and device.host_turn is None:
            device.host_turn = HostTurn(calls, calls.new_room())

    @classmethod
    def prepared(cls, experts: Experts, device: TorchArrays) -> Experts:
        device.has_host_experts = True
        return replace(experts, prepared=cls(experts, device))

    def mix(self, x: torch.Tensor, routing: Routing, site: int, adapters: AdapterUse | None) -> torch.Tensor:
        """f32[tokens, d] on the device; `site`: of these experts in adapters."""
        if adapters is not None and adapters.changes_experts(site):
            raise ConfigError(OF_EXPERTS)
        turn = self._device.host_turn
        if turn is not None and x.is_cuda and 0 < len(x) <= turn.most:
            return self._called(x, routing, turn)
        if turn is not None and turn.room.is_idle:
            return torch.zeros_like(x, dtype=torch.float32)
        wanted = (x.float(), routing.experts, routing.weights.float())
        rows, chosen, weights = [copy() for copy in [self._device.fetch(part.contiguous()) for part in wanted]]
        on_host = Routing(np.ascontiguousarray(chosen, np.int32), weights, routing.shared)
        begun = time.perf_counter()
        mixed: torch.Tensor = self._device.from_host(self._host.mix_experts(rows, on_host, self._experts))
        if turn is not None and len(x):
            turn.row_seconds = (time.perf_counter() - begun) / len(x)
        return mixed

    def _called(self, x: torch.Tensor, routing: Routing, turn: HostTurn) -> torch.Tensor:
        from bifolio.kernels.cuda.host_call import launch_host_call

        count, choices = routing.experts.shape
        if count not in self._calls:
            rows = turn.rows_for(count, x.shape[1], choices)
            self._calls[count] = rows, self._new_call(count, rows, turn)
        rows, call = self._calls[count]
        numbers = routing.experts.to(torch.int32).view(torch.float32)
        torch.cat([x.float(), numbers, routing.weights.float()], dim=1, out=rows.on_device[:count])
        launch_host_call(call.function, call.argument)
        return rows.mixed[:count].to(x.device, non_blocking=True)

    def _new_call(self, count: int, rows: HostRows, turn: HostTurn) -> Any:
        sent, mixed = rows.sent[:count].numpy(), rows.mixed[:count].numpy()
        return turn.calls.new_call(self._experts, turn.room, sent, mixed)


class _DeviceAddress:
    """Pinned memory as an array of the device."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self._pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape), "typestr": "<f4", "data": (pinned.data_ptr(), False), "strides": None,
            "version": 2,
        }  # fmt: skip


def device_view(pinned: torch.Tensor) -> torch.Tensor:
    """The same memory, for kernels of the device; it keeps `pinned` alive."""
    return torch.as_tensor(_DeviceAddress(pinned), device="cuda")
