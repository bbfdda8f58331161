"""Recurrent states between engines: a hybrid model's blocks are of use only behind a checkpoint.

The state after a prompt's last full block travels behind that block, and those of earlier checkpoints where the sender
pauses. The receiver makes it the checkpoint of the block that it follows, as a pass of its own would have. All
functions here run on the thread that owns the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bifolio.images import Mark

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine


def read_state(
    engine: InferenceEngine,
    token_ids: Sequence[int],
    salt: bytes,
    num_blocks: int,
    marks: tuple[Mark, ...] = (),
) -> np.ndarray | None:
    """u8[state bytes] of the checkpoint behind the first blocks of a prompt; None if there is none."""
    blocks = engine.blocks
    if not blocks.has_states or not num_blocks:
        return None
    with blocks.lock:
        sequence_id, num_tokens = blocks.fresh_sequence_id(), num_blocks * blocks.block_size
        found = blocks.open_table(sequence_id, token_ids, salt=salt, max_cached=num_tokens, marks=marks)
        try:
            state = blocks.state_of(sequence_id)
            return engine.runner.storage.read_state(state) if found == num_tokens else None
        finally:
            blocks.release(sequence_id)


def store_state(engine: InferenceEngine, sequence_id: int, data: np.ndarray) -> None:
    """Store the state after the committed blocks of a sequence; without room for it, the blocks are computed again."""
    with engine.blocks.lock:
        state = engine.blocks.adopt_state(sequence_id)
        if state is not None:
            engine.runner.storage.write_state(state, data)
