"""An engine on a thread of this process: for tests, notebooks, and replicas that are processes of their own.

A crash of a kernel ends the process with it, and the engine's Python code shares one interpreter lock with the front
end; `serve.process.supervisor` has neither disadvantage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bifolio.api import messages as m
from bifolio.api.client import EngineState, Health
from bifolio.errors import BifolioError, ConfigError
from bifolio.serve.process.engine_connection import EngineConnection, lost
from bifolio.serve.process.worker import BEAT_SECONDS, make_service

if TYPE_CHECKING:
    from bifolio.serve.process.service import EngineService

logger = logging.getLogger(__name__)


class ServiceLink:
    """Hands messages to a service of this process without encoding them."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    def send(self, message: msgspec.Struct) -> None:
        self._service.handle(message)  # type: ignore[arg-type]

    def send_all(self, messages: Sequence[msgspec.Struct]) -> None:
        for message in messages:
            self.send(message)


class LocalEngine(EngineConnection):
    """An engine client whose engine runs on a thread of this process."""

    def __init__(self, launch: m.Launch, *, step_timeout: float = 300.0) -> None:
        super().__init__()
        self._launch = launch
        self._step_timeout = step_timeout  # seconds; a longer step means a hung engine
        self._service: EngineService | None = None
        self._beats: asyncio.Task[None] | None = None

    async def start(self) -> m.Hello:
        """Load the model and start the thread."""
        loop = asyncio.get_running_loop()

        def send(message: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: no reader is left
                loop.call_soon_threadsafe(self._take_common, message)

        try:
            service = await asyncio.to_thread(make_service, self._launch, send)
        except (BifolioError, MemoryError) as error:
            raise ConfigError(str(error) or type(error).__name__) from error
        hello = service.hello(str(self._launch.options.get("model") or ""))
        self._service, self._link = service, ServiceLink(service)
        service.thread.start()
        self._take_common(hello)
        self._beats = asyncio.create_task(self._beat())
        return hello

    def health(self) -> Health:
        """A step that takes too long is no heartbeat: the thread cannot be killed, only its process."""
        found = super().health()
        if found.is_ready and found.step_seconds > self._step_timeout:
            return Health(EngineState.SILENT, found.num_restarts, found.step_seconds)
        return found

    async def _beat(self) -> None:
        """Report the counters twice a second, and the end of the thread."""
        service = self._service
        while service is not None and service.thread.is_alive:
            with contextlib.suppress(RuntimeError):  # a collection changed while it was counted: skip this beat
                self._take_common(service.beat())
                service.expire_grammars()
            await asyncio.sleep(BEAT_SECONDS)
        self._link = self.hello = None
        self._lose_all()
        logger.error("the engine's thread has ended")

    async def close(self) -> None:
        """End the thread after the running step."""
        self._closing = True
        if self._beats is not None:
            self._beats.cancel()
        self.fail_all(lost("the engine was closed while the request ran"))
        if self._service is not None:
            await asyncio.to_thread(self._service.close)
        self._link = self.hello = None
