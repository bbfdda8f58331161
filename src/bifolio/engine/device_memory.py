"""The memory of a device that is left for the cache: free memory after loading weights, less the largest step.

The largest step is measured, not estimated: a prefill with the whole token budget and a decode of all slots run on
padding, with every sampling filter on. Both write to the padding block, and to one state of recurrent layers, so a
cache of two blocks and two states is enough. Of a network without a language head it is the hidden states of the whole
budget, and their sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.cache.states import EMPTY_STATE
from bifolio.cache.table_states import StatePass
from bifolio.config import CacheConfig, EngineConfig, ModelConfig
from bifolio.engine.executor import DecodeExecutor, ModelRunner, PrefillExecutor
from bifolio.engine.fault.out_of_memory import is_out_of_memory
from bifolio.engine.host_batch import HostBatch, Run
from bifolio.engine.images import CACHE_BYTES
from bifolio.engine.memory import show_bytes, weight_bytes
from bifolio.errors import ConfigError
from bifolio.kernels.interface import DeviceMemory, KernelSet
from bifolio.model.adapters.sites import with_sites
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import OnLoad, prepare
from bifolio.sampling.sampler import Sampler, SamplingTable
from bifolio.sampling_params import SamplingParams

PADDING_STATE = EMPTY_STATE + 1  # written by all sequences of a step on padding
GRAPH_SHARE = 0.25  # of a step's bytes, added: CUDA graphs keep memory of their own
FILTERED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=0, logprobs=5)


def move_to_device(model: LoadedModel, kernels: KernelSet, on_load: OnLoad = lambda done, total: None) -> LoadedModel:
    """The model with its weights on the kernels' device; ConfigError when they do not fit."""
    digest = model.later_digest()
    try:
        weights = with_sites(prepare(model.weights, kernels, on_load))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        advice = "" if model.config.moe is None else "; cpu_experts='auto' (--cpu-experts) leaves experts on the host"
        raise ConfigError(
            f"the weights of {model.path} take {show_bytes(weight_bytes(model.weights))} in the file's formats and "
            f"do not fit on {kernels.device}: use a smaller or a quantised model (q8_0, q4_0), or free its memory"
            f"{advice}"
        ) from None
    source = None if model.tokenizer_source is None else model.require_tokenizer  # one tokenizer for both
    tower = None if model.tower is None else model.tower.prepared(kernels.for_towers)
    return replace(model, weights=weights, tower=tower, digest_source=digest, tokenizer_source=source)


def measure_step(model: LoadedModel, kernels: KernelSet, config: EngineConfig, memory: DeviceMemory) -> int:
    """Bytes that the largest step of this engine takes on top of weights and cache."""
    cache = padding_cache(model.config, config)
    runner = ModelRunner.new(model, cache, kernels)
    memory.start_peak()
    try:
        with kernels.on_padding():
            if model.config.language_head:
                run_and_draw(runner, config, cache)
            else:
                pool_states(runner, config, cache)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"a step of token_budget={config.token_budget} tokens and max_num_seqs={config.max_num_seqs} sequences "
            f"does not fit on {kernels.device} beside the weights: pass smaller values, or a quantised model"
        ) from None
    share = GRAPH_SHARE if model.config.language_head else 1.0  # the largest step of an encoder is captured itself
    return int(memory.peak_bytes() * (1 + share)) + (0 if runner.images is None else CACHE_BYTES)


def run_and_draw(runner: ModelRunner, config: EngineConfig, cache: CacheConfig) -> None:
    """A prefill of the whole budget, and a decode of all slots with its draws."""
    batch = prefill_batch(config, cache).to(runner.kernels)
    if runner.images is not None:
        batch = runner.images.largest(batch, runner.weights, config.max_model_len)
    logits = PrefillExecutor(runner).run(batch)
    logits = DecodeExecutor(runner).run(decode_batch(config, cache).to(runner.kernels))
    draw_tokens(logits, config.max_num_seqs)


def pool_states(runner: ModelRunner, config: EngineConfig, cache: CacheConfig) -> None:
    """The hidden states of the whole budget, their sums, and all of them on the host."""
    kernels, own = runner.kernels, prefill_batch(config, cache, whole=runner.weights.config.bidirectional)
    states = runner.plain_states(own.to(kernels))
    sums = kernels.sum_rows(states, np.array([0, own.num_tokens]))
    for rows in (states, sums):
        kernels.fetch(rows)()


def padding_cache(model: ModelConfig, config: EngineConfig) -> CacheConfig:
    """The engine's cache, with the padding block and, of a hybrid model, the padding state alone in use."""
    return replace(config.cache, num_blocks=2, num_states=0 if model.recurrent is None else PADDING_STATE + 1)


def prefill_batch(config: EngineConfig, cache: CacheConfig, *, whole: bool = False) -> HostBatch:
    """A prefill of the whole token budget, in sequences as long as possible; logits for every slot.

    A sequence of fewer tokens ends at the longest context: its attention reads a cached prefix. `whole`: of an encoder,
    whose texts have none.
    """
    longest = config.max_model_len
    count, rest = divmod(config.token_budget, longest)
    runs = [_padding(longest)] * count + [_padding(rest, 0 if whole else longest - rest)] * (rest > 0)
    num_tokens = sum(len(run.tokens) for run in runs)
    last = range(num_tokens - min(config.max_num_seqs, num_tokens), num_tokens)
    tables = _no_blocks(config, len(runs))
    return HostBatch.from_runs([], runs, tables, cache.block_size, last, _states(runs, cache))


def decode_batch(config: EngineConfig, cache: CacheConfig) -> HostBatch:
    """One token for every slot."""
    runs = [_padding(1) for _ in range(config.max_num_seqs)]
    rows = range(config.max_num_seqs)
    return HostBatch.from_runs(runs, [], _no_blocks(config, 1), cache.block_size, rows, _states(runs, cache))


def _padding(length: int, start: int = 0) -> Run:
    """Padding tokens; their keys and values are written to the padding block."""
    return Run(0, start, np.zeros(length, dtype=np.int32))


def _states(runs: list[Run], cache: CacheConfig) -> list[StatePass] | None:
    """Each run begins with the empty state and writes the padding state; None: no recurrent layers."""
    if not cache.num_states:
        return None
    return [StatePass(EMPTY_STATE, ((len(run.tokens) - 1, PADDING_STATE),)) for run in runs]


def _no_blocks(config: EngineConfig, num_sequences: int) -> np.ndarray:
    """i32[n, blocks]: the padding block only."""
    return np.zeros((num_sequences, -(-config.max_model_len // config.cache.block_size)), dtype=np.int32)


def draw_tokens(logits: Any, num_rows: int) -> None:
    """Sample a token for every row with filters and logprobs, which take the most memory."""
    vocab = logits.shape[1]
    table = SamplingTable(num_rows, vocab)
    for slot in range(num_rows):
        table.set(slot, FILTERED, slot, [0], [], frozenset())
    Sampler(vocab, table).sample(logits, np.arange(num_rows), np.ones(num_rows, dtype=np.int64))
