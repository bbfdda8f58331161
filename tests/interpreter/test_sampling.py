"""Tokens and logprobs of the Triton kernels equal those of the host, bit for bit, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from sampling_cases import KINDS, OPTIONS, differences, on_device, on_host, random_logits, random_rows

# Every other pair: the interpreter takes seconds for a row.
SOME = [(o, k) for i, o in enumerate(OPTIONS) for j, k in enumerate(KINDS) if (i + j) % 2 == 0]


def check(options: str, kind: str, num_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([37, 300, 700]))
    list_size = int(rng.choice([32, 512]))  # the short one has to fall back to the whole row
    logits, rows = random_logits(kind, num_rows, vocab, rng), random_rows(options, num_rows, vocab, rng)
    chunk = 1024 if rng.random() < 0.5 else 128
    found = on_device(logits, rows, "cpu", chunk=chunk, list_size=list_size, top_list_size=list_size)
    expected = on_host(logits, rows)
    wrong = differences(found, expected)
    assert not wrong, [(vocab, list_size, rows.params[row], row, found, expected) for row in wrong[:1]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("options", "kind"), SOME)
def test_device_and_host_draw_the_same_tokens(options: str, kind: str) -> None:
    check(options, kind, 2, seed=KINDS.index(kind) + 10 * list(OPTIONS).index(options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_ten_thousand_rows_of_every_option(options: str, kind: str) -> None:
    for seed in range(10_000 // len(KINDS) // 8 + 1):
        check(options, kind, 8, seed=1000 + seed)
