"""Weights that a trainer broadcasts, tensor by tensor, over a process group of torch.

    trainer   join, then of each tensor: its name, type and shape over HTTP, and its values over the group
    engine    |<-- join -->|<-- expect, expect, ... -->|<-- taken: all values are here -->|

The group is NCCL's between GPUs, or gloo's (`api.stream_group`). The engine is its first rank and the trainer its
last, as in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from bifolio.api.stream_group import TIMEOUT, StreamGroup, chosen_backend, distributed
from bifolio.errors import ConfigError

PREFIX = "client2server"  # of the group's keys in the store
TYPES = ("float32", "float16", "bfloat16")
MOST_BYTES = 64 << 30  # of one tensor


class WeightStream:
    """The tensors that a trainer has sent since the last update."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device  # of the engine
        self._pool: ThreadPoolExecutor | None = None  # one thread: values arrive in the order of their names
        self._store: Any = None
        self._group: Future[StreamGroup] | None = None
        self._expected: list[tuple[str, Future[Any]]] = []

    @property
    def has_tensors(self) -> bool:
        return bool(self._expected)

    def join(self, host: str, port: int, world_size: int, backend: str = "", trainer_uuid: str = "") -> None:
        """Listen for the trainer; its group is there when it has connected."""
        dist, chosen = distributed(), chosen_backend(backend, self._device, trainer_uuid)
        if world_size != 2:
            raise ConfigError(f"the group has {world_size} ranks: one trainer sends weights to one engine")
        self.leave()
        try:
            self._store = dist.TCPStore(host, port, world_size, True, TIMEOUT, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"no communicator can listen on {host}:{port}: {error}") from error
        store = dist.PrefixStore(PREFIX, self._store)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="bifolio-weights")
        self._group = self._pool.submit(lambda: StreamGroup(chosen, store, world_size, self._device))

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
        self._expected.append((name, self._pool.submit(lambda: group.result().receive(kind, shape))))

    def taken(self) -> list[tuple[str, Any]]:
        """All tensors that were sent, once the last one is here; they are forgotten."""
        expected, self._expected = self._expected, []
        try:
            return [(name, values.result()) for name, values in expected]
        except RuntimeError as error:
            raise ConfigError(f"the trainer's weights did not arrive: {error}") from error

    def leave(self) -> None:
        """Forget the group and all tensors that were not taken."""
        pool, group = self._pool, self._group
        self._pool, self._group, self._expected = None, None, []
        if group is not None and group.done() and not group.cancelled() and group.exception() is None:
            group.result().abort()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self._store = None
