"""The speculator of a configuration: its drafter with weights and storage, and its policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bifolio.config import SpeculativeConfig
from bifolio.engine.executor import ModelRunner
from bifolio.engine.speculative.draft_model import DraftModelDrafter, check_pair
from bifolio.engine.speculative.drafter import Drafter
from bifolio.engine.speculative.head_runner import HeadRunner
from bifolio.engine.speculative.hidden_draft import HiddenDraft
from bifolio.engine.speculative.ngram import NgramDrafter
from bifolio.engine.speculative.policy import DraftPolicy
from bifolio.engine.speculative.speculator import Speculator
from bifolio.errors import ConfigError
from bifolio.model.draft_head import LoadedHead, prepare_head
from bifolio.model.loaded import LoadedModel

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine


def with_taps(model: LoadedModel, draft_model: LoadedModel | LoadedHead | None) -> LoadedModel:
    """The model with the taps that a draft head reads."""
    if not isinstance(draft_model, LoadedHead):
        return model
    return replace(model, weights=model.weights.tapped(draft_model.weights.taps))


def new_speculator(engine: InferenceEngine, draft_model: LoadedModel | LoadedHead | None) -> Speculator | None:
    """Create the configured speculator; a draft model's storage is added to the engine's."""
    config = engine.config.speculative
    if config is None:
        return None
    drafter = _new_drafter(engine, draft_model, config)
    runs_ahead = engine.runner.kernels.launches_ahead
    is_late = runs_ahead and not (drafter.reads_states and drafter.can_follow)
    policy = DraftPolicy(config.length, config.adaptive, is_late)
    return Speculator(drafter, policy, engine.config.max_model_len, plain_has_states=not runs_ahead)


def _new_drafter(
    engine: InferenceEngine, draft_model: LoadedModel | LoadedHead | None, config: SpeculativeConfig
) -> Drafter:
    if config.method == "ngram":
        return NgramDrafter()
    if config.method in ("eagle", "mtp"):
        if not isinstance(draft_model, LoadedHead):
            raise ConfigError(f"speculative method {config.method!r} needs a draft head: pass draft_model=...")
        return _new_head(engine, draft_model, config)
    if not isinstance(draft_model, LoadedModel):
        raise ConfigError("speculative method 'draft' needs a draft model: pass draft_model=...")
    check_pair(engine.model, draft_model)
    runner = ModelRunner.new(draft_model, engine.config.cache, engine.runner.kernels)
    engine.storages.append(runner.storage)
    return DraftModelDrafter(runner, engine.slots, engine.config.chunk_size)


def _new_head(engine: InferenceEngine, head: LoadedHead, config: SpeculativeConfig) -> HiddenDraft:
    if engine.runner.peers is not None:
        raise ConfigError(
            f"speculative method {config.method!r} needs tensor_parallel_size 1: choose 'draft' or 'ngram'"
        )
    weights = prepare_head(head.weights, engine.runner.kernels, engine.runner.weights)
    runner = HeadRunner(weights, engine.config.cache, engine.runner.kernels)
    engine.storages.append(runner.blocks)
    if engine.slots.device is not None:
        runner.on_device = engine.slots.device.draft_slots(runner.network, runner.blocks.storage)
    return HiddenDraft(runner, engine.slots, engine.config.chunk_size)
