"""How much of a GPU the cache may take: what is free beside the weights, less what the largest step needs.

The largest step is not guessed but run, on inputs that mean nothing: a prefill of as many tokens as one step may have,
and a decode of as many sequences, tokens drawn with every filter on. Both write to the padding block and read nothing,
so that a cache of two blocks serves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from bifolio.config import CacheConfig, EngineConfig
from bifolio.engine.engine import new_storage
from bifolio.engine.executor import ModelRunner
from bifolio.engine.fault.out_of_memory import is_out_of_memory
from bifolio.engine.memory import show_bytes, weight_bytes
from bifolio.errors import ConfigError
from bifolio.kernels.interface import AttentionPhase, AttentionSegment, Batch, KernelSet
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import prepare
from bifolio.sampling.sampler import Sampler, SamplingTable
from bifolio.sampling_params import SamplingParams

GRAPH_SHARE = 0.25  # of a step's bytes, once more: captured steps keep memory of their own
FILTERED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=0, logprobs=5)


class DeviceMemory(Protocol):
    """Where bytes are counted; tests count elsewhere than on a GPU."""

    def free_bytes(self) -> int:
        """That anybody may still take."""
        ...

    def start_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        """The most that was in use at once since `start_peak`, beyond what was in use then."""
        ...


class CudaMemory:
    """One GPU as torch sees it."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = torch.device(device)
        self._before = 0

    def free_bytes(self) -> int:
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        return int(self._cuda.mem_get_info(self._device)[0])

    def start_peak(self) -> None:
        self._cuda.synchronize(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        self._before = self._cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        self._cuda.synchronize(self._device)
        return int(self._cuda.max_memory_allocated(self._device)) - self._before


def move_to_device(model: LoadedModel, kernels: KernelSet) -> LoadedModel:
    """The model with its weights where the kernels want them; ConfigError when they do not fit."""
    try:
        weights = prepare(model.weights, kernels)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the weights of {model.path} take {show_bytes(weight_bytes(model.weights))} as they lie in the file and "
            f"do not fit on {kernels.device}: use a smaller or a quantised model (q8_0, q4_0), or end what else uses it"
        ) from None
    source = None if model.tokenizer_source is None else model.require_tokenizer  # one tokenizer for both
    return replace(model, weights=weights, tokenizer_source=source)


def measure_step(model: LoadedModel, kernels: KernelSet, config: EngineConfig, memory: DeviceMemory) -> int:
    """Bytes that the largest step of this engine takes on top of weights and cache."""
    cache = CacheConfig(2, config.cache.block_size, config.cache.dtype)
    runner = ModelRunner(prepare(model.weights, kernels), kernels, new_storage(model.config, cache, kernels))
    memory.start_peak()
    try:
        logits = runner.run(prefill_batch(kernels, config))
        logits = runner.run(decode_batch(kernels, config))
        draw_tokens(logits, config.max_num_seqs)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"a step of token_budget={config.token_budget} tokens and max_num_seqs={config.max_num_seqs} sequences "
            f"does not fit on {kernels.device} beside the weights: pass smaller ones, or a quantised model"
        ) from None
    del logits
    return int(memory.peak_bytes() * (1 + GRAPH_SHARE))


def prefill_batch(kernels: KernelSet, config: EngineConfig) -> Batch:
    """As many prompt tokens as a step may have, in sequences as long as possible; logits for every slot."""
    whole, rest = divmod(config.token_budget, config.max_model_len)
    lengths = np.array([config.max_model_len] * whole + [rest] * (rest > 0), dtype=np.int32)
    return _batch(kernels, AttentionPhase.PREFILL, lengths, config.max_num_seqs)


def decode_batch(kernels: KernelSet, config: EngineConfig) -> Batch:
    """One token for every slot."""
    return _batch(kernels, AttentionPhase.DECODE, np.ones(config.max_num_seqs, dtype=np.int32), config.max_num_seqs)


def draw_tokens(logits: Any, num_rows: int) -> None:
    """Choose a token for every row with all that takes memory: filters, and logprobs."""
    vocab = logits.shape[1]
    table = SamplingTable(num_rows, vocab)
    for slot in range(num_rows):
        table.set(slot, FILTERED, slot, [0], [], frozenset())
    Sampler(vocab, table).sample(logits, np.arange(num_rows), np.ones(num_rows, dtype=np.int64))


def _batch(kernels: KernelSet, phase: AttentionPhase, lengths: np.ndarray, num_logits: int) -> Batch:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    count = int(starts[-1])
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    segment = AttentionSegment(
        phase=phase,
        token_start=0,
        token_end=count,
        query_starts=starts,
        context_lens=lengths,
        block_tables=kernels.from_host(np.zeros((len(lengths), 1), dtype=np.int32)),
        fresh=phase is AttentionPhase.PREFILL,
        max_query_len=int(lengths.max()),
        max_context_len=int(lengths.max()),
    )
    return Batch(
        token_ids=kernels.from_host(np.zeros(count, dtype=np.int32)),
        positions=kernels.from_host(positions),
        slots=kernels.from_host(np.zeros(count, dtype=np.int64)),
        segments=(segment,),
        logit_rows=kernels.from_host(np.arange(count - min(num_logits, count), count, dtype=np.int32)),
        max_position=int(positions.max()),
    )
