"""The process group of a trainer and an engine: NCCL between two GPUs, gloo over the memory of the host.

Both ends choose the same backend: `backend` of `/init_communicator/`, or NCCL where the engine runs on a GPU and torch
has it. NCCL needs a GPU for each rank: a trainer on the engine's own GPU sends over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from bifolio.errors import ConfigError, MissingDependencyError

Backend: TypeAlias = Literal["nccl", "gloo"]
TIMEOUT = timedelta(minutes=5)  # for the trainer to join, and to send a tensor


def distributed() -> Any:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingDependencyError("a communicator needs torch: pip install 'bifolio[train]'") from error
    return dist


def chosen_backend(wanted: str, device: str, trainer_uuid: str = "") -> Backend:
    """The backend of a group with an engine on `device`; "": the best of this machine.

    `trainer_uuid` is that of the trainer's GPU.
    """
    if wanted not in ("", "nccl", "gloo"):
        raise ConfigError(f"the backend of a communicator is nccl or gloo, not {wanted!r}")
    has_nccl, on_gpu = distributed().is_nccl_available(), device.startswith("cuda")
    if wanted == "nccl" and not on_gpu:
        raise ConfigError(f"NCCL sends from GPU to GPU, and the engine is on {device}: use gloo")
    if wanted == "nccl" and not has_nccl:
        raise ConfigError("torch has no NCCL here: install a build of torch for CUDA, or use gloo")
    if wanted == "gloo" or not (on_gpu and has_nccl):
        return "gloo"
    if trainer_uuid and trainer_uuid == uuid_of(device):
        raise ConfigError(
            "the trainer and the engine are on one GPU, and NCCL needs one for each: use gloo, or another GPU"
        )
    return "nccl"


def uuid_of(device: str) -> str:
    """The id of a GPU, as trainers send it."""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


class StreamGroup:
    """Rank 0 of a group that is made when the trainer joins. Used by one thread, which waits for all of it."""

    def __init__(self, backend: Backend, store: Any, size: int, device: str) -> None:
        import torch

        dist = distributed()
        self._trainer, self._device = size - 1, torch.device(device if backend == "nccl" else "cpu")
        if backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, 0, size, TIMEOUT)
            return
        if self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(self._device)  # of this thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        self._group = dist.ProcessGroupNCCL(store, 0, size, options)

    def receive(self, kind: str, shape: Sequence[int]) -> Any:
        """A tensor that the trainer broadcasts, in host memory; its barrier lets the trainer go on."""
        import torch

        dist = distributed()
        options, together = dist.BroadcastOptions(), dist.BarrierOptions()
        options.rootRank, options.rootTensor = self._trainer, 0
        if self._device.type == "cuda":
            together.device_ids = [self._device.index]
        values = torch.empty(tuple(shape), dtype=getattr(torch, kind), device=self._device)
        self._group.broadcast([values], options).wait()
        on_host = values.cpu()  # after the broadcast, which NCCL queues on the device
        self._group.barrier(together).wait()
        return on_host

    def abort(self) -> None:
        """End a group of NCCL, whose queued work would wait for a trainer that has gone."""
        if self._device.type == "cuda" and hasattr(self._group, "abort"):
            self._group.abort()
