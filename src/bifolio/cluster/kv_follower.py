"""Follows the KV events of several engines and keeps a `PrefixRouter` up to date.

One thread for all engines. An engine is asked for the batches that it has kept after every connection, since one that
was restarted counts from 0 again. A gap in the numbers is filled the same way, and where that is impossible the
engine's blocks are forgotten.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from dataclasses import dataclass
from typing import Any

from bifolio.cluster.prefix_router import PrefixRouter
from bifolio.errors import MissingDependencyError
from bifolio.serve.process.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, batch_decoder

logger = logging.getLogger(__name__)
POLL_MILLISECONDS = 100
MAX_BATCH_BYTES = 64 << 20  # that an engine may send; its own limit is lower
HANDSHAKE_MILLISECONDS = 5000


@dataclass(slots=True)
class _Source:
    """One engine."""

    endpoints: tuple[str, str]  # of events and of replays
    events: Any  # SUB
    replays: Any  # DEALER
    monitor: Any  # PAIR: tells when `events` is connected
    expected: int = 0  # number of the next batch


class KvFollower:
    """Subscribes to the events of replicas. `set_sources` may be called from any thread."""

    def __init__(self, router: PrefixRouter) -> None:
        try:
            import zmq
        except ImportError as error:
            raise MissingDependencyError("KV events need pyzmq: pip install 'bifolio[cluster]'") from error
        self._router = router
        self._zmq = zmq
        self._context = zmq.Context()
        self._wanted: queue.SimpleQueue[dict[str, tuple[str, str]] | None] = queue.SimpleQueue()
        self._sources: dict[str, _Source] = {}
        self._thread = threading.Thread(target=self._run, name="bifolio-kv-follower", daemon=True)
        self._thread.start()

    def set_sources(self, endpoints: dict[str, tuple[str, str]]) -> None:
        """The replicas to follow: name -> (address of events, address of replays)."""
        self._wanted.put(dict(endpoints))

    def close(self) -> None:
        self._wanted.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        while True:
            with contextlib.suppress(queue.Empty):
                wanted = self._wanted.get(block=not self._sources)
                if wanted is None:
                    break
                self._update(wanted, poller)
            try:
                ready = dict(poller.poll(POLL_MILLISECONDS))
                for name, source in list(self._sources.items()):
                    if source.monitor in ready:
                        self._connected(name, source)
                    if source.events in ready:
                        self._take_events(name, source)
                    if source.replays in ready:
                        self._take_replays(name, source)
            except Exception:
                logger.exception("KV events could not be read")
        self._context.destroy(linger=0)

    def _update(self, wanted: dict[str, tuple[str, str]], poller: Any) -> None:
        zmq = self._zmq
        for name in [name for name, source in self._sources.items() if wanted.get(name) != source.endpoints]:
            source = self._sources.pop(name)
            source.events.disable_monitor()
            for socket in (source.events, source.replays, source.monitor):
                poller.unregister(socket)
                socket.close(linger=0)
        for name, endpoints in wanted.items():
            if name not in self._sources:
                events, replays = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
                for receiver in (events, replays):
                    receiver.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
                    receiver.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
                monitor = events.get_monitor_socket(zmq.EVENT_CONNECTED)
                events.setsockopt(zmq.SUBSCRIBE, b"")
                events.connect(endpoints[0])
                replays.connect(endpoints[1])
                for socket in (events, replays, monitor):
                    poller.register(socket, zmq.POLLIN)
                self._sources[name] = _Source(endpoints, events, replays, monitor)

    def _connected(self, name: str, source: _Source) -> None:
        """Begin anew after a connection was made."""
        with contextlib.suppress(self._zmq.Again):
            while True:
                source.monitor.recv_multipart(self._zmq.NOBLOCK)
        source.expected = 0
        self._router.cleared(name)
        self._ask(source)

    def _ask(self, source: _Source) -> None:
        """Ask for the batches from the expected one on."""
        source.replays.send_multipart((b"", source.expected.to_bytes(8, "big")))

    def _take_events(self, name: str, source: _Source) -> None:
        with contextlib.suppress(self._zmq.Again):
            while True:
                _, number, body = source.events.recv_multipart(self._zmq.NOBLOCK)
                self._take(name, source, int.from_bytes(number, "big"), body, is_live=True)

    def _take_replays(self, name: str, source: _Source) -> None:
        with contextlib.suppress(self._zmq.Again):
            while True:
                *_, number, body = source.replays.recv_multipart(self._zmq.NOBLOCK)
                if body:
                    self._take(name, source, int.from_bytes(number, "big"), body, is_live=False)

    def _take(self, name: str, source: _Source, number: int, body: bytes, *, is_live: bool) -> None:
        if number < source.expected:
            return  # known already
        if number > source.expected:
            if is_live:
                self._ask(source)  # the replay brings this batch, too
                return
            self._router.cleared(name)  # older batches are lost
        source.expected = number + 1
        for event in batch_decoder.decode(body).events:
            if isinstance(event, BlockStored):
                self._router.stored(name, event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._router.removed(name, event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._router.cleared(name)
