"""The updates of some requests, for their reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from bifolio.api.messages import Update
from bifolio.errors import EngineFaultError, FaultKind

MAX_BUFFERED_ENTRIES = 131_072  # tokens and logprobs: more than this unread, and the client is too slow to be served


class UpdateStream:
    """Updates of some requests, in order. A reader that stays behind finds them together in one list.

    Lives on the event loop. `close` is always called, and aborts the requests that still run in the engine.
    """

    __slots__ = ("_abort", "_buffered", "_error", "_open", "_updates", "_waiter")

    def __init__(self, request_ids: Iterable[str], abort: Callable[[list[str]], None]) -> None:
        self._open = set(request_ids)  # the engine has more to say of these
        self._abort = abort
        self._updates: list[Update] = []
        self._buffered = 0  # tokens and logprobs in `_updates`
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[Update]:
        """The new updates; an empty list after the end. Raises the error of a failed request."""
        while not self._updates:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        updates, self._updates, self._buffered = self._updates, [], 0
        return updates

    def push(self, update: Update) -> None:
        if update.id not in self._open:
            return
        self._updates.append(update)
        self._buffered += update.num_entries
        if update.ended is not None:
            self._open.discard(update.id)
        elif self._buffered > MAX_BUFFERED_ENTRIES:
            message = "the client reads too slowly: the request was ended"
            self.fail(EngineFaultError(FaultKind.SLOW_READER, message))
        self._wake()

    def fail(self, error: Exception) -> None:
        """End all requests; unread updates are dropped."""
        if self._error is None and (self._open or self._updates):
            self._updates, self._error = [], error
        self.close()
        self._wake()

    def close(self) -> None:
        if self._open:
            ids, self._open = list(self._open), set()
            self._abort(ids)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
