"""From the options of `LLM` to kernels and a configuration of the engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bifolio.api.vllm_options import cache_dtype, weight_dtype
from bifolio.config import AdapterConfig, CacheConfig, EngineConfig, SpeculativeConfig, TierSettings
from bifolio.engine.build import resolve_sizes
from bifolio.engine.expert_placement import place_experts, read_cpu_experts
from bifolio.engine.memory import default_threads
from bifolio.engine.parallel.commands import command_bytes
from bifolio.engine.parallel.team import RankTeam, engine_settings
from bifolio.engine.tiers.build import check_tiers
from bifolio.errors import ConfigError
from bifolio.kernels.cpu import MAX_RANKS
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.select import require_gpu, select_kernels
from bifolio.model.draft_head import LoadedHead
from bifolio.model.eagle import load_eagle
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model, open_model
from bifolio.model.next_token_head import load_next_token_head
from bifolio.model.shards import check_size
from bifolio.model.weight_rounding import rounded_model

USUAL_ADAPTERS = AdapterConfig()
USUAL_LENGTH = 8192  # the longest sequence where none is given, if the model allows it


def loaded(model: str | Path | LoadedModel, mmproj: str | Path | None = None) -> LoadedModel:
    """The model of a reference, with the tower of the file `mmproj`."""
    if not isinstance(model, LoadedModel):
        return load_model(model, mmproj)
    if mmproj is not None:
        raise ConfigError("mmproj goes with the path of a model: load the model with it, load_model(path, mmproj)")
    return model


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of `LLM` that decide on numbers and sizes, as the caller gave them; None: the device's default."""

    dtype: Any
    kv_cache_dtype: str
    deterministic: bool | None
    block_size: int | None
    max_num_seqs: int | None
    max_model_len: int | None
    chunk_size: int | None
    token_budget: int | None
    max_waiting: int | None
    enable_prefix_caching: bool
    poison_free_blocks: bool
    warm_up: bool
    speculative: SpeculativeConfig | None
    quantization: str | None = None  # of dense models, at load
    cpu_experts: str | int | None = None
    tensor_parallel_size: int = 1
    sleep_mode: bool = False  # on a GPU: weights and cache can be given back
    adapters: AdapterConfig = USUAL_ADAPTERS
    tiers: TierSettings | None = None

    def __post_init__(self) -> None:
        size = self.tensor_parallel_size
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_RANKS:
            raise ConfigError(f"tensor_parallel_size is a number of processes from 1 to {MAX_RANKS}, not {size!r}")
        if read_cpu_experts(self.cpu_experts) is not None and size > 1:
            raise ConfigError("cpu_experts goes with tensor_parallel_size 1: leave one of them out")
        if self.sleep_mode and size > 1:
            raise ConfigError("enable_sleep_mode goes with tensor_parallel_size 1: leave one of them out")

    def kernels(self, given: KernelSet | str | None, device: str, threads: int | None, activations: str) -> KernelSet:
        """The given kernel set, or the one for the device; the ranks of tensor parallelism share the cores."""
        if given is not None and not isinstance(given, str):
            if self.tensor_parallel_size > 1:
                raise ConfigError("with tensor_parallel_size above 1, pass kernels by their name")
            return given
        kernels = select_kernels(
            device,
            name=given,
            threads=self._threads(threads),
            activations=activations,
            dtype=weight_dtype(self.dtype),
            deterministic=bool(self.deterministic),
        )
        if self.sleep_mode:
            kernels.use_arena()
        return kernels

    def config(self, model: LoadedModel, kernels: KernelSet) -> EngineConfig:
        """The configuration before memory is planned: the number of blocks is still unlimited."""
        length = self._model_len(model.config.max_position, model.pooling.max_length)
        sizes = resolve_sizes(
            kernels, self.block_size, self.max_num_seqs, self.chunk_size, self.token_budget,
            whole=length if model.config.bidirectional else None,
        )  # fmt: skip
        is_cpu = kernels.device == "cpu"
        check_tiers(self.tiers, self.tensor_parallel_size, self.enable_prefix_caching)
        return EngineConfig(
            cache=CacheConfig(
                sys.maxsize,
                sizes.block_size,
                cache_dtype(self.dtype, self.kv_cache_dtype, kernels.kv_dtype, kernels.device),
                self.enable_prefix_caching,
                self.poison_free_blocks,
            ),
            max_model_len=length,
            max_num_seqs=sizes.max_num_seqs,
            token_budget=sizes.token_budget,
            chunk_size=sizes.chunk_size,
            max_waiting=self.max_waiting,
            deterministic=self.deterministic is not False if is_cpu else bool(self.deterministic),
            device=kernels.device,
            speculative=self.speculative,
            tiers=self.tiers,
            warm_up=self.warm_up,
            adapters=self.adapters,
        )

    def placed(
        self,
        model: LoadedModel,
        kernels: KernelSet,
        config: EngineConfig,
        *,
        threads: int | None,
        activations: str,
        utilisation: float,
    ) -> LoadedModel:
        """The model as it is loaded: rounded, and with the experts that stay on the host."""
        rounded = rounded_model(model, self.quantization, kernels)
        host = partial(select_kernels, "cpu", threads=self._threads(threads), activations=activations)
        return place_experts(rounded, kernels, config, self.cpu_experts, host=host, utilisation=utilisation)

    def _threads(self, threads: int | None) -> int:
        """Threads of one rank; `threads` are those of all ranks together."""
        return max((threads or default_threads()) // self.tensor_parallel_size, 1)

    def team(
        self,
        model: LoadedModel,
        kernels: KernelSet,
        config: EngineConfig,
        *,
        threads: int | None,
        activations: str,
        num_blocks: int | None,
        memory: int | None,
        utilisation: float,
    ) -> RankTeam | None:
        """The other ranks, started; None without tensor parallelism."""
        size = self.tensor_parallel_size
        if size == 1:
            return None
        if kernels.device.startswith("cuda"):
            require_gpu(f"cuda:{int(kernels.device.partition(':')[2] or 0) + size - 1}")
        check_size(model.config, size)
        max_blocks = -(-config.max_model_len // config.cache.block_size) + 1
        most = command_bytes(max(config.token_budget, config.chunk_size), config.max_num_seqs, max_blocks)
        settings = {
            "model": str(model.path), "kernels": kernels.name, "device": kernels.device, "exact": config.deterministic,
            "threads": self._threads(threads), "activations": activations, "dtype": weight_dtype(self.dtype),
            "quantization": self.quantization,
            "num_blocks": num_blocks, "memory": memory, "utilisation": utilisation, **engine_settings(config),
        }  # fmt: skip
        return RankTeam(kernels, size, most, settings)

    def _model_len(self, most: int, usual: int | None) -> int:
        """`usual`: the length that the model's files recommend for texts."""
        wanted = self.max_model_len
        if wanted is None:
            return min(most, usual or USUAL_LENGTH)
        if not 1 <= wanted <= most:
            raise ConfigError(
                f"max_model_len={wanted} is outside 1..{most}, the context length of this model: pass a number in it"
            )
        return wanted

    def draft_model(self, model: LoadedModel) -> LoadedModel | LoadedHead | None:
        """The draft model or head of speculative decoding: `stories` has `stories-draft`."""
        if self.speculative is None or self.speculative.method == "ngram":
            return None
        if self.speculative.method != "draft" and self.tensor_parallel_size > 1:
            method = self.speculative.method
            raise ConfigError(f"speculative method {method!r} needs tensor_parallel_size 1: choose 'draft' or 'ngram'")
        if self.speculative.method == "mtp":
            return load_next_token_head(open_model(model.path), model)
        if self.speculative.method == "eagle":
            return load_eagle(self.speculative.draft_model or "", model)
        return load_model(self.speculative.draft_model or f"{model.path.stem}-draft")
