"""The tokens of running requests as an iterator that ends its requests when it is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from bifolio.engine.engine import InferenceEngine
from bifolio.sequence import Request, StepResult


class TokenStream(Iterator[StepResult]):
    """Step results of requests that were checked and added already; iteration runs the engine."""

    def __init__(
        self, engine: InferenceEngine, requests: list[Request], abort: Callable[[list[Request]], None]
    ) -> None:
        self._engine = engine
        self._abort = abort
        self._ready: deque[StepResult] = deque()
        self._is_open = True
        self.requests = requests

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> StepResult:
        while not self._ready:
            if not self._is_open or all(request.is_finished for request in self.requests):
                self.close()
                raise StopIteration
            try:
                self._ready.extend(self._engine.step())
            except BaseException:
                self.close()
                raise
        return self._ready.popleft()

    def close(self) -> None:
        """End the requests that still run."""
        if self._is_open:
            self._is_open = False
            self._abort(self.requests)

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()
