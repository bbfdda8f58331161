"""Weights that a trainer broadcasts, tensor by tensor, over a process group of torch.

    trainer   join, then of each tensor: its name, type and shape over HTTP, and its values over the group
    engine    |<-- join -->|<-- expect, expect, ... -->|<-- taken: all values are here -->|

The group is gloo's, on the CPU. The engine is its first rank and the trainer its last, as in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from bifolio.errors import ConfigError, MissingDependencyError

PREFIX = "client2server"  # of the group's keys in the store
TIMEOUT = timedelta(minutes=5)  # for the trainer to join, and to send a tensor
TYPES = ("float32", "float16", "bfloat16")
MOST_BYTES = 64 << 30  # of one tensor


class WeightStream:
    """The tensors that a trainer has sent since the last update."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None  # one thread: values arrive in the order of their names
        self._store: Any = None
        self._group: Future[Any] | None = None
        self._trainer = 0  # the trainer's rank
        self._expected: list[tuple[str, Future[Any]]] = []

    @property
    def has_tensors(self) -> bool:
        return bool(self._expected)

    def join(self, host: str, port: int, world_size: int) -> None:
        """Listen for the trainer; its group is there when it has connected."""
        dist = _distributed()
        if world_size != 2:
            raise ConfigError(f"the group has {world_size} ranks: one trainer sends weights to one engine")
        self.leave()
        try:
            self._store = dist.TCPStore(host, port, world_size, True, TIMEOUT, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"no communicator can listen on {host}:{port}: {error}") from error
        self._trainer, store = world_size - 1, dist.PrefixStore(PREFIX, self._store)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="bifolio-weights")
        self._group = self._pool.submit(lambda: dist.ProcessGroupGloo(store, 0, world_size, TIMEOUT))

    def expect(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Receive the values of a tensor next."""
        if self._pool is None or self._group is None:
            raise ConfigError("there is no communicator: call /init_communicator/ first")
        kind = dtype.removeprefix("torch.")
        if kind not in TYPES or min(shape, default=1) < 0 or math.prod(shape) * 4 > MOST_BYTES:
            raise ConfigError(
                f"{name} has the type {dtype} and the shape {list(shape)}: send one of {', '.join(TYPES)}"
            )
        group = self._group
        self._expected.append((name, self._pool.submit(lambda: self._received(group.result(), kind, shape))))

    def taken(self) -> list[tuple[str, Any]]:
        """All tensors that were sent, once the last one is here; they are forgotten."""
        expected, self._expected = self._expected, []
        try:
            return [(name, values.result()) for name, values in expected]
        except RuntimeError as error:
            raise ConfigError(f"the trainer's weights did not arrive: {error}") from error

    def leave(self) -> None:
        """Forget the group and all tensors that were not taken."""
        pool, self._pool, self._group, self._expected = self._pool, None, None, []
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self._store = None

    def _received(self, group: Any, kind: str, shape: Sequence[int]) -> Any:
        import torch

        dist = _distributed()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._trainer, 0
        values = torch.empty(tuple(shape), dtype=getattr(torch, kind))
        group.broadcast([values], options).wait()
        group.barrier().wait()
        return values


def _distributed() -> Any:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingDependencyError("a communicator needs torch: pip install 'bifolio[train]'") from error
    return dist
