"""A further front end: `python -m bifolio.serve.helpers.branch FD`, started by the first one with an end of a pair.

It listens on the port of the first front end (`SO_REUSEPORT`: the system distributes connections) and sends its
requests through it. It ends when the other end of the pair is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import Any

from bifolio.api import messages as m
from bifolio.model.loader import open_text_model
from bifolio.serve.helpers import branch_messages as b
from bifolio.serve.helpers.allocator import return_large_blocks
from bifolio.serve.helpers.branches import decode_settings
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.listening import bound_sockets
from bifolio.serve.http.receipt_files import ReceiptFiles
from bifolio.serve.http.server import BranchSettings, Server, event_loop, make_server
from bifolio.serve.process.engine_connection import EngineConnection, Link, lost
from bifolio.serve.views.logs import configure_logging
from bifolio.serve.views.metrics import Metrics

logger = logging.getLogger(__name__)


class BranchEngine(EngineConnection):
    """The engine as a further front end reaches it."""

    def __init__(self, link: Link, heartbeat_timeout: float, id_prefix: str) -> None:
        super().__init__(heartbeat_timeout, id_prefix)
        self._greeted = asyncio.Event()
        self._link: Link = link
        self.own_metrics: Metrics | None = None
        self.server: Server | None = None
        self.is_draining = False  # the first front end has said so, perhaps before this one serves

    def take(self, message: Any) -> None:
        self._take_common(message)
        if isinstance(message, m.Hello):
            self._greeted.set()
        if isinstance(message, b.Lost):
            self.hello = None
            self._lose_all()
        elif isinstance(message, b.Drain):
            self.is_draining = True
            if self.server is not None:
                self.server.begin_drain()
        elif isinstance(message, b.Scraped):
            self._answer(message.id, message)
        elif isinstance(message, m.Beat) and self.own_metrics is not None:
            self._send_samples(self.own_metrics)

    async def start(self) -> m.Hello:
        """Wait until the first front end has an engine."""
        while self.hello is None:
            await self._greeted.wait()
            self._greeted.clear()
        return self.hello

    async def close(self) -> None:
        """Leave the engine to the other front ends."""
        self._closing = True
        self.fail_all(lost("the front end was closed while the request ran: ask again"))

    async def gather(self, own: Metrics) -> bytes:
        """The metrics of all front ends, which the first one adds up."""
        self._send_samples(own)
        request_id = self.new_id()
        answer: b.Scraped = await self._ask(request_id, b.Scrape(request_id))
        return answer.body

    def _send_samples(self, own: Metrics) -> None:
        self._link.send(b.Samples(own.render()))


async def serve(connection: socket.socket) -> None:
    """Serve until the first front end says so or is gone."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    link = Link(lambda message: engine.take(message) if engine is not None else inbox.put_nowait(message),
                b.to_branch_decoder)  # fmt: skip
    engine: BranchEngine | None = None
    connection.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=connection)
    link.closed.add_done_callback(lambda _: os._exit(0))  # the first front end is gone
    first = await inbox.get()
    if not isinstance(first, b.Serve):
        raise SystemExit(1)
    settings: BranchSettings = decode_settings(first.settings, BranchSettings)
    model = open_text_model(settings.reference, settings.mmproj)
    await asyncio.to_thread(lambda: model.tokenizer)
    engine = BranchEngine(link, settings.server.heartbeat_timeout, first.id_prefix)
    while not inbox.empty():
        engine.take(inbox.get_nowait())
    context = ServerContext(
        model, engine, settings.name, settings.server.limits, created=settings.created,
        log_prompts=settings.server.log_prompts, reference=settings.reference, mmproj=settings.mmproj,
        allow_pull=settings.server.allow_pull,
        allow_updates=settings.server.allow_updates,
        allow_priority=settings.server.allow_priority, gather=engine.gather,
        receipts=ReceiptFiles.of(settings.server.receipts),
    )  # fmt: skip
    engine.own_metrics = context.metrics
    server = make_server(settings.server, context, settings.num_front_ends, first.secret)
    engine.server = server
    try:
        if not engine.is_draining:
            host, port = settings.server.host, settings.server.port
            await server.serve(sockets=bound_sockets(host, port, reuse_port=True))
        link.send(b.Samples(context.metrics.render()))
    finally:
        await context.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first front end decides
    configure_logging(os.environ.get("BIFOLIO_LOG_LEVEL", "info"), "front")
    return_large_blocks()
    connection = socket.socket(fileno=int(sys.argv[1]))
    with asyncio.Runner(loop_factory=event_loop()) as runner:
        runner.run(serve(connection))


if __name__ == "__main__":
    main()
