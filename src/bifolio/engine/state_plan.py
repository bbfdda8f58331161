"""The number of recurrent states of a hybrid model, and the spacing of their checkpoints.

A running sequence needs two states: the one that a pass reads and the one that it writes; each draft needs one more.
The remaining states hold checkpoints, one for each spacing of cached tokens. The default spacing is the number of
tokens whose keys and values take as much memory as one checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bifolio.cache.storage import CacheLayout
from bifolio.config import CacheConfig, EngineConfig, ModelConfig
from bifolio.errors import ConfigError

LEAST_SPACING = 256  # tokens
RESERVED = 2  # the empty state, and one for embeddings


@dataclass(frozen=True, slots=True)
class StatePlan:
    """States by purpose."""

    bytes_per_state: int
    num_live: int  # for running sequences, and the reserved ones
    num_ends: int  # for the ends of prompts and turns
    spacing: int  # tokens between two checkpoints

    def num_states(self, num_tokens: int) -> int:
        """All states, for a cache of `num_tokens`."""
        return self.num_live + (self.num_ends + -(-num_tokens // self.spacing) if self.num_ends else 0)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the size of the cache."""
        return (self.num_live + self.num_ends) * self.bytes_per_state

    @property
    def bytes_per_token(self) -> float:
        """Bytes of checkpoints for each token of the cache."""
        return self.bytes_per_state / self.spacing if self.num_ends else 0.0


def num_live_states(config: ModelConfig, num_sequences: int) -> int:
    """States of sequences without drafts and checkpoints: two each, and the empty one; 0: no recurrent layers."""
    return 0 if config.recurrent is None else 1 + 2 * num_sequences


def plan_states(config: ModelConfig, engine: EngineConfig) -> StatePlan | None:
    """The plan for a model; None if it has no recurrent layers."""
    if config.recurrent is None:
        return None
    cache = engine.cache
    layout = CacheLayout.of_model(config, 1, cache.block_size, cache.dtype)
    spacing = cache.checkpoint_tokens
    if spacing is not None and (spacing < 1 or spacing % cache.block_size):
        raise ConfigError(
            f"checkpoint_tokens={spacing} is no multiple of the block size: checkpoints end blocks of "
            f"{cache.block_size} tokens, so pass a multiple of it"
        )
    if spacing is None:
        tokens = max(-(-layout.bytes_per_state // layout.bytes_per_token), LEAST_SPACING)
        spacing = -(-tokens // cache.block_size) * cache.block_size
    drafts = 0 if engine.speculative is None else engine.speculative.length
    return StatePlan(
        bytes_per_state=layout.bytes_per_state,
        num_live=RESERVED + engine.max_num_seqs * (2 + drafts),
        num_ends=engine.max_num_seqs if cache.enable_prefix_caching else 0,
        spacing=spacing,
    )


def with_states(config: ModelConfig, engine: EngineConfig) -> CacheConfig:
    """The configuration of the cache with its number of states, which follows from the number of blocks."""
    plan, cache = plan_states(config, engine), engine.cache
    if plan is None:
        return cache
    num_states = cache.num_states or plan.num_states(cache.num_blocks * cache.block_size)
    if num_states < plan.num_live:
        raise ConfigError(
            f"{num_states} recurrent states are too few for max_num_seqs={engine.max_num_seqs}: pass num_states >= "
            f"{plan.num_live} or fewer sequences"
        )
    return replace(cache, num_states=num_states, checkpoint_tokens=plan.spacing)
