"""Data-parallel training under `torchrun`: the rank of this process and its collective operations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed

from bifolio.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Processes:
    """One process of `count`; a single process if training was not started by torchrun."""

    rank: int
    count: int
    device: str

    @property
    def is_first(self) -> bool:
        """The process that prints, evaluates and writes files."""
        return self.rank == 0

    def rows(self, num_sequences: int) -> slice:
        """This process's share of a batch."""
        share = num_sequences // self.count
        return slice(self.rank * share, (self.rank + 1) * share)

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """All-reduce to the mean over all processes."""
        if self.count > 1:
            torch.distributed.all_reduce(value)
            value = value / self.count
        return value

    def any(self, flag: bool) -> bool:
        """Whether the condition holds in any process; all processes get the same result."""
        if self.count == 1:
            return flag
        value = torch.tensor(float(flag), device=self.device)
        torch.distributed.all_reduce(value)
        return bool(value > 0)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            torch.distributed.barrier()


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Join the process group that torchrun started, if any, and leave it at the end."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(0, 1, resolve_device(device))
        return
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    resolved = resolve_device(device)
    if resolved == "cuda":
        resolved = f"cuda:{local_rank}"
        torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group("nccl" if resolved.startswith("cuda") else "gloo")
    try:
        yield Processes(rank, count, resolved)
    finally:
        torch.distributed.destroy_process_group()


def resolve_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"torch finds no CUDA device for --device {device}: pass --device cpu")
    return device
