"""`GraphCache`: passes of a step as CUDA graphs, captured on first use and replayed as one launch.

A pass (`CapturedPass`) has static buffers and launches kernels that read them; a step sets the buffers and launches the
pass. A key says which pass it is: its kind, and the sizes and options that its kernels are captured for.

    step      |  set buffers  |  launch  |
    first     |               |  run on padding: compile | capture | replay  |
    later     |               |  replay  |

Without a GPU a pass runs kernel by kernel in Triton's interpreter instead of being captured: tests need no GPU.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from bifolio.garbage import no_garbage_collection
from bifolio.kernels.triton.device_state import recorded_event

Pass = TypeVar("Pass", bound="CapturedPass")
Key = TypeVar("Key", bound=Hashable)
_FREE_STREAMS: dict[str, list[Any]] = {}  # of each device: streams that no cache holds


class CapturedPass(ABC):
    """Static buffers, and the launches that read and write them."""

    graph: Any = None  # None: kernel by kernel

    @abstractmethod
    def run(self) -> None:
        """Launch the kernels; with buffers as they are made, on padding alone."""

    def recorded(self) -> None:  # noqa: B027  most passes change none
        """Reset buffers that were changed while the pass was recorded: it has run once."""

    def launch(self) -> None:
        """Run the pass after everything launched before; does not wait for anything."""
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()

    def event(self) -> Any:
        """An event that comes when everything launched so far is done; None without a GPU."""
        return None if self.graph is None else recorded_event()


class GraphCache:
    """The captured passes of one engine. Graphs of one pool share memory for intermediate results."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.on_gpu = device.startswith("cuda")
        self._passes: dict[type, dict[Any, CapturedPass]] = {}  # by the type of key
        self._pools: dict[str, Any] = {}
        self._stream: Any = None  # of all captures

    def find(self, key: Hashable, new: Callable[[], Pass], pool: str = "steps") -> Pass:
        """The pass of a key; a new one is captured first.

        Its outputs outside of its buffers are overwritten by later launches of the pool.
        """
        passes: dict[Any, Any] = self._passes.setdefault(type(key), {})
        found: Pass | None = passes.get(key)
        if found is None:
            found = new()
            if self.on_gpu:
                found.graph = self.record(found.run, pool)
                found.recorded()
            passes[key] = found
        return found

    def keys(self, kind: type[Key]) -> set[Key]:
        """The keys of one kind that have a pass."""
        return set(self._passes.get(kind, {}))

    def passes(self, kind: type) -> list[CapturedPass]:
        """The passes of one kind of key."""
        return list(self._passes.get(kind, {}).values())

    def release(self) -> None:
        """Drop all passes and their memory; each is captured again when it is needed."""
        self._passes.clear()
        self._pools.clear()

    def record(self, run: Callable[[], None], pool: str) -> Any:
        """Run once, which compiles kernels and warms up libraries, then capture."""
        cuda: Any = torch.cuda
        stream = self._taken_stream()
        cuda.synchronize(self.device)
        stream.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(stream):
            run()
        cuda.synchronize(self.device)
        graph = cuda.CUDAGraph()
        # The collector would free graphs and pinned memory of dropped engines, which invalidates a capture.
        # `torch.cuda.graph` collects before each capture instead, for up to a second.
        with cuda.stream(stream), no_garbage_collection():
            graph.capture_begin(pool=self._pools.get(pool), capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        self._pools.setdefault(pool, graph.pool())
        return graph

    def _taken_stream(self) -> Any:
        """A stream of a closed engine, or a new one: cuBLAS keeps a workspace of 32 MiB for each stream that it saw."""
        if self._stream is None:
            free = _FREE_STREAMS.setdefault(self.device, [])
            cuda: Any = torch.cuda
            try:
                self._stream = free.pop()
            except IndexError:
                self._stream = cuda.Stream(self.device)
            weakref.finalize(self, free.append, self._stream)
        return self._stream
