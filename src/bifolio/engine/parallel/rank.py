"""A rank beside rank 0: `python -m bifolio.engine.parallel.rank SOCKET MEMORY BYTES BLOCKS`, started by `RankTeam`.

It loads its part of the weights and runs one command after the other. It ends when rank 0 closes its socket, so an
engine that was killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bifolio.config import CacheConfig, EngineConfig
from bifolio.engine.build import plan_rank, shard_model
from bifolio.engine.executor import DecodeExecutor, ModelRunner, Pass, PrefillExecutor
from bifolio.engine.fault.out_of_memory import is_out_of_memory
from bifolio.engine.parallel.commands import Command, Kind, batch_of, read
from bifolio.engine.parallel.rank_adapters import file_of, read_part
from bifolio.engine.parallel.shared_blocks import SharedBlocks
from bifolio.engine.parallel.team import COMMAND, FAILED, FIRST_TAKEN, Connection
from bifolio.errors import BifolioError, ConfigError
from bifolio.kernels.cpu import SharedMemoryRanks
from bifolio.kernels.interface import Adapter, KernelSet
from bifolio.kernels.select import select_kernels
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.model.weight_rounding import rounded_model

logger = logging.getLogger(__name__)
HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a rank, as rank 0 sends them."""

    model: str
    kernels: str
    device: str
    threads: int
    activations: str
    dtype: str | None
    quantization: str | None
    exact: bool
    cache: dict[str, Any]  # of CacheConfig
    engine: dict[str, Any]  # of EngineConfig, without its cache and speculation
    num_blocks: int | None
    memory: int | None
    utilisation: float
    adapters: str = ""  # the folder through which they come
    port: int | None = None  # of the store where ranks on torch tensors meet
    rank: int = 0
    size: int = 1

    def config(self) -> EngineConfig:
        return EngineConfig(CacheConfig(**self.cache), **self.engine)


class Rank:
    """The part of a model on this rank, and the loop over commands."""

    def __init__(
        self,
        runner: ModelRunner,
        ranks: SharedMemoryRanks,
        connection: Connection,
        blocks: SharedBlocks,
        chunk_size: int,
        folder: Path,
    ) -> None:
        """`folder`: through which adapters come."""
        self._runner = runner
        self._folder = folder
        self._adapters: dict[int, Adapter | str] = {}  # by number; or the error that kept one out
        self._ranks = ranks
        self._connection = connection
        self._blocks = blocks
        self._prefill, self._decode = PrefillExecutor(runner, chunk_size), DecodeExecutor(runner)
        self._error: str | None = None  # of the pass that failed last

    def serve(self) -> None:
        """Run commands until CLOSE."""
        native, number = self._ranks.native, 0
        while True:
            number = (number + 1) % (1 << 32)
            while not native.wait(COMMAND, number, HOUR):
                pass
            command = read(self._ranks.commands)
            native.post(FIRST_TAKEN + self._ranks.rank, number)
            if command.kind is Kind.CLOSE:
                return
            self._try(command)

    def _try(self, command: Command) -> None:
        """Run a command; an error makes every rank discard the pass."""
        native = self._ranks.native
        if command.kind is Kind.SYNC:
            native.count = command.numbers[0]
            self._connection.send({"kind": "synced", "error": self._error})
            self._error = None
            return
        if command.kind in (Kind.READ_BLOCKS, Kind.WRITE_BLOCKS):
            self._connection.send({"kind": "blocks", "error": self._share_blocks(command)})
            return
        try:
            self._run(command)
        except Exception as error:
            if self._runner.kernels.ranks is not self._ranks:  # exchanges of torch.distributed cannot be resumed
                logger.error("a pass failed on rank %d: %r", self._ranks.rank, error)
                os._exit(1)
            if not native.fault:  # this rank is the first to fail
                prefix = "out of memory: " if is_out_of_memory(error) or isinstance(error, MemoryError) else ""
                self._error = f"{prefix}rank {self._ranks.rank}: {type(error).__name__}: {error}"
                native.fault = FAILED

    def _share_blocks(self, command: Command) -> str | None:
        """Copy this rank's parts of blocks to or from shared memory; returns an error."""
        storage, ids = self._runner.storage, command.arrays[0]
        try:
            places = self._blocks.places(command.numbers[0])[self._ranks.rank, :, : storage.layout.bytes_per_block]
            for place, block_id in zip(places, [] if ids is None else ids.tolist(), strict=False):
                if command.kind is Kind.READ_BLOCKS:
                    place[:] = storage.read_block(block_id)
                else:
                    storage.write_block(block_id, place.copy())
        except Exception as error:
            return f"rank {self._ranks.rank}: {type(error).__name__}: {error}"
        return None

    def _run(self, command: Command) -> None:
        runner = self._runner
        if command.kind is Kind.RUN:
            kind, batch = batch_of(command, runner.kernels, self._adapter)
            if kind == Pass.STATES.value:
                runner.states(batch)
            else:
                (self._decode if kind == Pass.DECODE.value else self._prefill).run(batch)
        elif command.kind is Kind.RELEASE_MEMORY:
            runner.kernels.release_memory()
        elif command.kind is Kind.ADAPTER:
            self._read_adapter(command.numbers[0])
        elif command.kind is Kind.DROP_ADAPTERS:
            for number in command.numbers:
                self._adapters.pop(number, None)
        elif command.arrays[0] is not None:
            rows = command.arrays[0].tolist()
            if command.kind is Kind.MOVES:
                runner.storage.move_blocks([(source, target) for source, target in rows])
            else:
                runner.storage.poison_blocks(rows)

    def _read_adapter(self, number: int) -> None:
        """Read an adapter; an error is that of the passes that use it."""
        try:
            part = read_part(file_of(self._folder, number, self._ranks.rank))
            self._adapters[number] = self._runner.kernels.prepare_adapter(part)
        except (OSError, ValueError, MemoryError, BifolioError) as error:
            self._adapters[number] = f"{type(error).__name__}: {error}"

    def _adapter(self, number: int) -> Adapter:
        found = self._adapters[number]
        if isinstance(found, str):
            raise ConfigError(f"the adapter could not be read: {found}")
        return found


def new_rank(settings: Settings, ranks: SharedMemoryRanks, connection: Connection, blocks: SharedBlocks) -> Rank | None:
    """Load the rank's part, report the blocks that fit, and allocate as many as rank 0 says."""
    kernels = select_kernels(
        own_device(settings.device, settings.rank), name=settings.kernels, threads=settings.threads,
        activations=settings.activations, dtype=settings.dtype, deterministic=settings.exact,
    )  # fmt: skip
    kernels.ranks = ranks
    if settings.port is not None:
        from bifolio.kernels.torch_ranks import TorchRanks, new_store

        store = new_store(settings.size, settings.port)
        kernels.ranks = TorchRanks.join(kernels.device, store, settings.rank, settings.size)
    config = settings.config()
    model, plan = _part(settings, kernels, config)
    connection.send({"kind": "ready", "num_blocks": plan})
    answer = connection.receive()
    if answer is None:
        return None
    cache = replace(config.cache, num_blocks=int(answer["num_blocks"]), num_states=int(answer["num_states"]))
    runner = ModelRunner.new(model, cache, kernels)
    connection.send({"kind": "started"})
    return Rank(runner, ranks, connection, blocks, config.chunk_size, Path(settings.adapters))


def own_device(device: str, rank: int) -> str:
    """The GPU of a rank: the next one for each rank, from rank 0's on."""
    if not device.startswith("cuda"):
        return device
    return f"cuda:{int(device.partition(':')[2] or 0) + rank}"


def _part(settings: Settings, kernels: KernelSet, config: EngineConfig) -> tuple[LoadedModel, int]:
    model = rounded_model(load_model(settings.model), settings.quantization, kernels)
    model = shard_model(model, kernels, settings.rank, settings.size, exact=settings.exact)
    model, plan = plan_rank(
        model, config, kernels, num_blocks=settings.num_blocks, memory=settings.memory, utilisation=settings.utilisation
    )
    return model, plan.num_blocks


def _end_with(connection: socket.socket) -> None:
    """End this process when rank 0 closes its socket or ends."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    opened = socket.socket(fileno=int(sys.argv[1]))
    connection = Connection(opened)
    received = connection.receive()
    if received is None:
        return
    settings = Settings(**received)
    ranks = SharedMemoryRanks(int(sys.argv[2]), settings.rank, settings.size, int(sys.argv[3]))
    try:
        rank = new_rank(settings, ranks, connection, SharedBlocks(int(sys.argv[4]), settings.size))
    except (BifolioError, MemoryError) as error:
        connection.send({"kind": "refused", "refused": str(error) or type(error).__name__})
        return
    if rank is None:
        return
    threading.Thread(target=_end_with, args=(opened,), daemon=True).start()
    rank.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
