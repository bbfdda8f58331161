"""`ReplicaEngine`: the engine client of a front end in a Ray Serve application. Each request goes to one replica.

A replica that is lost costs its requests a `FaultKind.LOST`, as an engine process that ends does; the others go on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from bifolio.api import messages as m
from bifolio.api.client import EngineState, Health, new_prefix
from bifolio.api.update_stream import UpdateStream
from bifolio.cluster.prefill_pool import PrefillPool
from bifolio.cluster.prefix_router import PrefixRouter, prefix_hashes
from bifolio.cluster.replica_reports import ReplicaReports, answer_of
from bifolio.errors import EngineFaultError, FaultKind
from bifolio.long_rope import chosen_rope, salt_of_rope
from bifolio.serve.process.conversations import Conversation, ConversationStore, recalled
from bifolio.serve.process.engine_connection import lost

logger = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(m.FromEngine)


class ReplicaEngine:
    """An engine client over the replicas of a deployment."""

    def __init__(self, handle: Any, router: PrefixRouter, prefill: PrefillPool | None = None) -> None:
        self._handle = handle  # of the deployment of `EngineReplica`
        self._router = router
        self._prefill = prefill  # engines that compute prompts for the replicas; None: each computes its own
        self._ids = itertools.count()
        self._prefix = new_prefix()
        self._first: m.Hello | None = None  # of any replica: all have the same sizes
        self._streams: dict[str, UpdateStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._replica_of: dict[str, str] = {}  # request -> replica that runs it
        self._num_embeddings = 0
        self._conversations = ConversationStore()
        self._reports = ReplicaReports(handle, router, self._lose)
        self._reporter: asyncio.Task[None] | None = None
        self._is_closed = False

    # -- life ----------------------------------------------------------------------------------------------------------
    async def start(self) -> m.Hello:
        """Wait until a replica is ready."""
        hello = _decoder.decode(await self._handle.describe.remote("", b"", ""))
        if not isinstance(hello, m.Hello):
            raise EngineFaultError(FaultKind.UNAVAILABLE, "no replica is ready: ask again in a moment")
        if self._prefill is not None:
            self._prefill.start(hello.block_size)
        self._first = hello
        self._router.block_size = hello.block_size
        self._reporter = asyncio.create_task(self._reports.run())
        return hello

    async def close(self) -> None:
        """Abort the requests of this front end; the replicas stay."""
        self._is_closed = True
        self.fail_all(lost("the front end was closed while the request ran: ask again"))
        tasks = [*self._tasks.values(), *([] if self._reporter is None else [self._reporter])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._prefill is not None:
            await self._prefill.close()

    @property
    def hello(self) -> m.Hello | None:
        """The sizes of one replica, with the slots of all."""
        count = len(self._router.replicas)
        if self._first is None or not count:
            return self._first
        return msgspec.structs.replace(self._first, max_num_seqs=self._first.max_num_seqs * count)

    @property
    def adapters(self) -> list[m.AdapterInfo]:
        """Those that all replicas began with."""
        return [] if self._first is None else self._first.adapters

    async def adapt(self, name: str, path: str = "", *, in_place: bool = False) -> None:
        message = "adapters of several replicas are those they began with: restart with other --lora-modules"
        raise EngineFaultError(FaultKind.INVALID_REQUEST, message)

    async def scale_adapters(self, scales: dict[str, float]) -> None:
        message = "several replicas have no common scales of adapters: pass `lora` in each request"
        raise EngineFaultError(FaultKind.INVALID_REQUEST, message)

    def health(self) -> Health:
        if self._is_closed:
            state = EngineState.CLOSED
        else:
            is_ready = self._first is not None and bool(self._router.replicas)
            state = EngineState.READY if is_ready else EngineState.STARTING
        return Health(state, self.num_restarts)

    @property
    def num_open(self) -> int:
        return len(self._streams) + self._num_embeddings

    # -- counters ------------------------------------------------------------------------------------------------------
    @property
    def stats(self) -> dict[str, float]:
        """The sums over all replicas."""
        return self._reports.stats

    def counter(self, name: str) -> float:
        return self._reports.counter(name)

    @property
    def num_restarts(self) -> int:
        """Replicas that are gone."""
        return self._reports.num_gone

    def _lose(self, replica: str) -> None:
        """End the requests of a silent replica."""
        for request_id in [known for known, where in self._replica_of.items() if where == replica]:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.fail(lost("the replica that ran the request does not answer: ask again"))

    # -- requests ------------------------------------------------------------------------------------------------------
    def new_id(self) -> str:
        return f"{self._prefix}-{next(self._ids):x}"

    def submit(self, requests: Sequence[m.Start]) -> UpdateStream:
        """Send every request to the replica that can begin it first."""
        if self._is_closed or not self.health().is_ready:
            raise EngineFaultError(FaultKind.UNAVAILABLE, "no replica is ready: ask again in a moment")
        stream = UpdateStream((request.id for request in requests), self.abort)
        for request in requests:
            self._streams[request.id] = stream
            self._tasks[request.id] = asyncio.create_task(self._run(request, stream))
        return stream

    async def _run(self, request: m.Start, stream: UpdateStream) -> None:
        """Pass the updates of one request on until it ends."""
        block_size, context = (1, None) if self._first is None else (self._first.block_size, self._first.short_context)
        rope = chosen_rope(context, len(request.prompt_token_ids), request.params.get("max_tokens"))
        hashes = prefix_hashes(request.prompt_token_ids, salt_of_rope(rope, request.salt), block_size)
        packed = array("Q", hashes).tobytes()
        chosen = "" if self._prefill is None else self._prefill.choose(request, hashes)
        request = msgspec.structs.replace(request, prefill_at=chosen)  # never an address that a client chose
        responses = self._handle.options(stream=True).generate.remote(_encoder.encode(request), request.id, packed, "")
        is_over = False
        try:
            async for body in responses:
                if request.id not in self._replica_of:
                    self._replica_of[request.id] = body.decode()
                    continue
                self._prompt_is_computed(request.id)
                is_over = self._take(_decoder.decode(body), stream)
            if not is_over:
                stream.fail(lost("the replica ended the request before its end: ask again"))
        except asyncio.CancelledError:
            responses.cancel()
            raise
        except Exception as error:
            logger.warning("a replica was lost: %r", error)
            stream.fail(lost("the replica that ran the request was lost: ask again"))
        finally:
            self._prompt_is_computed(request.id)
            self._router.end(request.id)
            self._replica_of.pop(request.id, None)
            self._streams.pop(request.id, None)
            self._tasks.pop(request.id, None)

    def _prompt_is_computed(self, request_id: str) -> None:
        self._router.first_output(request_id)
        if self._prefill is not None:
            self._prefill.end(request_id)

    def _take(self, message: Any, stream: UpdateStream) -> bool:
        """Hand a message to the stream; True at the end of the request."""
        if isinstance(message, m.Refused):
            stream.fail(EngineFaultError(message.kind, message.message))
            return True
        is_over = False
        for update in message.items:
            is_over = is_over or update.ended is not None
            stream.push(update)
        return is_over

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            task = self._tasks.get(request_id)
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def stop(self, request_id: str, index: int, stop_reason: str) -> None:
        replica = self._replica_of.get(request_id)
        if replica is not None:
            self._handle.stop_completion.remote(request_id, index, stop_reason, "", b"", replica)

    async def embed(self, token_ids: list[int], pooling: m.Pooling | None = None) -> bytes:
        asked = _encoder.encode(m.Embed("", token_ids, pooling or m.Pooling()))
        self._num_embeddings += 1
        try:
            answer = await answer_of(self._handle.embed.remote(asked, "", b"", ""))
        finally:
            self._num_embeddings -= 1
        vector: bytes = answer.vector
        return vector

    async def snapshot(self) -> m.Picture:
        """Slots and blocks of one replica."""
        picture: m.Picture = await answer_of(self._handle.snapshot.remote("", b"", ""))
        return picture

    def remember(
        self,
        name: str,
        owner: str,
        request_id: str,
        body: bytes,
        share: str = "",
        *,
        salt: bytes = b"",
        token_ids: bytes = b"",
    ) -> None:
        """Store a conversation in this front end; its blocks are found by their prefix."""
        if body:
            self._conversations.add(name, Conversation(owner, request_id, body, share, salt, token_ids))

    async def recall(
        self, name: str, owner: str, *, drops: bool = False, share: str = "", salt: bytes = b""
    ) -> m.Recalled:
        entry = self._conversations.find(name, owner)
        if entry is None:
            return m.Recalled("")
        if drops:
            self._conversations.drop(name)
        return recalled("", entry)

    async def branch(self, call: m.BranchCall) -> m.BranchReply:
        """Refuse: the blocks of a branch are in one engine, and replicas are chosen for each request."""
        raise EngineFaultError(
            FaultKind.INVALID_REQUEST,
            "branches live in one engine and this server has several: send the whole prompt, whose cached prefix is "
            "found, or use a server with one engine",
        )

    async def control(self, control: m.Control) -> m.Controlled:
        """Refuse: each replica has weights of its own."""
        raise EngineFaultError(
            FaultKind.INVALID_REQUEST, "weights of replicas are not exchanged together: use a server with one engine"
        )

    def fail_all(self, error: Exception) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)
