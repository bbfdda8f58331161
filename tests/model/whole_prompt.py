"""Logits of a whole prompt by the reference kernels, without a cache: the simplest way to run a loaded model."""

from __future__ import annotations

import numpy as np

from bifolio.kernels.interface import AttentionPhase, AttentionSegment, Batch
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model.transformer import forward
from bifolio.model.weights import ModelWeights, prepare


def prompt_logits(weights: ModelWeights, token_ids: list[int]) -> np.ndarray:
    """f32[tokens, vocab]."""
    kernels = ReferenceKernels()
    count = len(token_ids)
    segment = AttentionSegment(
        phase=AttentionPhase.PREFILL,
        token_start=0,
        token_end=count,
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=None,
        fresh=True,
        max_query_len=count,
        max_context_len=count,
    )
    batch = Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(count, dtype=np.int32),
        slots=None,
        segments=(segment,),
        logit_rows=None,
        max_position=count - 1,
    )
    return kernels.to_host(forward(prepare(weights, kernels), batch, kernels, None))


def greedy_tokens(weights: ModelWeights, token_ids: list[int], count: int) -> list[int]:
    """The next `count` tokens of largest logit; recomputes everything for each, so keep it short."""
    ids = list(token_ids)
    for _ in range(count):
        ids.append(int(prompt_logits(weights, ids)[-1].argmax()))
    return ids[len(token_ids) :]
