"""Tokens and logprobs of the GPU equal those of the host, bit for bit: 10,000 rows of every option."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_cases import (
    KINDS,
    OPTIONS,
    differences,
    on_device,
    on_host,
    random_logits,
    random_params,
    random_row_args,
)

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
        for row in differences(found, expected):
            assert found.token_ids[row] == expected.token_ids[row], (vocab, params[row])
            alone = on_host(
                logits[row : row + 1], params[row : row + 1], seeds[row : row + 1], positions[row : row + 1]
            )
            np.testing.assert_array_equal(found.logprobs[row], alone.logprobs[0])  # torch's logarithm may be another
            assert (found.ranks[row], found.top[row]) == (alone.ranks[0], alone.top[0]), (vocab, params[row])
        some = slice(0, 2)
        host = on_host(logits[some], params[some], seeds[some], positions[some])
        assert np.array_equal(host.token_ids, expected.token_ids[some])
