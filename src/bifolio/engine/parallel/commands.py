"""Commands from rank 0 to the other ranks, as bytes in shared memory: moves of blocks and passes over a batch.

    |kind|count of numbers|count of arrays|numbers ...|  i64
    |dtype|dimensions|shape ...|  i64, then the bytes of the array, for each array; everything is aligned to 8 bytes

A command holds plain arrays only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from bifolio.errors import ConfigError
from bifolio.kernels.interface import Adapter, AdapterUse, AttentionPhase, Batch, KernelSet, StateUse
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator

DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
ABSENT = -1  # in place of a dtype
WORD = 8
NUM_BATCH_ARRAYS = (
    9  # of a batch, before those of its segments: tokens, positions, places, logit rows, states, adapters
)


class Kind(IntEnum):
    """The kind of a command."""

    RUN = 1
    MOVES = 2
    POISON = 3
    RELEASE_MEMORY = 4
    SYNC = 5  # a pass failed: forget it and answer
    CLOSE = 6
    READ_BLOCKS = 7  # copy blocks to shared memory and answer
    WRITE_BLOCKS = 8  # store blocks from shared memory and answer
    ADAPTER = 9  # read an adapter from its file
    DROP_ADAPTERS = 10


class Command(NamedTuple):
    """A command and its operands."""

    kind: Kind
    numbers: tuple[int, ...] = ()
    arrays: tuple[np.ndarray | None, ...] = ()


def write(command: Command, memory: np.ndarray) -> None:
    """Write a command to u8[n]; ConfigError if it does not fit."""
    header = np.array([command.kind, len(command.numbers), len(command.arrays), *command.numbers], np.int64)
    pieces: list[np.ndarray] = [header]
    for array in command.arrays:
        if array is None:
            pieces.append(np.array([ABSENT], np.int64))
            continue
        flat = np.ascontiguousarray(array)
        pieces += [np.array([DTYPES.index(flat.dtype), flat.ndim, *flat.shape], np.int64), flat.reshape(-1)]
    position = 0
    for piece in pieces:
        end = position + piece.nbytes
        if end > len(memory):
            raise ConfigError(f"a command of more than {len(memory)} bytes does not fit: use a smaller token_budget")
        memory[position:end] = piece.view(np.uint8)
        position = -(-end // WORD) * WORD


def read(memory: np.ndarray) -> Command:
    """Copy a command out of u8[n]."""
    kind, num_numbers, num_arrays = (int(value) for value in memory[: 3 * WORD].view(np.int64))
    position = (3 + num_numbers) * WORD
    numbers = tuple(memory[3 * WORD : position].view(np.int64).tolist())
    arrays: list[np.ndarray | None] = []
    for _ in range(num_arrays):
        code = int(memory[position : position + WORD].view(np.int64)[0])
        position += WORD
        if code == ABSENT:
            arrays.append(None)
            continue
        dimensions = int(memory[position : position + WORD].view(np.int64)[0])
        shape = memory[position + WORD : position + (1 + dimensions) * WORD].view(np.int64).tolist()
        position += (1 + dimensions) * WORD
        end = position + int(np.prod(shape)) * DTYPES[code].itemsize
        arrays.append(memory[position:end].view(DTYPES[code]).reshape(shape).copy())
        position = -(-end // WORD) * WORD
    return Command(Kind(kind), numbers, tuple(arrays))


def run_command(kind: int, batch: Batch, kernels: KernelSet, number_of: Callable[[Adapter], int]) -> Command:
    """The command to run a pass over this batch; ranks know adapters by numbers."""

    def host(array: object, dtype: type) -> np.ndarray | None:
        return None if array is None else np.asarray(kernels.to_host(array), dtype)

    states = (None,) * 3 if batch.states is None else tuple(np.asarray(a, np.int32) for a in batch.states.arrays())
    numbers = [kind, batch.max_position, len(batch.segments)]
    arrays = [host(batch.token_ids, np.int32), host(batch.positions, np.int32), host(batch.cache_index, np.int64)]
    arrays += [host(batch.logit_rows, np.int32), *states]  # states lie on the host, as the lengths of segments
    used = batch.adapters
    loaded = None if used is None else np.array([number_of(adapter) for adapter in used.loaded], np.int64)
    arrays += [loaded, None if used is None else np.asarray(used.rows, np.int32)]
    for segment in batch.segments:
        numbers += [int(segment.phase is AttentionPhase.DECODE), segment.token_start]
        arrays += [np.asarray(segment.query_starts, np.int32), np.asarray(segment.context_lens, np.int32)]
        arrays.append(host(segment.block_tables, np.int32))
    return Command(Kind.RUN, tuple(numbers), tuple(arrays))


def batch_of(command: Command, kernels: KernelSet, adapter_of: Callable[[int], Adapter]) -> tuple[int, Batch]:
    """The kind of the pass and its batch in the kernel set's arrays."""
    kind, max_position, num_segments = command.numbers[:3]
    *uploaded, starts, reads, writes, loaded, rows = command.arrays[:NUM_BATCH_ARRAYS]
    token_ids, positions, cache_index, logit_rows = (_upload(kernels, array) for array in uploaded)
    used = None if starts is None else StateUse(starts, reads, writes)
    adapters = None
    if loaded is not None and rows is not None:
        adapters = AdapterUse(tuple(adapter_of(number) for number in loaded.tolist()), rows)
    segments = []
    for number in range(num_segments):
        is_decode, token_start = command.numbers[3 + 2 * number : 5 + 2 * number]
        first = NUM_BATCH_ARRAYS + 3 * number
        query_starts, contexts, tables = command.arrays[first : first + 3]
        if query_starts is None or contexts is None:
            raise ConfigError("a segment without lengths cannot be run")
        lengths = np.diff(query_starts)
        orchestrator = DecodeOrchestrator if is_decode else PrefillOrchestrator
        segments.append(orchestrator.lay_out(contexts - lengths, lengths, _upload(kernels, tables), token_start))
    batch = Batch(token_ids, positions, cache_index, tuple(segments), logit_rows, max_position, used, adapters=adapters)
    return kind, batch


def _upload(kernels: KernelSet, array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else kernels.from_host(array)


def command_bytes(num_tokens: int, max_num_seqs: int, max_blocks: int) -> int:
    """Bytes that hold the largest command of an engine: a pass of `num_tokens` tokens with full block tables."""
    tokens = num_tokens * (4 + 4 + 8 + 4 + 4 + 4)
    sequences = 2 * max_num_seqs * (4 * max_blocks + 24)
    return -(-(tokens + sequences + 65536) // 4096) * 4096


def blocks_command(kind: Kind, rows: Sequence[Sequence[int]] | Sequence[int]) -> Command:
    """The command to move blocks (pairs) or to poison them (ids)."""
    return Command(kind, (), (np.array(rows, np.int64),))
