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
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np

from bifolio.engine.engine import InferenceEngine
from bifolio.engine.transfer.blocks import fingerprint, num_blocks_of, read_blocks
from bifolio.engine.transfer.wire import (
    BLOCK,
    END,
    HEADER,
    ROOM_BLOCKS,
    Pull,
    Room,
    checksum,
    receive_exactly,
    receive_pull,
    send_json,
)
from bifolio.errors import BifolioError, ConfigError, RequestError, TransferError
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request

logger = logging.getLogger(__name__)
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
SILENT_SECONDS = 60.0  # without a byte from the other side: the connection is closed
MAX_CONNECTIONS = 256
BLOCKS_AT_ONCE = 8  # copied between two steps
PAUSE_SECONDS = 0.002  # between two looks at a prompt that has no new block


class EngineCalls(Protocol):
    """The thread that owns an engine (`engine.thread.EngineThread`)."""

    def call(self, function: Callable[[InferenceEngine], Any]) -> Future[Any]: ...


class PrefillServer:
    """Serves the blocks of prompts over TCP, on threads of its own."""

    def __init__(
        self, calls: EngineCalls, host: str = "127.0.0.1", port: int = 0, secret: str = "", shared: bool = True
    ) -> None:
        if host not in LOCAL_HOSTS and not secret:
            raise ConfigError(
                f"blocks are sent to other hosts with a secret only: pass one, or listen on 127.0.0.1, not {host}"
            )
        self._calls = calls
        self._secret = secret
        self._shared = shared
        self._fingerprint: bytes = calls.call(fingerprint).result()
        self._numbers = itertools.count()
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._listener = socket.create_server((host, port), backlog=64)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="bifolio-blocks", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._places.acquire()
            threading.Thread(target=self._serve, args=(connection,), name="bifolio-blocks", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(SILENT_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._answer(connection)
        except (OSError, BifolioError) as error:
            logger.warning("a transfer of blocks ended early: %s", error)
        except Exception:
            logger.exception("a transfer of blocks failed")
        finally:
            self._places.release()

    def _answer(self, connection: socket.socket) -> None:
        longest, block_bytes = self._calls.call(
            lambda engine: (engine.config.max_model_len, engine.runner.storage.layout.bytes_per_block)
        ).result()
        try:
            pull = receive_pull(connection, self._secret, longest)
            if pull.fingerprint != self._fingerprint:
                raise TransferError("the engines differ in model, kernels, cache type or block size: start both alike")
        except TransferError as error:
            send_json(connection, {"error": str(error)})
            raise
        room = Room.open(pull.room, block_bytes) if self._shared and pull.room else None
        send_json(connection, {"block_bytes": block_bytes, "is_shared": room is not None})
        self._send_blocks(connection, pull, room)

    def _send_blocks(self, connection: socket.socket, pull: Pull, room: Room | None) -> None:
        tokens = pull.token_ids.tolist()
        wanted = self._calls.call(lambda engine: num_blocks_of(engine, len(tokens))).result()
        request: Request | None = None
        index, unread = pull.first, 0
        try:
            while index < wanted:
                was_finished = request is not None and request.is_finished
                reading = partial(read_blocks, token_ids=tokens, salt=pull.salt, first=index, most=BLOCKS_AT_ONCE)
                found: list[np.ndarray] = self._calls.call(reading).result()
                for block in found:
                    if room is not None:
                        unread = self._make_room(connection, unread)
                        room.places[index % ROOM_BLOCKS] = block
                        connection.sendall(HEADER.pack(BLOCK, index, checksum(block)))
                        unread += 1
                    else:
                        connection.sendall(HEADER.pack(BLOCK, index, checksum(block)))
                        connection.sendall(block.data)
                    index += 1
                if found:
                    continue
                if was_finished:
                    break  # its blocks were evicted: the other engine computes the rest
                if request is None:
                    request = self._calls.call(lambda engine: self._start(engine, tokens, pull.salt)).result()
                else:
                    threading.Event().wait(PAUSE_SECONDS)
            connection.sendall(HEADER.pack(END, index, bytes(16)))
            receive_exactly(connection, unread)  # a close with unread bytes would reset the connection
        finally:
            if request is not None and not request.is_finished:
                request_id = request.request_id
                self._calls.call(lambda engine: engine.abort(request_id))

    def _start(self, engine: InferenceEngine, tokens: list[int], salt: bytes) -> Request:
        request_id = f"blocks-{next(self._numbers)}"
        try:
            return engine.add_request(request_id, tokens, SamplingParams(max_tokens=1, temperature=0.0), salt=salt)
        except RequestError as error:
            raise TransferError(f"the prompt cannot be computed: {error}") from error

    def _make_room(self, connection: socket.socket, unread: int) -> int:
        """Wait until a place in shared memory is free."""
        if unread == ROOM_BLOCKS:
            receive_exactly(connection, 1)
            return unread - 1
        return unread
