"""Rank 0 of tensor parallelism: starts the other ranks, sends them every command, and ends them.

    shared memory  commands, their numbers, and the exchanges of a pass (`kernels.native.ranks`)
    a socket each  settings at the start, errors, and the end of a process: a rank whose socket closes is lost

A command is written when all ranks have copied the one before. A pass that fails on one rank is discarded on all: the
rank sets the fault word, every exchange that waits raises, rank 0 sends SYNC, and all ranks continue with equal
counters. So the engine's recovery, smaller steps after an out-of-memory error included, holds for all ranks together.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.config import EngineConfig
from bifolio.engine.executor import Pass
from bifolio.engine.parallel.commands import Command, Kind, blocks_command, run_command, write
from bifolio.engine.parallel.rank_adapters import RankAdapters
from bifolio.engine.parallel.shared_blocks import BLOCKS, SharedBlocks
from bifolio.errors import ConfigError, RankError, RankLostError, TransferError
from bifolio.kernels.cpu import MAX_RANKS, SharedMemoryRanks, anonymous_file, new_memory
from bifolio.kernels.interface import Adapter, Array, Batch, KernelSet
from bifolio.model.weights import ModelWeights

logger = logging.getLogger(__name__)
COMMAND, FIRST_TAKEN = (
    0,
    1,
)  # signals: the newest command; the newest command that rank r has copied, at FIRST_TAKEN + r
LOST = 1 << 31  # fault: a process ended, and the rank in the low bits
FAILED = 1 << 30  # fault: a pass failed
START_SECONDS = 600.0  # for loading weights
SYNC_SECONDS = 60.0  # for leaving a failed pass
END_SECONDS = 5.0
PIECE = 2048  # blocks of one command


def engine_settings(config: EngineConfig) -> dict[str, Any]:
    """The fields of a configuration that a rank needs, as plain values."""
    fields = asdict(replace(config, speculative=None))
    cache = fields.pop("cache")
    del fields["speculative"], fields["adapters"]
    return {"cache": cache, "engine": fields}


class Connection:
    """Lines of JSON over a socket: settings and errors, nothing that belongs to a pass."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None at the end of the connection."""
        while b"\n" not in self._received:
            data = self.socket.recv(1 << 16)
            if not data:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def _end(watch: Watch, joined: list[Any], folder: Path) -> None:
    """End the other ranks, then leave the group that they were in."""
    watch.close()
    for ranks in joined:
        ranks.leave()
    shutil.rmtree(folder, ignore_errors=True)


class RankTeam:
    """The ranks beside rank 0."""

    def __init__(self, kernels: KernelSet, size: int, command_bytes: int, settings: dict[str, Any]) -> None:
        """Start `size` - 1 processes; `settings` are those of `rank.Settings`, `kernels` those of rank 0."""
        if not 2 <= size <= MAX_RANKS:
            raise ConfigError(f"tensor_parallel_size is at most {MAX_RANKS}, not {size}")
        memory = new_memory(size, command_bytes)
        self.ranks = SharedMemoryRanks(memory, 0, size, command_bytes)
        self.size = size
        self._kernels = kernels
        self._store: Any = None  # where ranks on torch tensors meet
        if kernels.array_backend == "torch":
            from bifolio.kernels.torch_ranks import new_store

            self._store = new_store(size)
            settings = {**settings, "port": self._store.port}
        self._number = 0  # of the newest command
        self._adapters = RankAdapters(size)
        settings = {**settings, "adapters": str(self._adapters.folder)}
        self._blocks = SharedBlocks(anonymous_file(), size)
        self._watch = Watch(self.ranks)
        self._lock = threading.Lock()
        try:
            for rank in range(1, size):
                files = (memory, command_bytes, self._blocks.fileno())
                self._watch.add(rank, files, {**settings, "rank": rank, "size": size})
        finally:
            os.close(memory)
        self._joined: list[Any] = []  # the group of ranks on torch tensors
        self._finalizer = weakref.finalize(self, _end, self._watch, self._joined, self._adapters.folder)
        self._watch.start()

    def join(self) -> None:
        """Let the kernels of rank 0 exchange with the other ranks."""
        self._kernels.ranks = self.ranks
        if self._store is not None:
            from bifolio.kernels.torch_ranks import TorchRanks

            self._joined.append(TorchRanks.join(self._kernels.device, self._store, 0, self.size))
            self._kernels.ranks = self._joined[0]

    # -- the start ----------------------------------------------------------------------------------------------
    def num_blocks(self) -> int:
        """The blocks that fit on the rank with the least memory; waits until all ranks have loaded their weights."""
        return min(int(answer["num_blocks"]) for answer in self._answers("ready", START_SECONDS))

    def start(self, num_blocks: int, num_states: int = 0) -> None:
        """Let the ranks allocate their caches."""
        for connection in self._watch.connections.values():
            connection.send({"num_blocks": num_blocks, "num_states": num_states})
        self._answers("started", START_SECONDS)

    # -- passes (`Peers`) -----------------------------------------------------------------------------------------
    def run(self, kind: Pass, batch: Batch, work: Callable[[], Array]) -> Array:
        """Run a pass on all ranks; an error on one of them discards it on all and is raised here."""
        with self._lock:
            for command in self._adapters.commands():
                self._send(command)
            self._send(run_command(kind.value, batch, self._kernels, self._adapters.number_of))
            try:
                return work()
            except Exception as error:
                failure = error.with_traceback(None)
            raise self._recover(failure)

    @property
    def splits_adapters(self) -> bool:
        return self._adapters.is_split

    def split_adapters(self, weights: ModelWeights) -> None:
        """Note the rows of each rank in the whole weights, for adapters."""
        self._adapters.split(weights)

    def prepare_adapter(self, adapter: Adapter, kernels: KernelSet) -> Adapter:
        """The part of this rank, prepared; the other ranks read theirs before the next pass. Any thread may call it."""
        return self._adapters.prepare(adapter, kernels)

    def move_blocks(self, moves: Iterable[tuple[int, int]]) -> None:
        self._send_pieces(Kind.MOVES, list(moves))

    def poison_blocks(self, block_ids: Iterable[int]) -> None:
        self._send_pieces(Kind.POISON, list(block_ids))

    def release_memory(self) -> None:
        self._send(Command(Kind.RELEASE_MEMORY))

    # -- blocks of the cache, for other engines -------------------------------------------------------------------
    def read_blocks(self, block_ids: Sequence[int], part_bytes: Sequence[int]) -> list[np.ndarray]:
        """u8[n, part bytes] of each rank beside rank 0. `part_bytes`: of a block on every rank, rank 0 included."""
        places = self._blocks.places(max(part_bytes), is_first=True)
        found = [np.empty((len(block_ids), part_bytes[rank]), np.uint8) for rank in range(1, self.size)]
        for first in range(0, len(block_ids), BLOCKS):
            piece = block_ids[first : first + BLOCKS]
            self._share_blocks(Kind.READ_BLOCKS, piece, max(part_bytes))
            for rank, part in enumerate(found, start=1):
                part[first : first + len(piece)] = places[rank, : len(piece), : part.shape[1]]
        return found

    def write_blocks(self, block_ids: Sequence[int], parts: Sequence[np.ndarray]) -> None:
        """Store u8[n, part bytes] of every rank, that of rank 0 excepted, which stores its own."""
        widest = max(part.shape[1] for part in parts)
        places = self._blocks.places(widest, is_first=True)
        for first in range(0, len(block_ids), BLOCKS):
            piece = block_ids[first : first + BLOCKS]
            for rank in range(1, self.size):
                part = parts[rank][first : first + len(piece)]
                places[rank, : len(piece), : part.shape[1]] = part
            self._share_blocks(Kind.WRITE_BLOCKS, piece, widest)

    def _share_blocks(self, kind: Kind, block_ids: Sequence[int], widest: int) -> None:
        """Let every rank copy its parts of some blocks, and wait until all have."""
        self._send(Command(kind, (widest,), (np.array(block_ids, np.int64),)))
        errors = [str(answer["error"]) for answer in self._answers("blocks", SYNC_SECONDS) if answer["error"]]
        if errors:
            raise TransferError(f"blocks could not be copied on another rank: {errors[0]}")

    def close(self) -> None:
        """End the processes; they have nothing to save."""
        with contextlib.suppress(RankLostError, OSError):
            self._send(Command(Kind.CLOSE))
        self._finalizer()

    # -- details --------------------------------------------------------------------------------------------------
    def _send_pieces(self, kind: Kind, rows: list[Any]) -> None:
        """Send block ids or pairs in pieces: no destination of a move is the source of another."""
        for first in range(0, len(rows), PIECE):
            self._send(blocks_command(kind, rows[first : first + PIECE]))

    def _send(self, command: Command) -> None:
        native = self.ranks.native
        for rank in range(1, self.size):
            while not native.wait(FIRST_TAKEN + rank, self._number, 0.1):
                self._watch.check()
        self._watch.check()
        write(command, self.ranks.commands)
        self._number = (self._number + 1) % (1 << 32)
        native.post(COMMAND, self._number)

    def _recover(self, error: Exception) -> Exception:
        """Discard a failed pass on all ranks; returns the error that caused it."""
        if self._store is not None:
            return self._stopped(error)
        native = self.ranks.native
        is_ours = not native.fault
        native.fault = native.fault or FAILED
        self._watch.check()
        count = (native.count + 4) % (1 << 32)  # ranks are at most one exchange apart
        self._send(Command(Kind.SYNC, (count,)))
        texts = [str(answer["error"]) for answer in self._answers("synced", SYNC_SECONDS) if answer["error"]]
        native.count = count
        native.fault = 0
        if is_ours or not texts:
            return error
        logger.warning("a pass failed on another rank and was discarded: %s", texts[0])
        return RankError(f"a pass failed on another rank: {texts[0]}")

    def _stopped(self, error: Exception) -> RankLostError:
        """End the engine: exchanges of torch.distributed cannot be resumed in the middle of a pass."""
        self._watch.wait_for_loss(1.0)
        try:
            self._watch.check()
        except RankLostError as lost:
            return lost
        self.close()
        return RankLostError(f"a pass failed on rank 0 ({error}): the engine has stopped, start it again")

    def _answers(self, kind: str, seconds: float) -> list[dict[str, Any]]:
        """One message of this kind from every rank."""
        return [self._watch.next_message(rank, kind, seconds) for rank in range(1, self.size)]


class Watch:
    """The processes and their sockets, read by one thread: it raises the fault when a process ends."""

    def __init__(self, ranks: SharedMemoryRanks) -> None:
        self.connections: dict[int, Connection] = {}
        self._ranks = ranks
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._messages: dict[int, list[dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._closing = False
        self._reader: threading.Thread | None = None

    def add(self, rank: int, files: tuple[int, int, int], settings: dict[str, Any]) -> None:
        """Start the process of a rank. `files`: its shared memory, the bytes of commands in it, the shared blocks."""
        ours, theirs = socket.socketpair()
        memory, command_bytes, blocks = files
        with theirs:
            arguments = [str(theirs.fileno()), str(memory), str(command_bytes), str(blocks)]
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "bifolio.engine.parallel.rank", *arguments],
                pass_fds=(theirs.fileno(), memory, blocks),
                stdin=subprocess.DEVNULL,
            )
        self.connections[rank] = Connection(ours)
        self._messages[rank] = []
        self.connections[rank].send(settings)

    def start(self) -> None:
        self._reader = threading.Thread(target=self._read, name="bifolio-ranks", daemon=True)
        self._reader.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def check(self) -> None:
        """Raise RankLostError if a process has ended."""
        if self._lost is not None:
            raise RankLostError(self._lost)

    def wait_for_loss(self, seconds: float) -> None:
        """Wait until a process has ended: its exchange may fail before its socket closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, seconds)

    def next_message(self, rank: int, kind: str, seconds: float) -> dict[str, Any]:
        """Wait for a message; an error of the rank at its start is raised as ConfigError."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                for message in self._messages[rank]:
                    if "refused" in message:
                        raise ConfigError(f"rank {rank}: {message['refused']}")
                    if message["kind"] == kind:
                        self._messages[rank].remove(message)
                        return message
                self.check()
                if not self._changed.wait(min(1.0, max(deadline - time.monotonic(), 0.0))) and (
                    time.monotonic() >= deadline
                ):
                    raise RankLostError(f"rank {rank} did not answer within {seconds:.0f} s: start the engine again")

    def close(self) -> None:
        """Close the sockets, on which every process ends; end those that do not."""
        self._closing = True
        self._lost = self._lost or "the engine was closed: make a new one"
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
        for process in self._processes.values():
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._reader is not None and self._reader is not threading.current_thread():  # finalizers run on any thread
            self._reader.join(END_SECONDS)

    def _read(self) -> None:
        """Read messages until all sockets are closed."""
        open_ranks = {connection.socket: rank for rank, connection in self.connections.items()}
        while open_ranks:
            ready, _, _ = select.select(list(open_ranks), [], [])
            for connection in ready:
                rank = open_ranks[connection]
                try:
                    message = self.connections[rank].receive()
                except (OSError, ValueError):
                    message = None
                if message is None:
                    del open_ranks[connection]
                    connection.close()
                    self._lose(rank)
                    continue
                with self._changed:
                    self._messages[rank].append(message)
                    self._changed.notify_all()

    def _lose(self, rank: int) -> None:
        if self._closing:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(1.0)
        code = self._processes[rank].poll()
        reason = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        with self._changed:
            self._lost = self._lost or f"the process of rank {rank} {reason}: the engine has stopped, start it again"
            self._changed.notify_all()
        self._ranks.native.fault = LOST | rank
