"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.sharing import ShareStats
from bifolio.cache.states import StateStats
from bifolio.engine.tiers.tiers import TierStats
from bifolio.schedule.batcher import ContinuousBatcher


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the present state."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_forced_tokens: int = 0  # of the output: appended without a step, because a grammar left no choice
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    utilisation: float = 1.0  # reserved tokens over the capacity of all blocks in use
    states: StateStats = field(default_factory=StateStats)
    tiers: TierStats = field(default_factory=TierStats)
    sharing: ShareStats = field(default_factory=lambda: ShareStats(0, 0, 0, 0.0))

    def read_state(self, batcher: ContinuousBatcher, blocks: KVCacheBlockManager, num_parked: int) -> None:
        """Read the present state; `num_parked`: requests that wait for the end of a recovery."""
        self.num_prompt_tokens, self.num_cached_tokens = batcher.num_prompt_tokens, batcher.num_cached_tokens
        self.num_running, self.num_waiting = batcher.num_running, batcher.num_waiting + num_parked
        self.num_blocks, self.num_used_blocks = blocks.num_blocks - 1, blocks.num_used_blocks
        self.utilisation, self.states = blocks.utilisation(), blocks.state_stats()
