"""KV events over ZMQ, in the layout that routers for vLLM read (`--kv-events tcp://*:5557`).

    PUB     [topic, sequence number (8 bytes, big-endian), msgpack [time, [event, ...], rank]]
    ROUTER  asked with a sequence number, sends the kept batches from there on, then number -1 with an empty body

    ["BlockStored", [hash, ...], hash before or nil, [token, ...], block size, nil, medium, nil, [keys, ...]]
    ["BlockRemoved", [hash, ...], medium]
    ["AllBlocksCleared"]

A hash is the last 8 bytes of a block's digest, as an integer. The keys of a block name its salt, if it has one, by the
digest of the salt: equal keys mean the same salt, which itself is not published. Token ids are: bind the address of a
private network.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time

import msgspec

from bifolio.api.messages import KvEventSettings
from bifolio.cache.digests import root_digest
from bifolio.cache.events import CacheEvent, CacheEvents, Removed, Stored
from bifolio.errors import ConfigError
from bifolio.serve.process.kv_event_ports import BatchLog, EventPort, Port, ReplayPort

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.02  # between two batches
PAUSE_SECONDS = 0.001  # between two looks at the clients, so that those who send all the time take little of a core
LINGER_SECONDS = 0.1  # in which clients get the last batches
MAX_BATCH_BYTES = 16 << 20  # of one batch with several events; larger ones are split
NO_SALT = root_digest(b"")


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Base of the three kinds."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None  # of each block: its salt


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float  # seconds since 1970
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


batch_decoder = msgspec.msgpack.Decoder(EventBatch)
_encoder = msgspec.msgpack.Encoder()


def short_hash(digest: bytes) -> int:
    """The hash of a block as events and routers write it."""
    return int.from_bytes(digest[-8:], "big")


def as_events(taken: list[CacheEvent], block_size: int) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Events of the block manager in their layout on the wire; neighbouring removals are joined."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    for event in taken:
        if isinstance(event, Stored):
            salted = event.root != NO_SALT
            events.append(
                BlockStored(
                    [short_hash(digest) for digest in event.digests],
                    None if event.parent == event.root else short_hash(event.parent),
                    [int(token) for token in event.token_ids],
                    block_size,
                    medium="GPU",
                    extra_keys=[(event.root.hex(),)] * len(event.digests) if salted else None,
                )
            )
        elif isinstance(event, Removed):
            if events and isinstance(events[-1], BlockRemoved):
                events[-1].block_hashes.append(short_hash(event.digest))
            else:
                events.append(BlockRemoved([short_hash(event.digest)], "GPU"))
        else:
            events.append(AllBlocksCleared())
    return events


class KvEventPublisher:
    """Publishes the events of one cache on a thread of its own."""

    def __init__(self, events: CacheEvents, block_size: int, settings: KvEventSettings) -> None:
        self._events = events
        self._block_size = block_size
        self._log = BatchLog()
        self._selector = selectors.DefaultSelector()
        self._ports: list[Port] = []
        try:
            self._ports.append(EventPort(settings.endpoint, settings.topic.encode(), self._log, self._selector))
            self._ports.append(ReplayPort(settings.replay_endpoint, self._log, self._selector))
        except ConfigError:
            self._close_ports()
            raise
        self.endpoint, self.replay_endpoint = (port.endpoint for port in self._ports)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bifolio-kv-events", daemon=True)
        self._publish([AllBlocksCleared()])  # a new engine has an empty cache
        self._thread.start()

    def close(self) -> None:
        """Publish the queued events, then stop."""
        self._stopping.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._advance()
        end = time.monotonic() + LINGER_SECONDS
        self._advance()
        while time.monotonic() < end and any(port.has_unsent for port in self._ports):
            self._advance()
        self._close_ports()

    def _advance(self) -> None:
        """Publish the events so far, and serve the clients until the next batch is due."""
        try:
            events = as_events(self._events.take(), self._block_size)
            if events:
                self._publish(events)
            for port in self._ports:
                port.advance()
            time.sleep(PAUSE_SECONDS)
            for key, ready in self._selector.select(POLL_SECONDS):
                if key.fileobj in self._selector.get_map():  # an event before it may have closed it
                    key.data(key.fileobj, ready)
        except Exception:
            logger.exception("KV events could not be published")
            time.sleep(POLL_SECONDS)

    def _publish(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        body = _encoder.encode(EventBatch(time.time(), events, 0))
        if len(body) > MAX_BATCH_BYTES and len(events) > 1:
            middle = len(events) // 2
            self._publish(events[:middle])
            self._publish(events[middle:])
            return
        self._log.append(body)

    def _close_ports(self) -> None:
        for port in self._ports:
            port.close()
        self._selector.close()
