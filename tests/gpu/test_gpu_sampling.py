"""Tokens and logprobs of the GPU equal those of the host, bit for bit: 10,000 rows of every option."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from sampling_cases import KINDS, OPTIONS, differences, on_device, on_host, random_logits, random_rows

ROWS = 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_device_and_host_draw_the_same_tokens(options: str, kind: str, device: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind) + 10 * list(OPTIONS).index(options))
    for _ in range(10_000 // len(KINDS) // ROWS + 1):
        vocab = int(rng.choice([61, 5_000, 32_000, 151_936], p=[0.3, 0.3, 0.3, 0.1]))
        logits, rows = random_logits(kind, ROWS, vocab, rng), random_rows(options, ROWS, vocab, rng)
        found = on_device(logits, rows, device)
        expected = on_host(torch.from_numpy(logits).to(device), rows)
        for row in differences(found, expected):
            assert found.token_ids[row] == expected.token_ids[row], (vocab, rows.params[row])
            alone = on_host(logits[row : row + 1], rows.part(row, row + 1))  # torch's logarithm may be another
            np.testing.assert_array_equal(found.logprobs[row], alone.logprobs[0])
            assert (found.ranks[row], found.top[row]) == (alone.ranks[0], alone.top[0]), (vocab, rows.params[row])
        assert np.array_equal(on_host(logits[:2], rows.part(0, 2)).token_ids, expected.token_ids[:2])
