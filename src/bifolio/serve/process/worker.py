"""The engine process: `python -m bifolio.serve.process.worker FD`, started by the supervisor with a socket.

It ends when the other end is closed, so a front end that was killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from bifolio.api import messages as m
from bifolio.garbage import QuietCollector
from bifolio.serve.views.logs import configure_logging

if TYPE_CHECKING:
    from bifolio.serve.process.service import EngineService, Send

BEAT_SECONDS = 0.5
READ_BYTES = 1 << 18


class Outbox:
    """Sends messages on a thread of its own: the engine never waits for the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[m.FromEngine | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bifolio-outbox", daemon=True)
        self._thread.start()

    def put(self, message: m.FromEngine) -> None:
        self._queue.put(message)

    def close(self, timeout: float = 5.0) -> None:
        """Send the queued messages, then stop."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                self._connection.sendall(m.frame(message))
        except OSError:
            os._exit(0)  # the front end is gone


def read_messages(connection: socket.socket, reader: m.FrameReader) -> list[m.ToEngine]:
    """The next messages; an empty list at the end of the connection."""
    while True:
        data = connection.recv(READ_BYTES)
        if not data:
            return []
        if found := reader.feed(data):
            return found


def serve(connection: socket.socket) -> int:
    reader = m.FrameReader(m.to_engine_decoder)
    received = read_messages(connection, reader)
    if not received or not isinstance(received[0], m.Launch):
        return 1
    first, rest = received[0], received[1:]
    outbox = Outbox(connection)
    service = _launch(first, outbox)
    if service is None:
        outbox.close()
        return 1

    def read() -> None:
        try:
            for message in rest:
                service.handle(message)
            while found := read_messages(connection, reader):
                for message in found:
                    service.handle(message)
        except OSError:
            pass
        service.thread.stop(timeout=0)

    collector = QuietCollector()

    def beat() -> None:
        while service.thread.is_alive:
            collector.look(is_idle=not service.llm.engine.has_work)
            with contextlib.suppress(RuntimeError):  # a collection changed while it was counted: skip this beat
                outbox.put(service.beat())
                service.expire_grammars()
            stopped.wait(BEAT_SECONDS)

    stopped = threading.Event()
    threading.Thread(target=read, name="bifolio-inbox", daemon=True).start()
    threading.Thread(target=beat, name="bifolio-beat", daemon=True).start()
    service.thread.run()
    stopped.set()
    service.close_files()
    outbox.close()
    return 0 if service.thread.failure is None else 1


def _launch(launch: m.Launch, outbox: Outbox) -> EngineService | None:
    from bifolio.errors import BifolioError

    try:
        service = make_service(launch, outbox.put)
    except (BifolioError, MemoryError) as error:
        outbox.put(m.Fatal(str(error) or type(error).__name__))
        return None
    outbox.put(service.hello(str(launch.options.get("model") or "")))
    return service


def make_service(launch: m.Launch, send: Send) -> EngineService:
    from bifolio.api.llm import LLM
    from bifolio.config import SpeculativeConfig
    from bifolio.serve.process.service import EngineService

    options = dict(launch.options)
    if options.get("speculative") is not None:
        options["speculative"] = SpeculativeConfig(**options["speculative"])
    llm = LLM(**options)
    service = EngineService(llm, send, max_updates_per_second=launch.max_updates_per_second)
    if launch.kv_events is not None:
        from bifolio.cache.events import CacheEvents
        from bifolio.serve.process.kv_events import KvEventPublisher

        events = CacheEvents()
        service.publisher = KvEventPublisher(events, llm.engine.blocks.block_size, launch.kv_events)
        llm.engine.blocks.record_events(events)
    if launch.snapshots is not None:
        service.snapshots.open(launch.snapshots)
    if launch.transfer is not None and launch.transfer.role != "both":
        from bifolio.serve.process.block_transfer import BlockTransfer

        service.transfer = BlockTransfer(service.thread, llm.engine, launch.transfer)
    return service


def main() -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable()  # a crash in a kernel leaves a trace in the log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(os.environ.get("BIFOLIO_LOG_LEVEL", "info"), "engine")
    connection = socket.socket(fileno=int(sys.argv[1]))
    importlib.import_module("bifolio.serve.process.service")  # while the front end imports its own modules
    code = serve(connection)
    logging.shutdown()
    os._exit(code)  # threads of kernels or of the grammar compiler may still run


if __name__ == "__main__":
    main()
