"""Build an engine from a model, settings and kernels: default sizes by device, memory planned before allocation.

A GPU is bound by launches and bandwidth, so it runs many sequences and long chunks per step. Its cache is sized last,
after the weights are loaded and the memory of the largest step has been measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bifolio.config import EngineConfig
from bifolio.engine.device_memory import measure_step, move_to_device
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.expert_placement import with_host_experts
from bifolio.engine.host_memory import free_memory, total_memory
from bifolio.engine.memory import MemoryPlan, plan_gpu_memory, plan_memory, weight_bytes
from bifolio.engine.parallel.team import RankTeam
from bifolio.engine.speculative.tracks import STATE_BYTES
from bifolio.engine.state_plan import plan_states
from bifolio.engine.warm_up import warm_up
from bifolio.errors import ConfigError
from bifolio.kernels.interface import DeviceMemory, KernelSet
from bifolio.model.draft_head import LoadedHead
from bifolio.model.loaded import LoadedModel
from bifolio.model.shards import shard
from bifolio.model.weights import OnLoad


class Sizes(NamedTuple):
    """Sizes of the cache's blocks and of a step."""

    block_size: int
    max_num_seqs: int
    chunk_size: int
    token_budget: int


SIZES = {"cpu": Sizes(16, 16, 512, 512), "cuda": Sizes(64, 256, 8192, 8192)}  # defaults
ENCODER_SIZES = {"cpu": Sizes(32, 128, 2048, 2048), "cuda": Sizes(64, 512, 16384, 16384)}  # of encoders


def resolve_sizes(
    kernels: KernelSet,
    block_size: int | None = None,
    max_num_seqs: int | None = None,
    chunk_size: int | None = None,
    token_budget: int | None = None,
    *,
    whole: int | None = None,
) -> Sizes:
    """The given sizes, and the device's defaults for the others.

    `whole`: the longest text of an encoder, which a step computes as a whole.
    """
    usual = (SIZES if whole is None else ENCODER_SIZES)["cuda" if kernels.device.startswith("cuda") else "cpu"]
    if whole is not None:
        if token_budget is not None and token_budget < whole:
            raise ConfigError(
                f"token_budget={token_budget} is below max_model_len={whole}: an encoder computes a text in one "
                f"step, so pass token_budget >= {whole} or a smaller max_model_len"
            )
        most = max(usual.token_budget, whole)
        usual = usual._replace(chunk_size=most, token_budget=most)
    num_seqs = usual.max_num_seqs if max_num_seqs is None else max_num_seqs
    if chunk_size is None:
        chunk_size = usual.chunk_size if token_budget is None else min(usual.chunk_size, token_budget)
    return Sizes(
        usual.block_size if block_size is None else block_size,
        num_seqs,
        chunk_size,
        token_budget or max(chunk_size, num_seqs),
    )


def build_engine(
    model: LoadedModel,
    config: EngineConfig,  # the number of blocks is set here
    kernels: KernelSet,
    *,
    draft_model: LoadedModel | LoadedHead | None = None,
    num_blocks: int | None = None,
    memory: int | None = None,  # bytes for the cache
    utilisation: float = 0.9,
    on_load: OnLoad = lambda done, total: None,  # (layers prepared, layers in all)
    team: RankTeam | None = None,  # of tensor parallelism: this process is rank 0 and holds a part of the model
) -> tuple[MemoryPlan, InferenceEngine]:
    """The memory plan and the engine built from it."""
    if team is not None:
        team.join()
        if config.deterministic and kernels.memory() is None:
            team.split_adapters(model.weights)
        model = shard_model(model, kernels, 0, team.size, exact=config.deterministic)
    if isinstance(draft_model, LoadedModel) and kernels.memory() is not None:
        draft_model = move_to_device(draft_model, kernels)
    try:
        model, plan = plan_rank(
            model, config, kernels, draft_model=draft_model, num_blocks=num_blocks, memory=memory,
            utilisation=utilisation, on_load=on_load,
        )  # fmt: skip
        plan = with_host_experts(plan, model.weights)
        if team is not None:
            plan = replace(plan, num_blocks=min(plan.num_blocks, team.num_blocks()))
            team.start(plan.num_blocks, plan.num_states)
        cache = replace(config.cache, num_blocks=plan.num_blocks, num_states=plan.num_states)
        config = replace(config, cache=cache)
        engine = InferenceEngine(model, config, kernels, draft_model=draft_model, on_load=on_load, peers=team)
        if config.warm_up and kernels.memory() is not None:
            warm_up(engine)
    except BaseException:
        if team is not None:
            team.close()
        raise
    return plan, engine


def shard_model(model: LoadedModel, kernels: KernelSet, rank: int, size: int, *, exact: bool) -> LoadedModel:
    """The model with one rank's part of its weights; on a device, of its embedding as well."""
    on_device = kernels.memory() is not None
    part = shard(model.weights, rank, size, exact=exact, spread_embedding=on_device)
    return replace(model, weights=part, digest_source=model.later_digest())


def plan_rank(
    model: LoadedModel,
    config: EngineConfig,
    kernels: KernelSet,
    *,
    draft_model: LoadedModel | LoadedHead | None = None,
    num_blocks: int | None = None,
    memory: int | None = None,  # bytes for the caches of all ranks
    utilisation: float = 0.9,
    on_load: OnLoad = lambda done, total: None,
) -> tuple[LoadedModel, MemoryPlan]:
    """The model on its device, and the memory of this rank. The ranks of a host share its memory evenly."""
    device, size = kernels.memory(), 1 if kernels.ranks is None else kernels.ranks.size
    if device is not None:
        model = move_to_device(model, kernels, on_load)
    if device is not None and num_blocks is None and memory is None:
        return model, _measured_plan(model, config, kernels, draft_model, utilisation, device)
    tower = 0 if model.tower is None or device is not None else weight_bytes(model.tower, kernels.formats)
    return model, plan_memory(
        model.weights.config,
        weight_bytes(model.weights, kernels.formats) + tower,
        block_size=config.cache.block_size,
        kv_dtype=config.cache.dtype,
        num_blocks=num_blocks,
        memory=None if memory is None else memory // size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        free_bytes=free_memory() // size,
        total_bytes=total_memory() if device is None else None,
        states=plan_states(model.weights.config, config),
    )


def _measured_plan(
    model: LoadedModel,
    config: EngineConfig,
    kernels: KernelSet,
    draft_model: LoadedModel | LoadedHead | None,
    utilisation: float,
    device: DeviceMemory,
) -> MemoryPlan:
    step_bytes = measure_step(model, kernels, config, device)
    if isinstance(draft_model, LoadedHead):  # the hidden states of a step, and those that wait for the head
        step_bytes += 4 * config.token_budget * draft_model.weights.states_width + STATE_BYTES
    parts = (model.weights, None if draft_model is None else draft_model.weights, model.tower)
    weights = sum(weight_bytes(part) for part in parts if part is not None)
    return plan_gpu_memory(
        model.weights.config,
        weight_bytes=weights,
        free_bytes=device.free_bytes(),
        step_bytes=step_bytes,
        utilisation=utilisation,
        block_size=config.cache.block_size,
        kv_dtype=config.cache.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        states=plan_states(model.weights.config, config),
        draft=None if draft_model is None else draft_model.config,
    )
