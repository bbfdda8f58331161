"""`LLM.stream`: results of requests that were checked and added already, while the engine runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import RLock

from bifolio.sequence import Request, StepResult


class TokenStream(Iterator[StepResult]):
    """Step results of some requests; iteration runs the engine, for the requests of all threads."""

    def __init__(
        self,
        requests: list[Request],
        unread: list[StepResult],  # results of these requests; every step of the engine appends to it
        lock: RLock,
        step: Callable[[], object],
        abort: Callable[[list[Request]], None],
    ) -> None:
        self.requests = requests
        self._numbers = {request.request_id: str(number) for number, request in enumerate(requests)}
        self._unread, self._lock, self._step, self._abort = unread, lock, step, abort
        self._ready: deque[StepResult] = deque()
        self._is_open = True

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> StepResult:
        while not self._ready:
            if not self._is_open:
                raise StopIteration
            try:
                is_complete = self._fetch()
            except BaseException:
                self.close()
                raise
            if is_complete and not self._ready:
                self.close()
        return self._ready.popleft()

    def _fetch(self) -> bool:
        """Take unread results, after a step if there are none; True once all requests are finished."""
        with self._lock:
            if not self._unread and any(not request.is_finished for request in self.requests):
                self._step()
            self._ready.extend(replace(each, request_id=self._numbers[each.request_id]) for each in self._unread)
            self._unread.clear()
            return all(request.is_finished for request in self.requests)

    def close(self) -> None:
        """Abort the requests that still run."""
        if self._is_open:
            self._is_open = False
            self._abort(self.requests)

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()
