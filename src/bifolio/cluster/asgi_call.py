"""One request to an ASGI application in this process, with its answer as it arrives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from bifolio.errors import EngineDeadError

App = Any  # an ASGI application
FORWARDED = frozenset({"authorization", "x-request-id"})  # of the client's headers; those of its connection are Ray's


class Answer:
    """The status of an answer, and the pieces of its body. Closing it early ends the request."""

    def __init__(self, app: App, path: str, body: Any, headers: Mapping[str, str]) -> None:
        data = json.dumps(body).encode()
        sent = [(name.lower().encode(), value.encode()) for name, value in headers.items() if name.lower() in FORWARDED]
        self._scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
            "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 80),
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"),
                        (b"content-length", str(len(data)).encode()), *sent],
        }  # fmt: skip
        self._body: bytes | None = data
        self._gone = asyncio.Event()  # the caller reads no more
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(app))

    async def _run(self, app: App) -> None:
        try:
            await app(self._scope, self._receive, self._messages.put)
        finally:
            await self._messages.put(None)

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def status(self) -> int:
        """The status code; call it once, before `pieces`."""
        message = await self._messages.get()
        if message is None:
            await self._task  # raises the error of the application
            raise EngineDeadError("the server ended a request without an answer: ask again")
        return int(message["status"])

    async def pieces(self) -> AsyncIterator[bytes]:
        while (message := await self._messages.get()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                return

    async def content(self) -> Any:
        """The whole body, a JSON document."""
        return json.loads(b"".join([piece async for piece in self.pieces()]))

    async def close(self) -> None:
        self._gone.set()
        await asyncio.gather(self._task, return_exceptions=True)
