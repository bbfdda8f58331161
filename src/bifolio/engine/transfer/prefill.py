"""The prefill side: a server that computes prompts and sends their blocks as soon as each is complete.

    chunk 0 of the prompt |compute|
    its blocks                    |send ...|
    chunk 1                       |compute|
    its blocks                            |send ...|

A prompt runs as a request for one token, in the same batches as all others, so its blocks are committed chunk by chunk.
They stay in the prefix cache: another pull of the same prompt sends them at once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Protocol

import numpy as np

from bifolio.engine.engine import InferenceEngine
from bifolio.engine.transfer.blocks import Sizes, read_blocks
from bifolio.engine.transfer.states import read_state
from bifolio.engine.transfer.wire import (
    BLOCK,
    END,
    HEADER,
    ROOM_BLOCKS,
    STATE,
    WAIT,
    Pull,
    Room,
    checksum,
    receive_exactly,
    receive_pull,
    refuse,
    send_json,
)
from bifolio.errors import BifolioError, ConfigError, RequestError, TransferError
from bifolio.handshakes import HANDSHAKE_SECONDS, Handshakes
from bifolio.long_rope import rope_of_salt, short_context
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request

logger = logging.getLogger(__name__)
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
SILENT_SECONDS = 60.0  # without a byte from the other side: the connection is closed
MAX_CONNECTIONS = 256  # transfers at a time, of engines that know the secret
BLOCKS_AT_ONCE = 64  # copied between two steps
PAUSE_SECONDS = 0.002  # between two looks at a prompt that has no new block
ACCEPT_PAUSE_SECONDS = 0.05  # after a connection that could not be accepted
WAIT_SECONDS = 1.0  # between two signs of life while a block is computed


class EngineCalls(Protocol):
    """The thread that owns an engine (`engine.thread.EngineThread`)."""

    def call(self, function: Callable[[InferenceEngine], Any]) -> Future[Any]: ...


class PrefillServer:
    """Serves the blocks of prompts over TCP, on threads of its own."""

    def __init__(
        self,
        calls: EngineCalls,
        sizes: Sizes,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: str = "",
        shared: bool = True,
        handshakes: Handshakes | None = None,
    ) -> None:
        if host not in LOCAL_HOSTS and not secret:
            raise ConfigError(
                f"blocks are sent to other hosts with a secret only: pass one, or listen on 127.0.0.1, not {host}"
            )
        self._calls = calls
        self._secret = secret
        self._shared = shared
        self._sizes = sizes
        self._numbers = itertools.count()
        self._handshakes = Handshakes() if handshakes is None else handshakes
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._listener = socket.create_server((host, port), backlog=256)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="bifolio-blocks", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return  # closed
                time.sleep(ACCEPT_PAUSE_SECONDS)  # no descriptor is free, or the client has gone
                continue
            self._handshakes.begin(connection, str(peer[0]), partial(connection.shutdown, socket.SHUT_RDWR))
            try:
                threading.Thread(target=self._serve, args=(connection,), name="bifolio-blocks", daemon=True).start()
            except RuntimeError:  # the system starts no further thread
                logger.exception("a connection for blocks was closed")
                self._handshakes.end(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(HANDSHAKE_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._answer(connection)
        except (OSError, BifolioError) as error:
            logger.warning("a transfer of blocks ended early: %s", error)
        except Exception:
            logger.exception("a transfer of blocks failed")
        finally:
            self._handshakes.end(connection)

    def _admit(self, connection: socket.socket) -> None:
        """The other side knows the secret: it is no stranger any more."""
        if not self._handshakes.end(connection):
            raise TransferError("too many connections were opened at once: this one was closed")
        connection.settimeout(SILENT_SECONDS)

    def _answer(self, connection: socket.socket) -> None:
        block_bytes = self._sizes.block_bytes
        try:
            pull = receive_pull(
                connection, self._secret, self._sizes.max_model_len, admit=partial(self._admit, connection)
            )
            if pull.fingerprint != self._sizes.fingerprint:
                raise TransferError(
                    "the engines differ in model, kernels, cache type, block size or, without deterministic, "
                    "tensor_parallel_size: start both alike"
                )
        except TransferError as error:
            refuse(connection, str(error))
            raise
        with self._places:
            room = Room.open(pull.room, block_bytes) if self._shared and pull.room else None
            send_json(connection, {"block_bytes": block_bytes, "is_shared": room is not None})
            self._send_blocks(connection, pull, room)

    def _send_blocks(self, connection: socket.socket, pull: Pull, room: Room | None) -> None:
        """Send the blocks that are cached; if that is not all, compute the prompt and send the others as they come."""
        tokens = pull.token_ids.tolist()
        wanted = self._sizes.num_blocks(len(tokens))
        sender = BlockSender(connection, room, pull.first)
        request: Request | None = None
        try:
            while sender.index < wanted:
                was_finished = request is not None and request.is_finished
                look = partial(self._look, tokens=tokens, pull=pull, first=sender.index, wanted=wanted, request=request)
                found, state, request = sender.wait_for(self._calls.call(look))
                sender.send(found)
                if state is not None:
                    sender.send_state(state)
                if not found and was_finished:
                    break  # its blocks were evicted: the other engine computes the rest
                if not found:
                    time.sleep(PAUSE_SECONDS)
            sender.end()
        finally:
            if request is not None and not request.is_finished:
                request_id = request.request_id
                self._calls.call(lambda engine: engine.abort(request_id))

    def _look(
        self, engine: InferenceEngine, tokens: list[int], pull: Pull, first: int, wanted: int, request: Request | None
    ) -> tuple[list[np.ndarray], np.ndarray | None, Request | None]:
        """Between two steps: the blocks that are there, the state behind them, the request that computes the others."""
        found = read_blocks(engine, tokens, pull.salt, first, BLOCKS_AT_ONCE)
        if request is None and first + len(found) < wanted and len(found) < BLOCKS_AT_ONCE:
            request = self._start(engine, tokens, pull.salt)
        state = read_state(engine, tokens, pull.salt, first + len(found)) if found else None
        return found, state, request

    def _start(self, engine: InferenceEngine, tokens: list[int], salt: bytes) -> Request:
        request_id = f"blocks-{next(self._numbers)}"
        try:
            rope, own = (None, salt) if short_context(engine.model.config) is None else rope_of_salt(salt)
            params = SamplingParams(max_tokens=1, temperature=0.0)
            request = engine.add_request(request_id, tokens, params, salt=own)
        except RequestError as error:
            raise TransferError(f"the prompt cannot be computed: {error}") from error
        request.rope = rope  # of the request that will continue the prompt, before its first pass
        return request


class BlockSender:
    """Sends blocks in order, through shared memory where there is room for them, else over the connection."""

    def __init__(self, connection: socket.socket, room: Room | None, first: int) -> None:
        self.index = first  # of the next block
        self._connection = connection
        self._room = room
        self._num_unread = 0  # blocks in shared memory that the other side has not copied
        self._last_sent = time.monotonic()

    def send(self, blocks: list[np.ndarray]) -> None:
        for block in blocks:
            header = HEADER.pack(BLOCK, self.index, checksum(block))
            if self._room is None:
                self._connection.sendall(header)
                self._connection.sendall(block.data)
            else:
                if self._num_unread == ROOM_BLOCKS:
                    receive_exactly(self._connection, 1)
                    self._num_unread -= 1
                self._room.places[self.index % ROOM_BLOCKS] = block
                self._connection.sendall(header)
                self._num_unread += 1
            self.index += 1
            self._last_sent = time.monotonic()
        self._show_life()

    def wait_for(self, future: Future[Any]) -> Any:
        """The result of work between two steps; a step may take long."""
        while True:
            try:
                return future.result(WAIT_SECONDS)
            except FutureTimeoutError:
                self._show_life()

    def _show_life(self) -> None:
        """Tell the other side that the next block is on its way, if it has heard nothing for a while."""
        if time.monotonic() - self._last_sent > WAIT_SECONDS:
            self._connection.sendall(HEADER.pack(WAIT, self.index, bytes(16)))
            self._last_sent = time.monotonic()

    def send_state(self, state: np.ndarray) -> None:
        """Send the recurrent state after the blocks that were sent, over the connection."""
        self._connection.sendall(HEADER.pack(STATE, self.index, checksum(state)))
        self._connection.sendall(state.data)

    def end(self) -> None:
        self._connection.sendall(HEADER.pack(END, self.index, bytes(16)))
        receive_exactly(self._connection, self._num_unread)  # a close with unread bytes would reset the connection
