"""The decode side: fetch the blocks of a prompt from a prefill engine before the request is added.

If a transfer fails (the other engine ends, runs another model, or sends a damaged block), the blocks that arrived whole
are kept, and the request computes the rest itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from bifolio.config.transfer import Address
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.transfer.blocks import Arrival, Sizes
from bifolio.engine.transfer.prefill import BLOCKS_AT_ONCE, EngineCalls
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
    receive_into,
    receive_json,
    send_pull,
)
from bifolio.errors import TransferError

logger = logging.getLogger(__name__)
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 10.0  # the longest time without a sign of life
BLOCK_SECONDS = 60.0  # the longest time between two blocks


def _add(arrival: Arrival, blocks: list[np.ndarray], engine: InferenceEngine) -> bool:
    return arrival.add(blocks)


def _add_state(arrival: Arrival, state: np.ndarray, engine: InferenceEngine) -> None:
    arrival.add_state(state)


class Fetched(NamedTuple):
    """The result of a transfer."""

    num_blocks: int  # that arrived and are in the cache now
    is_whole: bool  # the transfer came to its end


class BlockFetcher:
    """Fetches blocks for one engine; `fetch` may be called from several threads."""

    def __init__(
        self, calls: EngineCalls, sizes: Sizes, secret: str = "", shared: bool = True, threshold: int = 1
    ) -> None:
        self._calls = calls
        self._secret = secret
        self._threshold = threshold  # tokens: a prompt with fewer that are not cached is computed here
        self._shared = shared and os.path.isdir("/dev/shm")
        self._sizes = sizes
        self._block_bytes = self._sizes.block_bytes

    def fetch(
        self, address: Address, token_ids: Sequence[int], salt: bytes = b"", secret: str | None = None
    ) -> Fetched:
        """Take the blocks of a prompt into the cache. A failed transfer is logged; the blocks before are kept.

        `secret`: of this address, if it has one of its own.
        """
        arrival = self._calls.call(lambda engine: Arrival(engine, token_ids, salt)).result()
        before, is_whole = arrival.num_blocks, False
        try:
            is_short = len(token_ids) - before * self._sizes.block_size < self._threshold
            if before < self._sizes.num_blocks(len(token_ids)) and not is_short:
                pull = Pull(self._sizes.fingerprint, np.asarray(token_ids, np.int32), salt, before)
                self._transfer(address, pull, arrival, self._secret if secret is None else secret)
            is_whole = True
        except (OSError, TransferError) as error:
            logger.warning("blocks of %s:%d: %s; the rest is computed here", address.host, address.port, error)
        finally:
            self._calls.call(lambda engine: arrival.close())  # before any later command, so before the request
        return Fetched(arrival.num_blocks - before, is_whole)

    def _transfer(self, address: Address, pull: Pull, arrival: Arrival, secret: str) -> None:
        room, path = Room.new(self._block_bytes) if self._shared else (None, "")
        try:
            with socket.create_connection(address, CONNECT_SECONDS) as connection:
                connection.settimeout(SILENT_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                send_pull(connection, replace(pull, room=path), secret)
                answer = receive_json(connection)
                if "error" in answer:
                    raise TransferError(str(answer["error"]))
                if answer.get("block_bytes") != self._block_bytes:
                    raise TransferError("the engines differ in the size of a block: start both alike")
                self._receive(connection, arrival, room if answer.get("is_shared") else None)
        finally:
            if path:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _receive(self, connection: socket.socket, arrival: Arrival, room: Room | None) -> None:
        """Read blocks and states until the end; blocks are stored between two steps, several at a time."""
        next_index, waiting = arrival.num_blocks, list[np.ndarray]()
        last_block = time.monotonic()
        while True:
            kind, index, check = HEADER.unpack(receive_exactly(connection, HEADER.size))
            if kind == BLOCK and index == next_index:
                waiting.append(self._block(connection, room, index, check))
                next_index += 1
                last_block = time.monotonic()
            elif kind == WAIT:
                if time.monotonic() - last_block > BLOCK_SECONDS:
                    raise TransferError(f"no block came for {BLOCK_SECONDS:.0f} s: start more prefill engines")
            elif kind != END and (kind != STATE or index != next_index):
                raise TransferError("a block arrived out of order")
            if waiting and (kind != BLOCK or len(waiting) == BLOCKS_AT_ONCE):
                blocks, waiting = waiting, []
                if not self._calls.call(partial(_add, arrival, blocks)).result():
                    raise TransferError("the cache has no room for the blocks of this prompt")
            if kind == STATE:
                self._calls.call(partial(_add_state, arrival, self._state(connection, check))).result()
            if kind == END:
                return

    def _state(self, connection: socket.socket, check: bytes) -> np.ndarray:
        """A recurrent state, checked."""
        state = np.empty(self._sizes.state_bytes, np.uint8)
        receive_into(connection, state.data)
        if checksum(state) != check:
            raise TransferError("a recurrent state was damaged on its way")
        return state

    def _block(self, connection: socket.socket, room: Room | None, index: int, check: bytes) -> np.ndarray:
        """One block, copied and checked."""
        block = np.empty(self._block_bytes, np.uint8)
        if room is None:
            receive_into(connection, block.data)
        else:
            block[:] = room.places[index % ROOM_BLOCKS]
            connection.sendall(b"\1")
        if checksum(block) != check:
            raise TransferError(f"block {index} was damaged on its way")
        return block
