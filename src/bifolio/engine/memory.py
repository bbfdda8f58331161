"""The memory plan: bytes of weights and cache and the number of blocks that fit, before any allocation."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Set
from dataclasses import dataclass
from functools import cache

from bifolio.cache.storage import CacheLayout
from bifolio.config import KVDtype, ModelConfig
from bifolio.engine.host_memory import free_memory
from bifolio.engine.state_plan import StatePlan
from bifolio.errors import ConfigError
from bifolio.model.draft_head import HeadWeights
from bifolio.model.vision.tower import Tower
from bifolio.model.weights import ModelWeights
from bifolio.quant.convert import converted_bytes
from bifolio.quant.formats import READABLE_FORMATS, QuantFormat

SAFE_SHARE = 0.5  # of the free memory, the default for the cache; weights and buffers need the rest
MAX_DEFAULT_BYTES = 4 << 30  # upper limit of a default cache
SMALLER_FORMATS = {"q8_0": 8.5, "q6_k": 7.0, "q4_k_m": 5.5, "q4_0": 4.5}  # bits of a value, as the kernels pack it
UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose."""

    weight_bytes: int
    block_size: int
    bytes_per_block: int
    num_blocks: int  # the padding block included
    free_bytes: int  # of the machine when the plan was made
    step_bytes: int = 0  # kept free on a GPU for the buffers of a step
    states: StatePlan | None = None  # of the recurrent layers
    host_layers: int = 0  # whose experts are in the memory of the host, beside a device
    host_bytes: int = 0  # of these experts

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys, values and recurrent states."""
        return self.num_blocks * self.bytes_per_block + self.state_bytes

    @property
    def num_states(self) -> int:
        return 0 if self.states is None else self.states.num_states(self.num_blocks * self.block_size)

    @property
    def state_bytes(self) -> int:
        return 0 if self.states is None else self.num_states * self.states.bytes_per_state

    @property
    def max_cached_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_per_block // self.block_size

    def lines(self) -> list[str]:
        return [
            f"weights          {show_bytes(self.weight_bytes)}",
            *(
                [f"on the host      {show_bytes(self.host_bytes)}: experts of {self.host_layers} layers"]
                if self.host_layers
                else []
            ),
            f"KV per token     {show_bytes(self.bytes_per_token)}",
            f"KV cache         {show_bytes(self.num_blocks * self.bytes_per_block)} = {self.num_blocks} blocks of "
            f"{self.block_size} tokens "
            f"({self.max_cached_tokens} tokens)",
            *self._state_lines(),
            f"free memory      {show_bytes(self.free_bytes)}",
            *([f"a step           {show_bytes(self.step_bytes)}"] if self.step_bytes else []),
        ]

    def _state_lines(self) -> list[str]:
        states = self.states
        if states is None:
            return []
        kept = self.num_states - states.num_live
        return [
            f"states           {show_bytes(self.state_bytes)} = {self.num_states} of "
            f"{show_bytes(states.bytes_per_state)}: {states.num_live} for running sequences, {kept} checkpoints",
            f"checkpoints      every {states.spacing} tokens, and at the end of each prompt and turn",
        ]


def plan_memory(
    config: ModelConfig,
    weight_bytes: int,
    *,
    block_size: int = 16,
    kv_dtype: KVDtype = "f32",
    num_blocks: int | None = None,
    memory: int | None = None,
    max_model_len: int,
    max_num_seqs: int = 16,
    token_budget: int | None = None,
    free_bytes: int | None = None,
    total_bytes: int | None = None,  # of the machine, where it holds the weights: more than fits is refused
    states: StatePlan | None = None,  # of the recurrent layers
) -> MemoryPlan:
    """Plan `num_blocks` blocks, as many as fit into `memory` bytes, or by default a safe share of the free memory."""
    free = free_memory() if free_bytes is None else free_bytes
    per_block = _bytes_per_block(config, block_size, kv_dtype)
    needed = -(-max_model_len // block_size) + 1  # one sequence of full length, and the padding block
    if total_bytes is not None:
        by_hand = num_blocks is not None or memory is not None  # then the whole machine counts as free
        _check_weights(config, weight_bytes, total_bytes if by_hand else free, total_bytes)
    if num_blocks is None:
        if memory is None:
            fixed = 0 if states is None else states.fixed_bytes
            budget = min(max(free - weight_bytes, 0) * SAFE_SHARE, MAX_DEFAULT_BYTES + fixed)
            useful = _useful_blocks(config, needed, block_size, max_num_seqs, token_budget)
            num_blocks = min(_fitting_blocks(budget, per_block, block_size, states), 2 * useful)
        else:
            num_blocks = _fitting_blocks(memory, per_block, block_size, states)
    plan = MemoryPlan(weight_bytes, block_size, per_block, int(num_blocks), free, states=states)
    if total_bytes is not None and plan.cache_bytes + weight_bytes > total_bytes:
        beside = f" beside weights of {show_bytes(weight_bytes)}" if plan.cache_bytes <= total_bytes else ""
        raise ConfigError(
            f"a cache of {show_bytes(plan.cache_bytes)} does not fit into the {show_bytes(total_bytes)} of this "
            f"machine{beside}: ask for {'less memory' if memory is not None else 'fewer blocks (num_blocks)'}"
        )
    if plan.num_blocks < needed:
        raise ConfigError(
            f"the cache would have {plan.num_blocks} blocks of {block_size} tokens ({show_bytes(per_block)} each); a "
            f"sequence of {max_model_len} tokens needs {needed}: pass {_shorter(plan, ', or ')}at least "
            f"{show_bytes(_needed_bytes(needed, per_block, block_size, states))} of memory for the cache"
            f"{_fewer_sequences(states)}"
        )
    return plan


def _check_weights(config: ModelConfig, needed: int, free: int, total: int) -> None:
    """ConfigError with the formats that would fit, when the weights alone take more than the free memory."""
    if needed <= free:
        return
    sizes = {name: int(config.num_parameters * bits / 8) for name, bits in SMALLER_FORMATS.items()}
    smaller = [f"{name} ({show_bytes(count)})" for name, count in sizes.items() if count < min(needed, free)][:2]
    advice = f"`bifolio quantize` the model to {' or '.join(smaller)}" if smaller else "use a smaller model"
    raise ConfigError(
        f"the weights take {show_bytes(needed)} in memory, and {show_bytes(free)} of the {show_bytes(total)} of this "
        f"machine are free: {advice}{', or end other processes' if needed <= total else ''}"
    )


def plan_gpu_memory(
    config: ModelConfig,
    *,
    weight_bytes: int,  # on the device already
    free_bytes: int,  # of the device, beside the weights
    step_bytes: int,  # of the largest step
    utilisation: float,  # share of the rest that becomes the cache
    block_size: int,
    kv_dtype: KVDtype,
    max_model_len: int,
    max_num_seqs: int,
    token_budget: int | None = None,
    states: StatePlan | None = None,  # of the recurrent layers
    draft: ModelConfig | None = None,  # its keys and values use a second storage with the same blocks
) -> MemoryPlan:
    """Plan as many blocks as fit beside weights and steps, up to the number that can be in use."""
    if not 0.0 < utilisation <= 1.0:
        raise ConfigError(f"gpu_memory_utilization is a share above 0 and at most 1, not {utilisation}")
    per_block = sum(_bytes_per_block(c, block_size, kv_dtype) for c in (config, draft) if c is not None)
    needed = -(-max_model_len // block_size) + 1  # one sequence of full length, and the padding block
    fitting = _fitting_blocks(max(free_bytes - step_bytes, 0) * utilisation, per_block, block_size, states)
    num_blocks = min(fitting, 2 * _useful_blocks(config, needed, block_size, max_num_seqs, token_budget))
    plan = MemoryPlan(weight_bytes, block_size, per_block, num_blocks, free_bytes, step_bytes, states)
    if num_blocks < needed:
        raise ConfigError(
            f"beside weights of {show_bytes(weight_bytes)} the GPU has {show_bytes(free_bytes)} free, a step takes "
            f"{show_bytes(step_bytes)} of it, and {utilisation:.0%} of the rest are {max(fitting, 0)} blocks of "
            f"{block_size} tokens ({show_bytes(per_block)} each); a sequence of {max_model_len} tokens needs {needed}: "
            f"pass {_shorter(plan, ', ')}a smaller token_budget or max_num_seqs, a larger gpu_memory_utilization, or "
            f"end other processes on the GPU{_fewer_sequences(states)}"
        )
    return plan


def _useful_blocks(
    config: ModelConfig, needed: int, block_size: int, max_num_seqs: int, token_budget: int | None
) -> int:
    """Blocks that sequences of `needed` blocks can use at the same time: those of an encoder are free after a step."""
    most = max_num_seqs * (needed - 1)
    if config.bidirectional and token_budget is not None:
        most = max(min(most, token_budget // block_size + max_num_seqs), needed - 1)
    return most + 1


def _fitting_blocks(budget: float, per_block: int, block_size: int, states: StatePlan | None) -> int:
    """Blocks that fit into `budget` bytes, beside the states of running sequences and with their checkpoints."""
    if states is None:
        return int(budget // per_block)
    return max(int((budget - states.fixed_bytes) // (per_block + states.bytes_per_token * block_size)), 0)


def _needed_bytes(num_blocks: int, per_block: int, block_size: int, states: StatePlan | None) -> int:
    extra = 0 if states is None else states.num_states(num_blocks * block_size) * states.bytes_per_state
    return num_blocks * per_block + extra


def _fewer_sequences(states: StatePlan | None) -> str:
    """Advice where the states of running sequences take memory."""
    if states is None:
        return ""
    return f", or a smaller max_num_seqs (recurrent states of {show_bytes(states.fixed_bytes)} do not depend on length)"


def _shorter(plan: MemoryPlan, joint: str) -> str:
    """Advice to shorten sequences, where at least one block is left for tokens, and words that join other advice."""
    return f"max_model_len <= {plan.max_cached_tokens}{joint}" if plan.max_cached_tokens > 0 else ""


def _bytes_per_block(config: ModelConfig, block_size: int, kv_dtype: KVDtype) -> int:
    return CacheLayout.of_model(config, 1, block_size, kv_dtype).bytes_per_block


def weight_bytes(weights: ModelWeights | HeadWeights | Tower, formats: Set[QuantFormat] = READABLE_FORMATS) -> int:
    """Bytes of all matrices in the `formats` of a kernel set, by default those of the file; tied ones count once."""
    return sum(converted_bytes(matrix, formats) for matrix in weights.matrices() if hasattr(matrix, "nbytes"))


def parse_bytes(text: str | int) -> int:
    """'2GB', '1.5GiB', '500M' or a number of bytes."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or (match[2] not in UNITS and match[2] not in BINARY_UNITS):
        raise ConfigError(f"{text!r} is not an amount of memory: write for example 2GB, 512MiB or 1500000000")
    return int(float(match[1]) * (UNITS.get(match[2]) or BINARY_UNITS[match[2]]))


def read_size(text: str | int | None) -> int | None:
    """`parse_bytes` of an option that may be left out."""
    return None if text is None else parse_bytes(text)


def show_bytes(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 1000:
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{value / 1000:.3g} TB"


def check_threads(threads: int | None) -> None:
    """Warn once about more threads than cores: they wait for each other at the end of every operation."""
    cores = default_threads()
    if threads is not None and threads > cores:
        _warn_threads(threads, cores)


@cache
def _warn_threads(threads: int, cores: int) -> None:
    print(f"bifolio: {threads} threads on {cores} cores are slower than {cores}: leave threads out", file=sys.stderr)


def default_threads() -> int:
    """Number of cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
