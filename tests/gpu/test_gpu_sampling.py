"""Draws on the GPU equal those of the host, token for token: 10,000 rows of every option."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_cases import KINDS, OPTIONS, on_device, on_host, random_logits, random_params, random_row_args

ROWS = 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_device_and_host_draw_the_same_tokens(options: str, kind: str, device: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind) + 10 * list(OPTIONS).index(options))
    for _ in range(10_000 // len(KINDS) // ROWS + 1):
        vocab = int(rng.choice([61, 5_000, 32_000, 151_936], p=[0.3, 0.3, 0.3, 0.1]))
        logits, params = random_logits(kind, ROWS, vocab, rng), random_params(options, ROWS, rng)
        seeds, positions = random_row_args(ROWS, rng)
        found = on_device(logits, params, seeds, positions, device)
        expected = on_host(torch.from_numpy(logits).to(device), params, seeds, positions)
        wrong = np.flatnonzero(found != expected)
        assert not len(wrong), [(vocab, params[row], found[row], expected[row]) for row in wrong[:3]]
        some = slice(0, 2)
        assert np.array_equal(on_host(logits[some], params[some], seeds[some], positions[some]), expected[some])
