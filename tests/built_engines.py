"""Small engines by `build_engine`, as users get them: for tests on a GPU, where nothing else may make one."""

from __future__ import annotations

from typing import Any

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.config import CacheConfig, EngineConfig, KVDtype
from bifolio.engine.build import build_engine
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.executor import ModelRunner
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model.loaded import LoadedModel
from helpers import tiny_loaded


def built_engine(
    model: LoadedModel | None = None,
    *,
    kernels: KernelSet | None = None,
    num_blocks: int = 128,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    poison: bool = True,
    cache_dtype: KVDtype = "f32",
    draft_model: LoadedModel | None = None,
    checkpoint_tokens: int | None = None,
    **options: Any,
) -> InferenceEngine:
    """As `helpers.make_engine`; weights are moved to the device and states are planned as they are for `LLM`."""
    cache = CacheConfig(
        num_blocks, block_size, cache_dtype, enable_prefix_caching, poison, checkpoint_tokens=checkpoint_tokens
    )
    sizes = {"max_model_len": 128, "max_num_seqs": 8, "token_budget": 64, "chunk_size": 32, "warm_up": False}
    config = EngineConfig(cache, **{**sizes, **options})
    return build_engine(
        model or tiny_loaded(), config, kernels or ReferenceKernels(), draft_model=draft_model, num_blocks=num_blocks
    )[1]


def built_runner(model: LoadedModel, **options: Any) -> tuple[ModelRunner, KVCacheBlockManager]:
    """As `helpers.make_runner`, of a built engine."""
    engine = built_engine(model, **{"num_blocks": 64, "poison": False, **options})
    return engine.runner, engine.blocks
