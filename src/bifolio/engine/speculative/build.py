"""The speculator of an engine's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bifolio.engine.executor import ModelRunner
from bifolio.engine.memory import weight_bytes
from bifolio.engine.speculative.draft_lengths import DraftLengths
from bifolio.engine.speculative.draft_model import DraftModelDrafter, check_pair
from bifolio.engine.speculative.speculator import NgramDrafter, Speculator
from bifolio.errors import ConfigError
from bifolio.model.loaded import LoadedModel

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine


def new_speculator(engine: InferenceEngine, draft_model: LoadedModel | None) -> Speculator | None:
    """Create the configured speculator; a draft model's storage is added to the engine's."""
    config = engine.config.speculative
    if config is None:
        return None
    if config.method == "ngram":
        return Speculator(config, NgramDrafter(config), engine.config.max_model_len)
    if draft_model is None:
        raise ConfigError("speculative method 'draft' needs a draft model: pass draft_model=...")
    check_pair(engine.model, draft_model)
    runner = ModelRunner.new(draft_model, engine.config.cache, engine.runner.kernels)
    engine.storages.append(runner.storage)
    drafter = DraftModelDrafter(runner, engine.slots, engine.config.chunk_size)
    costs = [weight_bytes(model.weights, runner.kernels.formats) for model in (draft_model, engine.model)]
    relative_cost = costs[0] / max(costs[1], 1)
    lengths = DraftLengths(config.length, config.adaptive, drafter.costs, relative_cost)
    return Speculator(config, drafter, engine.config.max_model_len, lengths)
