"""A real server on the loopback interface, for tests: uvicorn in a thread, the engine in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import openai

from bifolio.serve.http.context import Limits as Limits
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.server import Server, ServerSettings, make_server, running_context, secret_of
from helpers import tiny_folder

T = TypeVar("T")
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %} call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
ENGINE = {"max_model_len": 512, "num_blocks": 512, "block_size": 8, "max_num_seqs": 8, "chunk_size": 64,
          "kernels": "reference"}  # fmt: skip


@cache
def model_folder(chat_template: str | None = TEMPLATE) -> Path:
    return tiny_folder(tokenizer=True, chat_template=chat_template, max_position_embeddings=1024)


class RunningServer:
    """What tests need of a server: its address, its clients, and its event loop."""

    def __init__(self, settings: dict[str, Any], engine: dict[str, Any]) -> None:
        self._listener = socket.create_server(("127.0.0.1", settings.get("port", 0)))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.settings = ServerSettings(**{"port": self.port, "model_name": "tiny", **settings})
        self._engine = {"model": str(model_folder()), **ENGINE, **engine}
        self.context: ServerContext = None  # type: ignore[assignment]
        self.server: Server = None  # type: ignore[assignment]
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self._started.result(240)  # of a busy machine

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            async with running_context(self.settings, self._engine) as context:
                self.context = context
                secret = secret_of(self.settings, self._engine)
                self.server = make_server(self.settings, context, secret=secret)
                self.loop.call_later(0.0, self._poll_started)
                await self.server.serve(sockets=[self._listener])
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    def _poll_started(self) -> None:
        if self.server.started:
            self._started.set_result(None)
        else:
            self.loop.call_later(0.01, self._poll_started)

    def on_loop(self, function: Callable[[], T]) -> T:
        """Run something on the server's event loop."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.begin_drain)
        self._thread.join(60)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=60, **options)

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=120)

    def http(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def wait_idle(self, seconds: float = 20.0) -> dict[str, float]:
        """The engine's counters once nothing runs and nothing waits."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            future = asyncio.run_coroutine_threadsafe(self.context.engine.snapshot(), self.loop)
            stats = future.result(10).stats
            if not stats["num_running"] and not stats["num_waiting"] and not self.context.engine.num_open:
                return stats
            time.sleep(0.02)
        raise AssertionError(f"still busy: {stats}")


@contextlib.contextmanager
def running_server(*, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[RunningServer]:
    server = RunningServer(settings, engine or {})
    try:
        yield server
    finally:
        server.stop()


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return str(self.json()["choices"][0]["text"])


async def post(server: RunningServer, path: str, body: Any, timeout: float = 120.0) -> Reply:
    """One request on a connection of its own: a client that costs next to nothing, for many at once."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(timeout):
            writer.write(head.encode() + content)
            answer = await reader.read()
    finally:
        writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    first, *lines = top.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        rest = _dechunked(rest)
    return Reply(int(first.split()[1]), headers, rest)


def _dechunked(raw: bytes) -> bytes:
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return body


def sse_events(text: str) -> list[Any]:
    """The payloads of server-sent events; "[DONE]" stays text."""
    events = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            payload = block.removeprefix("data: ")
            events.append(payload if payload == "[DONE]" else json.loads(payload))
        else:
            assert not block, block
    return events
