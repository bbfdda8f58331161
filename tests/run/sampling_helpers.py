"""Shared by the tests of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bifolio.run.sampler import Sampler, SamplingTable
from bifolio.sampling_params import SamplingParams


def make_sampler(
    rows: Sequence[SamplingParams],
    vocab_size: int,
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[list[int]] | None = None,
    eos: frozenset[int] = frozenset(),
    **options: Any,
) -> Sampler:
    """A sampler whose slot i holds the i-th parameters, with the seed 1000 + i."""
    table = SamplingTable(len(rows), vocab_size)
    for slot, params in enumerate(rows):
        prompt = prompts[slot] if prompts else [0]
        output = outputs[slot] if outputs else []
        table.set(slot, params, 1000 + slot, prompt, output, eos, **options)
    return Sampler(vocab_size, table)


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab_size)) * scale).astype(np.float32)
