"""Random weights of the GPU benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from bifolio.config import MoeConfig
from bifolio.measure import gpu_models
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor


def test_experts_of_gpt_oss_are_in_mxfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = MoeConfig(4, 2, 96, renormalise=True, router_bias=True, expert_bias=True)
    small = replace(
        gpu_models.SHAPES["gpt-oss-20b"], vocab_size=128, hidden_size=64, num_heads=4, num_kv_heads=2, moe=experts
    )
    monkeypatch.setitem(gpu_models.SHAPES, "small", small)
    monkeypatch.setattr(gpu_models, "IN_BLOCKS", (experts,))
    weights = gpu_models.random_weights("small", "cpu", num_layers=2).weights
    for layer in weights.layers:
        assert layer.moe is not None
        matrices = layer.moe.experts.matrices()
        assert all(isinstance(matrix, QuantizedTensor) and matrix.format is QuantFormat.MXFP4 for matrix in matrices)
        assert {tuple(linear.parts[0].shape)[-1] for linear in layer.moe.experts.up} == {64}
        assert {tuple(linear.parts[0].shape) for linear in layer.moe.experts.down} == {(64, 96)}
        assert len(layer.moe.experts.down) == 4
