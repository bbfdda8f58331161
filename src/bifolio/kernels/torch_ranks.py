"""Exchanges of tensor parallelism by torch.distributed.

NCCL between GPUs, where exchanges are captured in CUDA graphs with the rest of a step; gloo on the CPU.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)


class TorchRanks:
    """This process among the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group = group

    @classmethod
    def join(cls, device: str, store: Any, rank: int, size: int) -> TorchRanks:
        """Join the ranks that share this store; returns when all have."""
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        return cls(None, rank, size)

    def leave(self) -> None:
        """Leave the group when all other ranks have ended, so that this process can join another one.

        A group of NCCL stays: it would wait for the ranks that have ended.
        """
        if dist.is_initialized() and dist.get_backend(self._group) == "gloo":
            dist.destroy_process_group(self._group)

    def all_gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """Gather equal parts in one call; narrower parts are padded to the widest."""
        if self.size == 1:
            widths = (int(x.shape[1]),)
        widest = max(widths)
        own = x.contiguous()
        if own.shape[1] < widest:
            own = torch.nn.functional.pad(own, (0, widest - int(own.shape[1])))
        parts = own.new_empty((self.size, *own.shape))
        dist.all_gather(list(parts.unbind(0)), own, group=self._group)
        return torch.cat([parts[rank, :, :width] for rank, width in enumerate(widths)], dim=1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=self._group)
        return total


def new_store(size: int, port: int | None = None) -> Any:
    """The store of rank 0, on a free port (`store.port`), or that of another rank, which connects to the port."""
    distributed: Any = dist
    return distributed.TCPStore(HOST, port or 0, size, is_master=port is None, wait_for_workers=False, timeout=TIMEOUT)
