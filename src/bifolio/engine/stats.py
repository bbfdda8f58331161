"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from bifolio.cache.sharing import ShareStats
from bifolio.cache.states import StateStats


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the present state."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    utilisation: float = 1.0  # reserved tokens over the capacity of all blocks in use
    states: StateStats = field(default_factory=StateStats)
    sharing: ShareStats = field(default_factory=lambda: ShareStats(0, 0, 0, 0.0))
