"""Blocks of a prompt out of one engine's cache and into another's.

A block travels as the bytes of its keys and values in all layers and of all heads, under its place in the prompt. The
ranks of tensor parallelism hold some of the heads each, so engines of different sizes exchange blocks. The receiver
stores the leading blocks that arrived whole and commits them, so that a request finds them as any cached prefix; a
prompt whose blocks arrive in part, or not at all, is computed from there on. All functions here run on the thread that
owns the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bifolio.cache.storage import CacheLayout
from bifolio.engine.parallel.shared_blocks import joined_blocks, split_blocks
from bifolio.engine.transfer.states import store_state
from bifolio.errors import ConfigError, OutOfBlocksError
from bifolio.images import Mark
from bifolio.model.shards import head_spans

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine


def fingerprint(engine: InferenceEngine) -> bytes:
    """Equal for engines whose blocks are interchangeable: model, kernels, and the layout of a block."""
    kernels, storage, peers = engine.runner.kernels, engine.runner.storage, engine.runner.peers
    if peers is not None and engine.blocks.has_states:
        raise ConfigError(
            "recurrent states of several ranks cannot be transferred: set tensor_parallel_size to 1, or run both "
            "phases in one engine"
        )
    layout = whole_layout(engine)
    is_exact = peers is None or engine.config.deterministic  # the bits of one rank
    parts = [
        repr(sorted(asdict(engine.model.config).items())),
        f"{kernels.name} {kernels.activation_planes} {storage.dtype}",
        f"{layout.num_layers} {layout.block_size} {layout.num_kv_heads} {layout.head_dim}",
        "" if is_exact or peers is None else f"sums of {peers.size} ranks",
    ]
    return blake2b("\n".join(parts).encode() + engine.model.digest(), digest_size=16).digest()


def whole_layout(engine: InferenceEngine) -> CacheLayout:
    """The layout of the cache with the heads of all ranks."""
    layout = engine.runner.storage.layout
    return layout if engine.runner.peers is None else replace(layout, num_kv_heads=engine.model.config.num_kv_heads)


class Sizes(NamedTuple):
    """The numbers of an engine that both sides of a transfer need; they do not change while it runs."""

    fingerprint: bytes
    block_size: int
    block_bytes: int
    max_model_len: int
    state_bytes: int = 0  # of the recurrent layers

    @classmethod
    def of(cls, engine: InferenceEngine) -> Sizes:
        layout = whole_layout(engine)
        return cls(
            fingerprint(engine),
            layout.block_size,
            layout.bytes_per_block,
            engine.config.max_model_len,
            layout.bytes_per_state,
        )

    def num_blocks(self, num_tokens: int) -> int:
        """Full blocks of a prompt that a cache can provide: the last token is always computed, for its logits."""
        return (num_tokens - 1) // self.block_size


def read_blocks(
    engine: InferenceEngine,
    token_ids: Sequence[int],
    salt: bytes,
    first: int,
    most: int,
    marks: tuple[Mark, ...] = (),
) -> list[np.ndarray]:
    """u8[block bytes] of at most `most` cached blocks of a prompt, from its block `first` on."""
    blocks = engine.blocks
    with blocks.lock:
        sequence_id = blocks.fresh_sequence_id()
        blocks.open_table(sequence_id, token_ids, salt=salt, marks=marks)
        try:
            block_ids = blocks.block_ids_of(sequence_id)[first : first + most]
            return list(read_stored(engine, block_ids))
        finally:
            blocks.release(sequence_id)


class Arrival:
    """Blocks of one prompt on their way into an engine's cache; they stay allocated until `close`."""

    def __init__(
        self,
        engine: InferenceEngine,
        token_ids: Sequence[int],
        salt: bytes,
        sequence_id: int | None = None,
        marks: tuple[Mark, ...] = (),
    ) -> None:
        self._engine = engine
        self._token_ids = token_ids
        self._sequence_id = engine.blocks.fresh_sequence_id() if sequence_id is None else sequence_id
        cached = engine.blocks.open_table(self._sequence_id, token_ids, salt=salt, marks=marks)
        self.num_blocks = cached // engine.blocks.block_size  # in the cache; the next one to arrive has this number

    def add(self, arrived: Sequence[np.ndarray]) -> bool:
        """Store the next blocks and make them findable; False when the cache has no room for all of them."""
        manager, size, count = self._engine.blocks, self._engine.blocks.block_size, 0
        with contextlib.suppress(OutOfBlocksError):
            for _ in arrived:
                manager.append(self._sequence_id, size)
                count += 1
        if count:
            block_ids = manager.block_ids_of(self._sequence_id)[self.num_blocks :]
            write_stored(self._engine, block_ids, arrived[:count])
            self.num_blocks += count
            manager.commit(self._sequence_id, self._token_ids, self.num_blocks * size)
        return count == len(arrived)

    def add_state(self, data: np.ndarray) -> None:
        """Store the recurrent state after the blocks that arrived."""
        store_state(self._engine, self._sequence_id, data)

    def close(self) -> None:
        """Leave the blocks to the prefix cache."""
        self._engine.blocks.release(self._sequence_id)


# -- the storages of all ranks ----------------------------------------------------------------------------------------
def read_stored(engine: InferenceEngine, block_ids: Sequence[int]) -> np.ndarray:
    """u8[n, block bytes] with the heads of all ranks."""
    storage, peers = engine.runner.storage, engine.runner.peers
    if not block_ids:
        return np.empty((0, whole_layout(engine).bytes_per_block), np.uint8)
    own = np.stack([storage.read_block(block_id) for block_id in block_ids])
    if peers is None:
        return own
    layout, heads = whole_layout(engine), kv_heads(engine, peers.size)
    head_bytes = layout.bytes_per_block // layout.num_kv_heads
    others = peers.read_blocks(block_ids, [(stop - start) * head_bytes for start, stop in heads])
    return joined_blocks([own, *others], heads, num_arrays(layout))


def write_stored(engine: InferenceEngine, block_ids: Sequence[int], blocks: Sequence[np.ndarray]) -> None:
    """Store u8[block bytes] of each block: each rank gets its heads."""
    storage, peers = engine.runner.storage, engine.runner.peers
    if peers is not None:
        parts = split_blocks(np.stack(blocks), kv_heads(engine, peers.size), num_arrays(storage.layout))
        peers.write_blocks(block_ids, parts)
        storage.write_blocks(block_ids, parts[0])
        return
    rows = _rows_of_one_array(blocks)
    if rows is not None:
        storage.write_blocks(block_ids, rows)
        return
    for block_id, block in zip(block_ids, blocks, strict=True):
        storage.write_block(block_id, block)


def _rows_of_one_array(blocks: Sequence[np.ndarray]) -> np.ndarray | None:
    """u8[n, block bytes] where the blocks are rows of one array, one after the other; None: they are not."""
    whole = blocks[0].base
    if not isinstance(whole, np.ndarray) or whole.ndim != 2 or any(block.base is not whole for block in blocks):
        return None
    first, column = divmod(blocks[0].ctypes.data - whole.ctypes.data, whole.strides[0])
    rows: np.ndarray = whole[first : first + len(blocks), column : column + len(blocks[0])]
    starts = [block.ctypes.data for block in blocks]
    step = whole.strides[0]
    return rows if starts == list(range(starts[0], starts[0] + step * len(blocks), step)) else None


def kv_heads(engine: InferenceEngine, size: int) -> list[tuple[int, int]]:
    """The kv heads [start, stop) of each rank."""
    return head_spans(engine.model.config, size)[1]


def num_arrays(layout: CacheLayout) -> int:
    """Arrays of keys and values in all layers; latents are on every rank, and a block of them is one array."""
    return 1 if layout.shared_values else 2 * layout.num_layers
