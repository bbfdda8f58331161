"""The verbs of `LLM` beside generating: branches, receipts, and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from bifolio.api.receipts import receipt_of
from bifolio.api.shared_engine import SharedEngine, Start
from bifolio.api.weight_update import Source, updated_model
from bifolio.engine.branches import BranchOwner
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.fault.out_of_memory import is_out_of_memory
from bifolio.engine.sleep import checked_tags, fall_asleep, needs_weights, wake
from bifolio.engine.weight_swap import replace_weights
from bifolio.errors import ConfigError, RequestError
from bifolio.model.adapters.sites import with_sites
from bifolio.model.digests import model_digest, numerics
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import ModelWeights, prepare
from bifolio.sequence import Request

T = TypeVar("T")


class EngineVerbs:
    """A part of `LLM`."""

    model: LoadedModel
    _shared: SharedEngine
    _placed: Callable[[LoadedModel], LoadedModel]  # a model with the options of this engine that change weights

    @property
    def engine(self) -> InferenceEngine:
        return self._shared.engine

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The name and the digest of the model, for receipts; the first call reads all weights."""
        return {"name": self.model.path.name, "digest": model_digest(self.model, whole=True)}

    @cached_property
    def numerics(self) -> dict[str, Any]:
        """The facts of the arithmetic, for receipts."""
        return numerics(self.engine.model, self.engine.runner.kernels, self.engine.config)

    @cached_property
    def branches(self) -> BranchOwner:
        """The owner of all branches of this LLM."""
        return BranchOwner(self.engine)

    def run_requests(self, starts: Sequence[Start]) -> list[Request]:
        """Run the requests that these functions make in one batch with those of other threads."""
        return self._shared.run(starts)

    def with_engine(self, function: Callable[[], T]) -> T:
        """Call a function while no step runs."""
        return self._shared.locked(function)

    def load_weights(self, source: Source) -> int:
        """Continue with weights of a folder, or of (name, tensor) pairs as a trainer has them; return their version.

        Calls of other threads that are in flight keep their tokens and continue on the new weights; they wait for the
        exchange alone.
        """
        model = updated_model(self.model, source)
        prepared = self.prepared(model)
        return self.with_engine(lambda: self.exchange(model, prepared))

    def prepared(self, model: LoadedModel) -> ModelWeights:
        """The weights of a model as this engine uses them: rounded, placed and packed."""
        try:
            return with_sites(prepare(self._placed(model).weights, self.engine.runner.kernels))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                "new weights do not fit beside those in use: let the engine sleep, wake the weights alone "
                "(/wake_up?tags=weights), load them, and then wake the cache"
            ) from None

    def exchange(self, model: LoadedModel, prepared: ModelWeights) -> int:
        """Replace the weights between two steps; they were prepared before."""
        version = replace_weights(self.engine, self._placed(model), prepared)
        self.model = model
        vars(self).pop("identity", None)
        return version

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: the cache (level 1), or the cache and the weights (level 2).

        On a GPU level 1 moves the weights to the host, and needs `enable_sleep_mode`.
        """

        def sleep() -> None:
            if self.engine.has_work:
                raise RequestError("requests are in flight: wait for them, or abort them, before the LLM sleeps")
            fall_asleep(self.engine, level)

        self.with_engine(sleep)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Go on; `tags` wakes "weights" or "kv_cache" alone. Weights that slept are prepared from the model's files."""
        checked_tags(tags)
        self.with_engine(lambda: wake(self.engine, tags, self.awake_weights(tags)))

    def awake_weights(self, tags: Sequence[str] | None) -> ModelWeights | None:
        """Prepared weights for an engine whose weights sleep and are to wake."""
        return self.prepared(self.model) if needs_weights(self.engine, tags) else None

    def is_sleeping(self) -> bool:
        """Whether memory was given back and not all of it is in use again."""
        return bool(self.engine.asleep)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        self.with_engine(lambda: self.engine.blocks.drop_cached())
        return True

    def collective_rpc(self, method: str) -> list[int]:
        """vLLM's name: "reload_weights" reads the model's files again; other methods are refused."""
        if method != "reload_weights":
            raise ConfigError(f"collective_rpc has the method 'reload_weights', not {method!r}: call load_weights")
        return [self.load_weights(self.model.path)]

    def receipt(self, request: Request) -> dict[str, Any]:
        """The receipt of a finished request of this engine (`api.receipts`)."""
        return receipt_of(request, self.identity, self.numerics)
