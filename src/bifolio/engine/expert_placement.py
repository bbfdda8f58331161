"""Experts of a mixture that do not fit on a device stay in the memory of the host: `cpu_experts`.

    all    the experts of every layer
    N      those of the first N layers with experts
    auto   as many layers, from the first, as the device lacks memory for: beside the other weights, the buffers of a
           step and the cache of a sequence of full length

Routers, shared experts and everything else stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bifolio.cache.storage import CacheLayout
from bifolio.config import EngineConfig
from bifolio.engine.host_memory import free_memory
from bifolio.engine.memory import MemoryPlan, show_bytes, weight_bytes
from bifolio.errors import ConfigError
from bifolio.kernels.cpu import CPU_FORMATS
from bifolio.kernels.interface import Experts, KernelSet
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import LayerWeights, ModelWeights
from bifolio.quant.convert import converted_bytes

ALL, AUTO = "all", "auto"
STEP_RESERVE = 1 << 30  # bytes of a device for kernels and captured steps
LOGIT_COPIES = 6  # of a row of logits while tokens are drawn
HIDDEN_COPIES = 16  # of the hidden states of a step


def read_cpu_experts(value: str | int | None) -> str | int | None:
    """`value` as "all", "auto", a number of layers or None."""
    if value is None or value in (ALL, AUTO):
        return value
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal():
        raise ConfigError(f"cpu_experts (--cpu-experts) is {ALL!r}, {AUTO!r} or a number of layers, not {value!r}")
    return int(text)


def place_experts(
    model: LoadedModel,
    kernels: KernelSet,
    config: EngineConfig,
    wanted: str | int | None,
    *,
    host: Callable[[], KernelSet],  # the kernel set of the CPU
    utilisation: float,
) -> LoadedModel:
    """The model with the experts of some layers given to the host."""
    wanted = read_cpu_experts(wanted)
    layers = [number for number, layer in enumerate(model.weights.layers) if layer.moe is not None]
    if wanted in (None, 0) or (wanted == AUTO and (not layers or kernels.array_backend != "torch")):
        return model
    if not layers:
        raise ConfigError(f"cpu_experts={wanted!r}: {model.path.name} has no experts, leave cpu_experts out")
    if kernels.array_backend != "torch":
        raise ConfigError("cpu_experts goes with a GPU: on a CPU all experts are in its memory, leave it out")
    if wanted == AUTO:
        count = _lacking_layers(model, kernels, config, layers, utilisation)
    else:
        count = len(layers) if wanted == ALL else min(int(wanted or 0), len(layers))
    if not count:
        return model
    chosen, own = set(layers[:count]), host()
    placed = tuple(_on_host(layer, own) if n in chosen else layer for n, layer in enumerate(model.weights.layers))
    weights = replace(model.weights, layers=placed)
    _, needed = host_experts(weights)
    if needed > (free := free_memory()):
        raise ConfigError(
            f"the experts of {count} layers take {show_bytes(needed)} in the memory of the host, where "
            f"{show_bytes(free)} are free: pass a smaller cpu_experts, or a model with fewer bits (q4_0)"
        )
    return replace(model, weights=weights, digest_source=model.later_digest())


def with_host_experts(plan: MemoryPlan, weights: ModelWeights) -> MemoryPlan:
    """The plan with the experts of the host apart from the other weights."""
    layers, count = host_experts(weights)
    if not layers:
        return plan
    in_file = sum(int(matrix.nbytes) for experts in _of_host(weights) for matrix in experts.matrices())
    return replace(plan, weight_bytes=max(plan.weight_bytes - in_file, 0), host_layers=layers, host_bytes=count)


def host_experts(weights: ModelWeights) -> tuple[int, int]:
    """The number of layers whose experts are on the host, and their bytes there."""
    found = _of_host(weights)
    return len(found), sum(converted_bytes(matrix, CPU_FORMATS) for experts in found for matrix in experts.matrices())


def _of_host(weights: ModelWeights) -> list[Experts]:
    every = [layer.moe.experts for layer in weights.layers if layer.moe is not None]
    return [experts for experts in every if experts.host is not None]


def _on_host(layer: LayerWeights, host: KernelSet) -> LayerWeights:
    moe = layer.moe
    return layer if moe is None else replace(layer, moe=replace(moe, experts=replace(moe.experts, host=host)))


def _lacking_layers(
    model: LoadedModel, kernels: KernelSet, config: EngineConfig, layers: list[int], utilisation: float
) -> int:
    """The number of layers whose experts the device has no memory for."""
    device = kernels.memory()
    if device is None:
        return 0
    own, sizes = model.config, []
    for number in layers:
        moe = model.weights.layers[number].moe
        matrices = [] if moe is None else moe.experts.matrices()
        sizes.append(sum(converted_bytes(matrix, kernels.formats) for matrix in matrices))
    others = weight_bytes(model.weights, kernels.formats) - sum(sizes)
    blocks = -(-config.max_model_len // config.cache.block_size) + 1
    cache = blocks * CacheLayout.of_model(own, 1, config.cache.block_size, config.cache.dtype).bytes_per_block
    step = STEP_RESERVE + 4 * LOGIT_COPIES * config.max_num_seqs * own.vocab_size
    step += 4 * HIDDEN_COPIES * config.token_budget * own.hidden_size
    room = device.free_bytes() - others - step - int(cache / utilisation)
    count = len(layers)
    while count and room >= sizes[count - 1]:
        count -= 1
        room -= sizes[count]
    return count
