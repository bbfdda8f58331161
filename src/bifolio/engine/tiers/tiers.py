"""`CacheTiers`: the tiers of one engine. Blocks leave for them by `Copies`, and come back before a request is admitted.

    admission    the batcher asks `must_wait` for a sequence whose turn has come: if a tier has blocks behind those
                 of the cache, a ticket is queued and the sequence waits; others overtake it
    thread       reads the blocks of a ticket in order, up to the first that is missing or damaged
    `land`       between two steps: the blocks that arrived are written to the cache under the sequence's own table, and
                 the batcher admits it as it would a branch of a kept conversation. On a device the thread has copied
                 them to their places by then (`tiers.landing`)

A sequence asks once for each time that it waits, so blocks that are dropped again are computed.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bifolio.cache.digests import root_digest
from bifolio.engine.tiers.content import BlockContent
from bifolio.engine.tiers.copies import Copies
from bifolio.engine.tiers.costs import Costs
from bifolio.engine.tiers.landing import Landing
from bifolio.engine.tiers.tier import Key, Tier
from bifolio.engine.transfer.blocks import Arrival
from bifolio.schedule.plan import StepPlan
from bifolio.sequence import Sequence

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine

MAX_TICKETS = 8  # sequences that wait for tiers at the same time
MAX_ASKED = 65_536
MAX_READERS = 8  # threads that read files for a device
READ_AHEAD = 16  # blocks
PIECE_BYTES = 32 << 20  # that are sent to a device together
KEPT_BYTES = 64 << 20  # of room for blocks that arrive, kept for the next ticket: new memory costs more than a copy
CLOSE_SECONDS = 10.0  # for writing waiting blocks
IDLE_SECONDS = 0.01  # that an engine without other work waits for a ticket, at most


@dataclass(slots=True, eq=False)
class Ticket:
    """Blocks of one sequence on their way into the cache."""

    sequence: Sequence
    root: bytes
    first: int  # number of the first block that is read
    digests: list[bytes]
    landing: Landing | None = None  # places on a device
    blocks: list[np.ndarray] = field(default_factory=list)
    state: np.ndarray | None = None  # behind the last of the blocks
    rows: np.ndarray | None = None  # u8[n, block bytes]  room for the blocks, in use until they are stored
    seconds: float = 0.0
    num_bytes: int = 0  # that were read


@dataclass(slots=True)
class TierStats:
    """Counters since the start, and the bytes that the tiers hold."""

    num_tier_queries: int = 0  # tokens of prompts that were looked up
    num_tier_hits: int = 0  # of those, tokens that came from a tier
    num_tier_stored: int = 0  # blocks and states
    num_tier_dropped: int = 0
    num_tier_bytes: int = 0


class _Digests:
    """The digests of which the tiers have a block, or a state."""

    def __init__(self, copies: Copies, is_state: bool) -> None:
        self._copies, self._is_state = copies, is_state

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, bytes) and Key(digest, self._is_state) in self._copies


class CacheTiers:
    """All methods but those of the threads run on the thread that owns the engine."""

    def __init__(
        self, engine: InferenceEngine, content: BlockContent, tiers: list[Tier], costs: Costs | None = None
    ) -> None:
        self.tiers = tiers
        self.costs = costs or Costs()
        self._content = content
        self._blocks = engine.blocks
        self._batcher = weakref.proxy(engine.batcher)
        self.copies = Copies(engine.blocks, self._content, tiers)
        self._known = (_Digests(self.copies, False), _Digests(self.copies, True))
        self._asked: set[int] = set()  # ids of sequences that have had their ticket
        self._open: dict[int, Ticket] = {}  # by sequence id
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._arrived = threading.Event()
        self._num_queries = self._num_hits = 0
        count = 1 if content.copies is None else min(MAX_READERS, max((os.cpu_count() or 1) // 2, 1))
        self._rows: np.ndarray | None = None
        self._readers = ThreadPoolExecutor(count, "bifolio-tiers-files") if count > 1 else None
        self.attach(engine)
        self._thread = threading.Thread(target=self._run, name="bifolio-tiers-read", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(engine, _close, self.copies, self._queue, self._thread, self._readers, tiers)

    def attach(self, engine: InferenceEngine) -> None:
        """Take part in the steps of the engine."""
        engine.tiers = engine.batcher.source = self
        engine.blocks.keep_in(self.copies)

    def detach(self, engine: InferenceEngine) -> None:
        """Take no part until `attach`: requests that warm the engine up compute all of their tokens."""
        engine.tiers = engine.batcher.source = None
        engine.blocks.keep_in(None)

    def has(self, digest: bytes) -> bool:
        """Whether a block is in the cache or in a tier."""
        return self._blocks.cached_block(digest) is not None or digest in self._known[0]

    # -- before admission ----------------------------------------------------------------------------------------------

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether blocks of a waiting sequence are on their way; its ticket is queued when it is asked for first."""
        if sequence.id in self._open:
            return True
        request = sequence.request
        scores = request.params.prompt_logprobs is not None and not sequence.output_token_ids
        if sequence.id in self._asked or scores or self._blocks.has_table(sequence.id):
            return False
        if len(self._open) >= MAX_TICKETS:
            return True
        if len(self._asked) >= MAX_ASKED:  # most of them ended while they waited
            self._asked.clear()
        self._asked.add(sequence.id)
        first, digests = self._blocks.further_prefix(
            sequence.token_ids, request.cache_salt, request.marks, *self._known
        )
        size = self._blocks.block_size
        self._num_queries += max(sequence.num_tokens - first * size, 0)
        count = len(digests)
        if not count or not self.costs.prefers_tier(count * size, count * self._content.block_bytes):
            return False
        ticket = Ticket(sequence, root_digest(request.cache_salt), first, digests)
        if self._content.copies is not None and not self._take_places(ticket):
            self._asked.discard(sequence.id)  # asks again when there is room
            return False
        self._open[sequence.id] = ticket
        self._queue.put(ticket)
        return True

    def _take_places(self, ticket: Ticket) -> bool:
        """Allocate the blocks of a ticket on the device, as many as there is room for; False without any."""
        ticket.landing = Landing.open(
            self._blocks, self._content, ticket.sequence, ticket.first, ticket.digests, self._known[1],
            self._batcher.num_running,
        )  # fmt: skip
        return ticket.landing is not None

    def admitted(self, sequence: Sequence) -> None:
        """The sequence has a slot: if it is preempted later, it asks again."""
        self._asked.discard(sequence.id)

    def collected(self, plan: StepPlan, started: float) -> None:
        """A step that began at this time of `time.perf_counter` was collected."""
        if plan.prefills:
            self.costs.computed(sum(item.num_new for item in plan.prefills), time.perf_counter() - started)

    # -- between two steps ---------------------------------------------------------------------------------------------

    @property
    def has_tickets(self) -> bool:
        return bool(self._open)

    def land(self, engine: InferenceEngine, *, is_idle: bool) -> None:
        """Write the blocks that arrived to the cache; an engine without other work waits for some, a moment."""
        if is_idle and self._done.empty():
            self._arrived.wait(IDLE_SECONDS)
        self._arrived.clear()
        while not self._done.empty():
            ticket = self._done.get()
            del self._open[ticket.sequence.id]
            self.costs.read(ticket.num_bytes, ticket.seconds)
            if ticket.landing is not None:
                self._num_hits += ticket.landing.close(engine)
            elif ticket.sequence.finish_reason is None and not self._blocks.has_table(ticket.sequence.id):
                self._num_hits += self._store(engine, ticket)
            if ticket.rows is not None and ticket.rows.nbytes <= KEPT_BYTES:
                ticket.blocks.clear()
                self._rows = ticket.rows
            engine.batcher.prompts_advanced()  # retries admission

    def settle(self, engine: InferenceEngine, seconds: float) -> None:
        """Land all tickets, so that no thread writes to the cache any more; at most for so long."""
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            self.land(engine, is_idle=True)

    def _store(self, engine: InferenceEngine, ticket: Ticket) -> int:
        """Store the blocks of a ticket behind those that the cache has now; the number of tokens gained."""
        sequence, blocks = ticket.sequence, self._blocks
        request = sequence.request
        arrival = Arrival(engine, sequence.token_ids, request.cache_salt, sequence.id, request.marks)
        held = arrival.num_blocks
        arrived = ticket.blocks[held - ticket.first :] if held >= ticket.first else []
        is_whole = bool(arrived) and arrival.add([self._content.of_target(block) for block in arrived])
        ids = blocks.block_ids_of(sequence.id)[held:]
        for block_id, block in zip(ids, arrived, strict=False):
            self._content.write_head(block_id, block)
        if blocks.has_states:
            if is_whole and ticket.state is not None:
                arrival.add_state(ticket.state)
            arrival.close()
            # up to the last state that the cache has: there may have been no room for this one
            arrival = Arrival(engine, sequence.token_ids, request.cache_salt, sequence.id, request.marks)
        blocks.rest(sequence.id)
        return (arrival.num_blocks - held) * blocks.block_size

    def stats(self) -> TierStats:
        copies = self.copies
        num_bytes = sum(tier.num_bytes for tier in self.tiers)
        return TierStats(self._num_queries, self._num_hits, copies.num_stored, copies.num_dropped, num_bytes)

    # -- the thread that reads -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            started = time.perf_counter()
            try:
                self._read(ticket)
            finally:
                ticket.seconds = time.perf_counter() - started
                self._done.put(ticket)
                self._arrived.set()

    def _read(self, ticket: Ticket) -> None:
        num_bytes, landing = self._content.state_bytes, ticket.landing
        most, waiting = max(PIECE_BYTES // self._content.block_bytes, 1), list[np.ndarray]()
        for block in self._read_blocks(ticket):
            if block is None:
                break
            ticket.blocks.append(block)
            ticket.num_bytes += block.nbytes
            waiting.append(block)
            if landing is not None and len(waiting) == most:
                landing.store(waiting)
                waiting = []
        if landing is not None and waiting:
            landing.store(waiting)
        while num_bytes and ticket.blocks:  # of a hybrid: up to the last block whose state is here
            key = Key(ticket.digests[len(ticket.blocks) - 1], True)
            ticket.state = self._find(key, ticket.root, num_bytes)
            if ticket.state is not None:
                break
            ticket.blocks.pop()
        if landing is not None:
            landing.finish(len(ticket.blocks), ticket.state)
            ticket.blocks.clear()

    def _read_blocks(self, ticket: Ticket) -> Iterator[np.ndarray | None]:
        """The blocks of a ticket in order; several threads read ahead, if there are some."""
        size = self._content.block_bytes
        if self._readers is None:
            ticket.rows = self._room(len(ticket.digests), size)
            for number, digest in enumerate(ticket.digests):
                row = None if ticket.rows is None else ticket.rows[number]
                yield self._find(Key(digest), ticket.root, size, row)
            return
        ahead: deque[Future[np.ndarray | None]] = deque()
        digests = iter(ticket.digests)
        for digest in itertools.islice(digests, READ_AHEAD):
            ahead.append(self._readers.submit(self._find, Key(digest), ticket.root, size))
        while ahead:
            yield ahead.popleft().result()
            for digest in itertools.islice(digests, 1):
                ahead.append(self._readers.submit(self._find, Key(digest), ticket.root, size))

    def _room(self, count: int, size: int) -> np.ndarray | None:
        """u8[count or more, size] for blocks of files; None on a device, whose blocks lie in pinned memory."""
        if self._content.copies is not None:
            return None
        kept, self._rows = self._rows, None
        return kept if kept is not None and len(kept) >= count else np.empty((count, size), np.uint8)

    def _find(self, key: Key, root: bytes, num_bytes: int, into: np.ndarray | None = None) -> np.ndarray | None:
        """`into`: room for content of files, unless a faster tier keeps it."""
        found = self.copies.get(key, root)
        for place, tier in enumerate(self.tiers):
            if found is None and key in tier:
                found = tier.get(key, root, into if place == 0 else None)
                if found is not None and found.nbytes == num_bytes:
                    for faster in self.tiers[:place]:
                        faster.put(key, root, found)
        return found if found is not None and found.nbytes == num_bytes else None


def _close(
    copies: Copies,
    tickets: queue.SimpleQueue[Ticket | None],
    thread: threading.Thread,
    readers: ThreadPoolExecutor | None,
    tiers: list[Tier],
) -> None:
    """Write waiting blocks, and end all threads; also at the end of the process."""
    copies.close(CLOSE_SECONDS)
    tickets.put(None)
    thread.join(CLOSE_SECONDS)
    if readers is not None:
        readers.shutdown(wait=False)
    for tier in tiers:
        tier.close()
