"""Experts in the memory of the host, beside a network on a device: the CPU's kernels compute them there.

The rows of a pass and their routing are copied to the host, and the sum of the experts is copied back. The CPU's
kernels take the formats of files as they are, so a mixture needs the device's memory for its other weights alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from bifolio.errors import ConfigError
from bifolio.kernels.interface import AdapterUse, Experts, KernelSet, Routing
from bifolio.kernels.torch_arrays import TorchArrays

OF_EXPERTS = "adapters of experts do not go with cpu_experts: leave one of them out, or merge the adapter"


class HostExperts:
    """The prepared form of such experts. `device` is the kernel set of the rest of the network."""

    def __init__(self, experts: Experts, device: TorchArrays) -> None:
        self._host: KernelSet = experts.host
        self._experts = self._host.prepare_experts(experts)
        self._device = device

    @classmethod
    def prepared(cls, experts: Experts, device: TorchArrays) -> Experts:
        device.has_host_experts = True
        return replace(experts, prepared=cls(experts, device))

    def mix(self, x: torch.Tensor, routing: Routing, site: int, adapters: AdapterUse | None) -> torch.Tensor:
        """f32[tokens, d] on the device; `site`: of these experts in adapters."""
        if adapters is not None and adapters.changes_experts(site):
            raise ConfigError(OF_EXPERTS)
        wanted = (x.float(), routing.experts, routing.weights.float())
        rows, chosen, weights = [copy() for copy in [self._device.fetch(part.contiguous()) for part in wanted]]
        on_host = Routing(np.ascontiguousarray(chosen, np.int32), weights, routing.shared)
        mixed: torch.Tensor = self._device.from_host(self._host.mix_experts(rows, on_host, self._experts))
        return mixed
