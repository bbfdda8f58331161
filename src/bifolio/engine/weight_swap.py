"""Exchange the weights of an engine between two steps."""

from __future__ import annotations

from bifolio.engine.engine import InferenceEngine
from bifolio.engine.sleep import is_on_device
from bifolio.errors import ConfigError
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import ModelWeights


def replace_weights(engine: InferenceEngine, model: LoadedModel, prepared: ModelWeights) -> int:
    """Continue with other weights of the same network; return their version.

    Running requests keep the tokens they have and continue on the new weights: everything that the old ones computed
    is dropped, so no pass reads values of both.
    """
    method = None if engine.config.speculative is None else engine.config.speculative.method
    arena = engine.runner.kernels.arena
    if engine.runner.peers is not None or method not in (None, "ngram"):
        raise ConfigError("weights are replaced in one process and without a draft model: make a new LLM")
    if is_on_device(engine) and arena is None:
        raise ConfigError(
            "weights on a GPU are replaced where captured steps find them: pass enable_sleep_mode "
            "(--enable-sleep-mode) to a new LLM"
        )
    if engine.tiers is not None or model.tower is not None:
        kind = "a model that reads images" if model.tower is not None else "tiers, which hold blocks of the old weights"
        raise ConfigError(f"weights are not replaced with {kind}: make a new LLM")
    engine.take_back()
    while engine.batcher.drop_kept():
        pass
    engine.blocks.drop_cached()
    if arena is None:
        engine.runner.exchange(prepared)
        engine.runner.programs.clear()
    else:  # programs and graphs read the same addresses
        if "weights" in engine.asleep:
            arena.wake({"weights"})
        arena.refill(engine.runner.weights, prepared)
    engine.model = model
    engine.asleep.discard("weights")
    engine.weight_version += 1
    for request in engine.requests.values():
        request.metrics.weight_version = engine.weight_version
        request.metrics.num_weight_changes += 1
    return engine.weight_version
