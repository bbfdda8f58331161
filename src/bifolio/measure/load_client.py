"""A lightweight streaming client, so that the load generator does not limit the measurement.

Each request opens a connection; the body is read as it arrives, and the time of every event is recorded.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bifolio.errors import ConfigError

READ_BYTES = 1 << 16
_SPECIAL = re.compile(rb'"(?:usage|error)"\s*:\s*\{')  # an event that has to be parsed; quotes in texts are escaped
_UNFINISHED = re.compile(rb'"finish_reason"\s*:\s*null')
_SAMPLE = re.compile(r"^(\S+) (\S+)$", re.MULTILINE)  # of Prometheus, without labels


@dataclass(slots=True)
class Timing:
    """Times of one request, in `time.perf_counter` seconds."""

    started: float = 0.0  # sent
    events: list[float] = field(default_factory=list)  # arrival of each event with text
    finished: float = 0.0
    num_prompt: int = 0
    num_output: int = 0  # as counted by the server, else the number of events
    status: int = 0
    error: str | None = None

    @property
    def first_token(self) -> float:
        """Seconds from sending to the first token."""
        return self.events[0] - self.started if self.events else 0.0

    @property
    def whole(self) -> float:
        """Seconds from sending to the last token."""
        return self.finished - self.started

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.num_output < 2 or not self.events:
            return None
        return (self.events[-1] - self.events[0]) / (self.num_output - 1)


class LoadClient:
    """Sends completions to one OpenAI-compatible address."""

    def __init__(self, url: str, *, key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not an address: pass for example http://127.0.0.1:8000/v1")
        self._host: str = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        base = parts.path.rstrip("/")
        self._base = base if base.endswith("/v1") else base + "/v1"
        self._key = key
        self._timeout = timeout

    async def model_name(self) -> str:
        """The first model that the server lists."""
        status, body = await self._get("/models")
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            message = f"{self._host}:{self._port} does not list its models (status {status}): pass --served-model-name"
            raise ConfigError(message) from error

    async def metrics(self) -> dict[str, float]:
        """The server's Prometheus samples without labels; none if it has no /metrics."""
        status, body = await self._get("/metrics", base=self._base.removesuffix("/v1"))
        if status != 200:
            return {}
        return {name: float(value) for name, value in _SAMPLE.findall(body.decode(errors="replace"))}

    async def complete(self, body: dict[str, Any]) -> Timing:
        """Run one streamed completion. Failures are recorded, not raised."""
        timing = Timing(started=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(body, timing)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            timing.error = f"{type(error).__name__}: {error}"
        timing.finished = timing.events[-1] if timing.events else time.perf_counter()
        timing.num_output = timing.num_output or len(timing.events)
        return timing

    async def _get(self, path: str, base: str | None = None) -> tuple[int, bytes]:
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise ConfigError(f"no server answers at {self._host}:{self._port}: {error}") from error
        try:
            writer.write(self._head("GET", path, 0, base))
            status, chunked = await self._read_head(reader)
            body = b"".join([piece async for piece in _pieces(reader, chunked)])
        finally:
            writer.close()
        return status, body

    async def _stream(self, body: dict[str, Any], timing: Timing) -> None:
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=1 << 22)
        try:
            writer.write(self._head("POST", "/completions", len(content)) + content)
            timing.status, chunked = await self._read_head(reader)
            text = b""
            async for piece in _pieces(reader, chunked):
                now = time.perf_counter()
                text += piece
                *whole, text = text.split(b"\n\n")
                for event in whole:
                    self._take(event, now, timing)
            if timing.status != 200:
                timing.error = f"status {timing.status}: {text[:200].decode(errors='replace')}"
        finally:
            writer.close()

    def _take(self, event: bytes, now: float, timing: Timing) -> None:
        if not event.startswith(b"data: ") or event == b"data: [DONE]":
            return
        if _UNFINISHED.search(event) and not _SPECIAL.search(event):  # most events: their text is not read
            timing.events.append(now)
            return
        payload = json.loads(event[6:])
        if payload.get("error"):
            timing.error = str(payload["error"].get("message"))
            return
        if usage := payload.get("usage"):
            timing.num_prompt, timing.num_output = usage["prompt_tokens"], usage["completion_tokens"]
        if any(choice.get("text") or choice.get("finish_reason") is None for choice in payload.get("choices", [])):
            timing.events.append(now)

    def _head(self, method: str, path: str, length: int, base: str | None = None) -> bytes:
        base = self._base if base is None else base
        lines = [f"{method} {base}{path} HTTP/1.1", f"host: {self._host}:{self._port}", "connection: close"]
        if length:
            lines += ["content-type: application/json", f"content-length: {length}"]
        if self._key is not None:
            lines.append(f"authorization: Bearer {self._key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def _read_head(self, reader: asyncio.StreamReader) -> tuple[int, bool]:
        """(status, whether the body has chunked encoding)."""
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split()
        if len(parts) < 2 or not parts[1].isdigit():
            raise ValueError("the answer is not HTTP")
        return int(parts[1]), any(line.lower().replace(" ", "") == "transfer-encoding:chunked" for line in lines)


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> Any:
    """The pieces of the body as they arrive; the server closes the connection at the end."""
    if not chunked:
        while data := await reader.read(READ_BYTES):
            yield data
        return
    buffer = bytearray()
    while data := await reader.read(READ_BYTES):
        buffer += data
        start = 0
        while (line := buffer.find(b"\r\n", start)) >= 0:
            size = int(bytes(buffer[start:line]).split(b";")[0], 16)
            if not size:
                return
            end = line + 2 + size + 2
            if len(buffer) < end:
                break
            yield bytes(buffer[line + 2 : end - 2])
            start = end
        del buffer[:start]
    raise asyncio.IncompleteReadError(bytes(buffer), None)
