"""Blocks of a prompt out of one engine's cache and into another's.

A block travels as the bytes of its keys and values in all layers, under its place in the prompt. The receiver stores
the leading blocks that arrived whole and commits them, so that a request finds them as any cached prefix; a prompt
whose blocks arrive in part, or not at all, is computed from there on. All functions here run on the thread that owns
the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from bifolio.engine.engine import InferenceEngine
from bifolio.engine.transfer.states import store_state
from bifolio.errors import ConfigError, OutOfBlocksError
from bifolio.quant.tensor import QuantizedTensor

SAMPLED_BYTES = 4096  # of each matrix, for the fingerprint


def fingerprint(engine: InferenceEngine) -> bytes:
    """Equal for engines whose blocks are interchangeable: model, kernels, and the layout of a block."""
    if engine.runner.peers is not None:
        raise ConfigError("an engine with tensor_parallel_size above 1 holds a part of each block: run it on one rank")
    kernels, storage = engine.runner.kernels, engine.runner.storage
    layout = storage.layout
    parts = [
        repr(sorted(asdict(engine.model.config).items())),
        f"{kernels.name} {kernels.activation_planes} {storage.dtype}",
        f"{layout.num_layers} {layout.block_size} {layout.num_kv_heads} {layout.head_dim}",
    ]
    digest = blake2b("\n".join(parts).encode(), digest_size=16)
    for matrix in engine.model.weights.matrices():
        if isinstance(matrix, QuantizedTensor):
            digest.update(np.ascontiguousarray(matrix.data.reshape(-1)[:SAMPLED_BYTES]).tobytes())
    return digest.digest()


class Sizes(NamedTuple):
    """The numbers of an engine that both sides of a transfer need; they do not change while it runs."""

    fingerprint: bytes
    block_size: int
    block_bytes: int
    max_model_len: int
    state_bytes: int = 0  # of the recurrent layers

    @classmethod
    def of(cls, engine: InferenceEngine) -> Sizes:
        layout = engine.runner.storage.layout
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
    engine: InferenceEngine, token_ids: Sequence[int], salt: bytes, first: int, most: int
) -> list[np.ndarray]:
    """u8[block bytes] of at most `most` cached blocks of a prompt, from its block `first` on."""
    blocks = engine.blocks
    with blocks.lock:
        sequence_id = blocks.fresh_sequence_id()
        blocks.open_table(sequence_id, token_ids, salt=salt)
        try:
            block_ids = blocks.block_ids_of(sequence_id)[first : first + most]
            return [engine.runner.storage.read_block(block_id) for block_id in block_ids]
        finally:
            blocks.release(sequence_id)


class Arrival:
    """Blocks of one prompt on their way into an engine's cache; they stay allocated until `close`."""

    def __init__(self, engine: InferenceEngine, token_ids: Sequence[int], salt: bytes) -> None:
        self._engine = engine
        self._token_ids = token_ids
        self._sequence_id = engine.blocks.fresh_sequence_id()
        cached = engine.blocks.open_table(self._sequence_id, token_ids, salt=salt)
        self.num_blocks = cached // engine.blocks.block_size  # in the cache; the next one to arrive has this number

    def add(self, arrived: Sequence[np.ndarray]) -> bool:
        """Store the next blocks and make them findable; False when the cache has no room for all of them."""
        manager, storage = self._engine.blocks, self._engine.runner.storage
        size = manager.block_size
        for data in arrived:
            try:
                manager.append(self._sequence_id, size)
            except OutOfBlocksError:
                return False
            storage.write_block(manager.block_ids_of(self._sequence_id)[-1], data)
            self.num_blocks += 1
            manager.commit(self._sequence_id, self._token_ids, self.num_blocks * size)
        return True

    def add_state(self, data: np.ndarray) -> None:
        """Store the recurrent state after the blocks that arrived."""
        store_state(self._engine, self._sequence_id, data)

    def close(self) -> None:
        """Leave the blocks to the prefix cache."""
        self._engine.blocks.release(self._sequence_id)
