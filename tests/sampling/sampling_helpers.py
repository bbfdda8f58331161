"""Shared by the tests of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bifolio.sampling.sampler import Sampler, SamplingTable
from bifolio.sampling_params import SamplingParams

VOCAB = 301
EOS = frozenset({2})

CROWD: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {},
    {"temperature": 0.4},
    {"top_k": 3},
    {"top_k": 50, "top_p": 0.9, "logprobs": 3},
    {"top_p": 0.5},
    {"top_p": 0.99, "min_p": 0.02},
    {"min_p": 0.3, "logprobs": 0},
    {"typical_p": 0.4},
    {"top_k": 20, "typical_p": 0.9, "xtc_probability": 0.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": [3], "top_p": 0.8},
    {"no_repeat_ngram_size": 2, "min_tokens": 60, "max_tokens": None},
    {"allowed_token_ids": [1, 5, 9, 200], "logprobs": 7},
    {"logit_bias": {4: 5.0}, "bad_words_token_ids": [[1], [2, 3]], "temperature": 2.0},
]


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


def crowd(count: int) -> tuple[list[SamplingParams], list[list[int]], list[list[int]]]:
    random = np.random.default_rng(7)
    params = [SamplingParams(**CROWD[i % len(CROWD)]) for i in range(count)]
    prompts = [random.integers(0, 12, 30).tolist() for _ in range(count)]
    outputs = [random.integers(0, 12, 20).tolist() for _ in range(count)]
    return params, prompts, outputs
