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

import contextlib
import logging
import threading
import time
from collections import deque
from typing import Any

import msgspec

from bifolio.api.messages import KvEventSettings
from bifolio.cache.digests import root_digest
from bifolio.cache.events import CacheEvent, CacheEvents, Removed, Stored
from bifolio.errors import ConfigError, MissingDependencyError

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.02  # between two batches
MAX_KEPT_BATCHES = 10_000  # for replay
MAX_KEPT_BYTES = 64 << 20
MAX_UNSENT = 100_000  # batches that a subscriber has not read; further ones are dropped, and it asks for a replay
MAX_BATCH_BYTES = 16 << 20  # of one batch with several events; larger ones are split
MAX_READ_BYTES = 1024  # of a frame of a subscription or of a request for a replay, which any client may send
MAX_READ_WAITING = 64  # requests for a replay of one client that wait
HANDSHAKE_MILLISECONDS = 5000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
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
        try:
            import zmq
        except ImportError as error:
            raise MissingDependencyError("KV events need pyzmq: pip install 'bifolio[cluster]'") from error
        self._events = events
        self._block_size = block_size
        self._topic = settings.topic.encode()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._context: Any = zmq.Context()
        self._pub: Any = self._context.socket(zmq.PUB)
        self._pub.set_hwm(MAX_UNSENT)
        self._router: Any = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVHWM, MAX_READ_WAITING)
        for receiver in (self._pub, self._router):
            limit_reads(receiver, MAX_READ_BYTES)
        try:
            self.endpoint = _bind(self._pub, settings.endpoint)
            self.replay_endpoint = _bind(self._router, settings.replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"KV events cannot be published at {settings.endpoint}: {error}") from error
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bifolio-kv-events", daemon=True)
        self._publish([AllBlocksCleared()])  # a new engine has an empty cache
        self._thread.start()

    def close(self) -> None:
        """Publish the queued events, then stop."""
        self._stopping.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.is_set()
            try:
                events = as_events(self._events.take(), self._block_size)
                if events:
                    self._publish(events)
                if self._router.poll(0 if is_last else int(POLL_SECONDS * 1000)):
                    self._replay()
            except Exception:
                logger.exception("KV events could not be published")
                time.sleep(POLL_SECONDS)
        self._context.destroy(linger=100)

    def _publish(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        body = _encoder.encode(EventBatch(time.time(), events, 0))
        if len(body) > MAX_BATCH_BYTES and len(events) > 1:
            middle = len(events) // 2
            self._publish(events[:middle])
            self._publish(events[middle:])
            return
        self._kept.append((self._number, body))
        self._kept_bytes += len(body)
        while len(self._kept) > MAX_KEPT_BATCHES or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart((self._topic, self._number.to_bytes(8, "big"), body))
        self._number += 1

    def _replay(self) -> None:
        """Answer one request: [client, empty, number] or, from a DEALER, [client, number]."""
        import zmq

        client, *_, start = self._router.recv_multipart()
        if len(start) != 8:
            return
        first = int.from_bytes(start, "big")
        with contextlib.suppress(zmq.ZMQError):  # the client is gone
            for number, body in self._kept:
                if number >= first:
                    self._router.send_multipart((client, b"", number.to_bytes(8, "big"), body))
            self._router.send_multipart((client, b"", END_OF_REPLAY, b""))


def limit_reads(socket: Any, max_bytes: int) -> None:
    """Close connections to a ZMQ socket that send a longer frame, or take long for their handshake."""
    import zmq

    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)


def _bind(socket: Any, endpoint: str) -> str:
    """Bind a socket; the address, with the port that the system has chosen for `*`."""
    import zmq

    socket.bind(endpoint)
    found: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return found
