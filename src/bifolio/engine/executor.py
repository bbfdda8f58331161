"""Running a batch on the device. No bookkeeping here: blocks were reserved, arrays staged.

The two executors are the two phases' machinery. On the reference kernels both are one forward pass; kernel sets with
a machinery of their own for a phase (captured graphs, recorded programs) hook in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bifolio.cache.storage import KvCacheEntry, KVStorage
from bifolio.errors import EmptyPromptError, PhaseError
from bifolio.kernels.interface import Array, AttentionPhase, AttentionSegment, Batch, KernelSet
from bifolio.model.transformer import forward
from bifolio.model.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class ModelRunner:
    """Weights, kernels and storage that belong together."""

    weights: ModelWeights
    kernels: KernelSet
    storage: KVStorage

    def run(self, batch: Batch) -> Array:
        """Logits f32[r, vocab] of the rows that the batch names; K and V of all its tokens are in the cache after."""
        whole_step: Any = getattr(self.kernels, "run", None)
        if whole_step is not None:
            return whole_step(self.weights, batch, self.storage)
        return forward(self.weights, batch, self.kernels, self.storage)


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a prompt left behind."""

    kv_len: int  # entries per layer: exactly the prompt's tokens
    num_chunks: int
    logits: Array  # f32[vocab] of the last token


@dataclass(frozen=True, slots=True)
class PrefillExecutor:
    """Processes prompt tokens in parallel, `chunk_size` at a time. Bound by compute."""

    runner: ModelRunner
    chunk_size: int = 512

    def run(self, batch: Batch) -> Array:
        return self.runner.run(batch)

    def execute(self, tokens: Sequence[int], kv_cache: KvCacheEntry) -> PrefillResult:
        """A whole prompt into one sequence's cache; a later chunk reads only what an earlier one wrote."""
        if not len(tokens):
            raise EmptyPromptError("a prompt has at least one token")
        logits, num_chunks = None, 0
        for start in range(0, len(tokens), self.chunk_size):
            chunk = tokens[start : start + self.chunk_size]
            logits = self.run(append_batch(self.runner, kv_cache, chunk, AttentionPhase.PREFILL))
            num_chunks += 1
        assert logits is not None
        return PrefillResult(kv_cache.seq_len, num_chunks, logits[0])


@dataclass(frozen=True, slots=True)
class DecodeExecutor:
    """Generates one token at a time with minimal latency. Bound by memory bandwidth."""

    runner: ModelRunner

    def run(self, batch: Batch) -> Array:
        return self.runner.run(batch)

    def step(self, kv_cache: KvCacheEntry, token: int) -> int:
        """Append the newest token and return the most likely next one."""
        if kv_cache.seq_len == 0:
            raise PhaseError("decode before prefill: this sequence has nothing in the cache yet")
        logits = self.run(append_batch(self.runner, kv_cache, [token], AttentionPhase.DECODE))
        return int(self.runner.kernels.to_host(logits)[0].argmax())

    def generate(self, kv_cache: KvCacheEntry, first: int, max_tokens: int) -> list[int]:
        """Greedy tokens, beginning with `first`, which prefill chose: never more than `max_tokens`."""
        tokens = [first][:max_tokens]
        while len(tokens) < max_tokens:
            tokens.append(self.step(kv_cache, tokens[-1]))
        return tokens


def append_batch(runner: ModelRunner, kv_cache: KvCacheEntry, tokens: Sequence[int], phase: AttentionPhase) -> Batch:
    """Reserve slots for `tokens` at the end of one sequence and describe their forward pass."""
    start, block_size = kv_cache.seq_len, runner.storage.block_size
    kv_cache.reserve(len(tokens))
    end = start + len(tokens)
    table = np.asarray(kv_cache.block_ids, dtype=np.int32)[None, :]
    positions = np.arange(start, end, dtype=np.int32)
    to_device = runner.kernels.from_host
    segment = AttentionSegment(
        phase=phase,
        token_start=0,
        token_end=len(tokens),
        query_starts=np.array([0, len(tokens)], dtype=np.int32),
        context_lens=np.array([end], dtype=np.int32),
        block_tables=to_device(table),
        fresh=start == 0,
        max_query_len=len(tokens),
        max_context_len=end,
    )
    slots = table[0, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Batch(
        token_ids=to_device(np.asarray(tokens, dtype=np.int32)),
        positions=to_device(positions),
        slots=to_device(slots),
        segments=(segment,),
        logit_rows=to_device(np.array([len(tokens) - 1], dtype=np.int32)),
        max_position=end - 1,
    )
