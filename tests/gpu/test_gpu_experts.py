"""Experts in MXFP4 on a GPU against their numbers in float64: kernels in CUDA C++, and those in Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from check_bench import relative_error

from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.cuda.mxfp4_fragments import FragmentStack
from bifolio.kernels.interface import Experts, Linear, Norm, Routing
from bifolio.kernels.triton import experts as moe
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

pytestmark = pytest.mark.usefixtures("own_kernels", "compiled")
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
TOLERANCE = 6e-3  # bf16 tokens and hidden values
SHAPES = [
    (8, 3, 96, 64),
    (5, 2, 160, 96),
    (6, 1, 64, 32),
    (9, 8, 320, 160),
    (4, 4, 2880, 320),
]  # experts, chosen, sizes


class Layer:
    """Random experts, and their numbers in float64."""

    def __init__(self, count: int, depth: int, width: int, activation: str, seed: int, *, bias: bool = True) -> None:
        self.rng, self.activation = np.random.default_rng(seed), activation
        gates, ups = ([self._matrix(width, depth) for _ in range(count)] for _ in range(2))
        downs = [self._matrix(depth, width) for _ in range(count)]
        self.up_bias = self.rng.standard_normal((count, 2, width)) * 0.5 * bias
        self.down_bias = self.rng.standard_normal((count, depth)) * 0.5 * bias
        self.up = [np.concatenate([gate[1], up[1]]) for gate, up in zip(gates, ups, strict=True)]
        self.down = [down[1] for down in downs]
        given = [row.astype(np.float32) if bias else None for row in self.up_bias.reshape(-1, width)]
        down_given = [row.astype(np.float32) if bias else None for row in self.down_bias]
        self.experts = Experts(
            tuple(Linear((gates[e][0], ups[e][0]), (given[2 * e], given[2 * e + 1])) for e in range(count)),
            tuple(Linear((downs[e][0],), (down_given[e],)) for e in range(count)),
            activation,
        )

    def _matrix(self, rows: int, columns: int) -> tuple[QuantizedTensor, np.ndarray]:
        blocks = self.rng.integers(0, 256, (rows, columns // 32, 17), np.uint8)
        blocks[:, :, 0] = self.rng.integers(117, 123, blocks.shape[:2])
        codes = np.concatenate([blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4], axis=2)
        numbers = NUMBERS[codes] * 2.0 ** (blocks[:, :, :1].astype(int) - 127)
        return QuantizedTensor(QuantFormat.MXFP4, blocks.reshape(rows, -1), (rows, columns)), numbers.reshape(rows, -1)

    def expected(self, x: np.ndarray, routing: Routing) -> np.ndarray:
        out = np.zeros((len(x), len(self.down[0])))
        chosen, shares = routing.experts.cpu().numpy(), routing.weights.double().cpu().numpy()
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            tokens, choices = np.nonzero(chosen == expert)
            both = (x[tokens] @ up.T).reshape(len(tokens), 2, len(up) // 2) + self.up_bias[expert]
            products = self._gated(both[:, 0], both[:, 1]) @ down.T + self.down_bias[expert]
            out[tokens] += products * shares[tokens, choices, None]  # a token chooses an expert once
        return out

    def _gated(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        if self.activation == "silu":
            return gate / (1 + np.exp(-gate)) * up
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def random_routing(tokens: int, count: int, top_k: int, *, crowded: bool = False) -> Routing:
    """Choices of each token; `crowded`: expert 0 is one of them."""
    scores = torch.rand(tokens, count, device="cuda")
    scores[:, 0] += float(crowded)
    weights = torch.rand(tokens, top_k, device="cuda")
    return Routing(scores.topk(top_k, 1).indices.to(torch.int32), weights / weights.sum(1, keepdim=True))


@pytest.fixture(params=["cuda", "triton"])
def kernels(request: pytest.FixtureRequest, gpu_kernels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "triton":
        monkeypatch.setattr(moe, "can_mix_fragments", lambda *_: False)
    elif not nvrtc.is_available():
        pytest.skip("needs NVRTC and a GPU of compute capability 9.0")
    return gpu_kernels("bf16")


@pytest.mark.parametrize("tokens", [1, 2, 5, 70, 300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_equal_their_numbers(kernels: Any, shape: tuple[int, ...], tokens: int) -> None:
    count, top_k, depth, width = shape
    for activation, bias in (("swiglu_clamped", True), ("silu", False)):
        layer = Layer(count, depth, width, activation, tokens, bias=bias)
        prepared = kernels.prepare_experts(layer.experts)
        routing = random_routing(tokens, count, top_k, crowded=not bias)
        x = torch.randn(tokens, depth, device="cuda").to(torch.bfloat16)
        residual = torch.randn(tokens, depth, device="cuda")
        expected = torch.from_numpy(layer.expected(x.double().cpu().numpy(), routing)).cuda()
        found = tensor(kernels.mix_experts(x, routing, prepared))
        assert relative_error(found, expected) < TOLERANCE
        added = tensor(kernels.add(residual, kernels.mix_experts(x, routing, prepared)))
        assert relative_error(added, residual.double() + expected) < TOLERANCE


def test_the_norm_of_one_token_is_part_of_the_mixture(kernels: Any) -> None:
    layer = Layer(8, 320, 96, "swiglu_clamped", 1)
    prepared, routing = kernels.prepare_experts(layer.experts), random_routing(1, 8, 4)
    x, norm = torch.randn(1, 320, device="cuda"), Norm(torch.rand(320, device="cuda") + 0.5, None, 1e-5)
    normed = x.double() * torch.rsqrt((x.double() ** 2).mean() + 1e-5) * norm.weight.double()
    found = tensor(kernels.mix_experts(kernels.norm(x, kernels.prepare_norm(norm)), routing, prepared))
    expected = torch.from_numpy(layer.expected(normed.cpu().numpy(), routing)).cuda()
    assert relative_error(found, expected) < 2 * TOLERANCE


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs NVRTC and a GPU of compute capability 9.0")
def test_weights_are_fragments_and_a_token_alone_gives_the_same_bits(gpu_kernels: Callable[..., Any]) -> None:
    kernels = gpu_kernels("bf16", deterministic=True)
    layer = Layer(8, 2880, 320, "swiglu_clamped", 3)
    prepared, routing = kernels.prepare_experts(layer.experts), random_routing(400, 8, 4)
    assert all(isinstance(stack, FragmentStack) for stack in prepared.prepared)
    x = torch.randn(400, 2880, device="cuda").to(torch.bfloat16)
    together = tensor(kernels.mix_experts(x, routing, prepared))
    for rows in (slice(0, 1), slice(7, 9), slice(50, 99), slice(100, 400)):
        part = Routing(routing.experts[rows].contiguous(), routing.weights[rows].contiguous())
        assert torch.equal(tensor(kernels.mix_experts(x[rows], part, prepared)), together[rows])


@pytest.mark.skipif(not nvrtc.is_available(), reason="needs NVRTC and a GPU of compute capability 9.0")
@pytest.mark.parametrize("tokens", [1, 40])
def test_captured_launches_follow_their_inputs(gpu_kernels: Callable[..., Any], tokens: int) -> None:
    """A CUDA graph computes with the routing and the tokens of its replay."""
    kernels, layer = gpu_kernels("bf16"), Layer(8, 320, 96, "swiglu_clamped", 4)
    prepared = kernels.prepare_experts(layer.experts)
    given, x = random_routing(tokens, 8, 4), torch.randn(tokens, 320, device="cuda").to(torch.bfloat16)
    tensor(kernels.mix_experts(x, given, prepared))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tensor(kernels.mix_experts(x, given, prepared))
    for _ in range(3):
        other = random_routing(tokens, 8, 4)
        given.experts.copy_(other.experts)
        given.weights.copy_(other.weights)
        x.normal_()
        graph.replay()
        expected = torch.from_numpy(layer.expected(x.double().cpu().numpy(), other)).cuda()
        assert relative_error(found, expected) < TOLERANCE
