"""Shared by the tests of the block manager."""

from __future__ import annotations

from bifolio.cache import KVCacheBlockManager

PROMPT = list(range(100, 111))  # 11 tokens: two full blocks of 4, and 3 more


def make(num_blocks: int = 17, block_size: int = 4) -> KVCacheBlockManager:
    return KVCacheBlockManager(num_blocks, block_size)


def opened(manager: KVCacheBlockManager, sequence_id: int, num_tokens: int) -> list[int]:
    manager.open_table(sequence_id)
    manager.append(sequence_id, num_tokens)
    return manager.block_ids_of(sequence_id)


def computed(manager: KVCacheBlockManager, sequence_id: int, tokens: list[int], salt: bytes = b"") -> int:
    """Open, append, commit: as after a prefill pass. Returns what was found in the cache."""
    held = manager.open_table(sequence_id, tokens, salt=salt)
    manager.append(sequence_id, len(tokens) - held)
    manager.commit(sequence_id, tokens, len(tokens))
    return held
