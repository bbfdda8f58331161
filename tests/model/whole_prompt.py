"""Logits of a whole prompt by the reference kernels, without a cache: the simplest way to run a loaded model."""

from __future__ import annotations

import numpy as np

from bifolio.engine.host_batch import HostBatch, Run
from bifolio.kernels.reference import ReferenceKernels
from bifolio.long_rope import rope_of_length
from bifolio.model.transformer import forward
from bifolio.model.weights import ModelWeights, prepare


def prompt_logits(weights: ModelWeights, token_ids: list[int]) -> np.ndarray:
    """f32[tokens, vocab]."""
    kernels = ReferenceKernels()
    rope = rope_of_length(weights.config, len(token_ids)) or 0
    batch = HostBatch.from_runs([], [Run(0, 0, token_ids, rope)], None).to(kernels)
    return kernels.to_host(forward(prepare(weights, kernels), batch, kernels, None))


def greedy_tokens(weights: ModelWeights, token_ids: list[int], count: int) -> list[int]:
    """The next `count` tokens of largest logit; recomputes everything for each, so keep it short."""
    ids = list(token_ids)
    for _ in range(count):
        ids.append(int(prompt_logits(weights, ids)[-1].argmax()))
    return ids[len(token_ids) :]
