"""The tiers of an engine from its settings."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from bifolio.config.tiers import TierSettings
from bifolio.engine.tiers.content import BlockContent
from bifolio.engine.tiers.files import FileTier
from bifolio.engine.tiers.tier import MemoryTier, Tier
from bifolio.engine.tiers.tiers import CacheTiers
from bifolio.errors import ConfigError
from bifolio.model.draft_head import LoadedHead
from bifolio.model.loaded import LoadedModel

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine

VERSION = 1  # of the layout of a file's content
MOVING_BYTES = 256 << 20  # of pinned memory for blocks on their way


def check_tiers(settings: TierSettings | None, num_ranks: int, has_prefixes: bool) -> None:
    """Refuse tiers where they cannot work, before the model is loaded onto a device."""
    if settings is None:
        return
    if num_ranks > 1:
        raise ConfigError("kv_offload needs tensor_parallel_size 1: leave one of them out")
    if not has_prefixes:
        raise ConfigError("kv_offload keeps cached prefixes, and enable_prefix_caching is off: leave one of them out")


def new_tiers(
    engine: InferenceEngine, settings: TierSettings | None, draft: LoadedModel | LoadedHead | None
) -> CacheTiers | None:
    """The tiers of an engine that is complete otherwise; None without settings."""
    if settings is None:
        return None
    storage = engine.runner.storage
    copies = storage.new_copies(settings.memory_bytes + MOVING_BYTES)
    content = BlockContent(storage, engine.storages[1:], copies)
    tiers: list[Tier] = []
    if settings.memory_bytes:
        tiers.append(MemoryTier(settings.memory_bytes))
    if settings.folder is not None:
        place = namespace(engine, content, draft)
        tiers.append(FileTier(settings.folder, place, settings.disk_bytes, content.allocate))
    return CacheTiers(engine, content, tiers)


def namespace(engine: InferenceEngine, content: BlockContent, draft: LoadedModel | LoadedHead | None = None) -> bytes:
    """Equal for engines that may share files: the same model, arithmetic, layout of a block, and draft head."""
    facts = (
        VERSION,
        content.block_bytes,
        content.state_bytes,
        engine.blocks.block_size,
        *engine.digests.of(engine.model),
        repr(draft.config) if isinstance(draft, LoadedHead) else "",
    )
    return blake2b(repr(facts).encode(), digest_size=16, person=b"bifolio-tiers").digest()
