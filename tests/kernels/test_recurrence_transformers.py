"""`recur` against the recurrent layers of transformers, in passes of different sizes."""

from __future__ import annotations

import numpy as np
import pytest
from recurrence_cases import recur_in_chunks, state_storage

from helpers import cpu_kernel_names, make_kernels

FAMILIES = (
    "qwen3_next", "qwen3_5", "kimi_linear", "lfm2", "lfm2 of width 7", "granitemoehybrid", "nemotron_h", "falcon_h1",
    "falcon_h1, gate first", "falcon_h1 without norm",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", cpu_kernel_names())
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_equals_transformers(family: str, name: str) -> None:
    pytest.importorskip("transformers", reason="the layers that define the results")
    from recurrence_layers import LAYERS, SIZE

    assert tuple(LAYERS) == FAMILIES
    layer, kernels = LAYERS[family](), make_kernels(name)
    hidden = np.random.default_rng(1).standard_normal((37, SIZE)).astype(np.float32)
    expected = layer.expected(hidden)
    rows = hidden @ layer.in_proj.T
    for chunk in (1, 5, 37):
        storage = state_storage(kernels, layer.recurrence, 3)
        ours = recur_in_chunks(kernels, layer.recurrence, rows, chunk, storage)
        result = ours.astype(np.float64) @ layer.out_proj.T.astype(np.float64)
        np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())
