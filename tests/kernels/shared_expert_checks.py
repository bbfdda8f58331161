"""The shared MLP of a layer as one more expert, against the reference: in Triton's interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from bifolio.config import ModelConfig, RopeConfig
from bifolio.config.layers import MoeConfig
from bifolio.kernels.interface import Batch, KernelSet, Linear, Norm, Router
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.model.feed_forward import feed_forward
from bifolio.model.tensor_names import HF_LLAMA, assemble
from bifolio.model.weights import LayerWeights, prepare_layer
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

D, WIDTH, EXPERTS = 96, 64, 8
NORM = Norm(np.linspace(0.5, 1.5, D).astype(np.float32), None, 1e-5)
SOFTMAX = MoeConfig(EXPERTS, 3, WIDTH, renormalise=True, shared_size=WIDTH, shared_gate=True)
SIGMOID = MoeConfig(
    EXPERTS, 2, WIDTH, "sigmoid", renormalise=True, scale=1.8, selection_bias=True, shared_size=WIDTH
)  # without a gate
Case = tuple[MoeConfig, dict[str, Any], str, str]  # experts, fields of the model, formats of experts and of the shared
ALIKE: dict[str, Case] = {
    "gate": (SOFTMAX, {}, "F32", "F32"),
    "gate and the scores as they are": (replace(SOFTMAX, renormalise=False), {}, "F32", "F16"),
    "no gate": (SIGMOID, {}, "F32", "F32"),
    "gate, scaled, of one expert": (replace(SOFTMAX, top_k=1, scale=2.5), {}, "F32", "F32"),
    "gate, without gated products": (SOFTMAX, {"gated_mlp": False, "activation": "relu2"}, "F32", "F32"),
    "gate, Q8_0": (SOFTMAX, {}, "Q8_0", "Q8_0"),
    "no gate, Q4_0": (SIGMOID, {}, "Q4_0", "Q4_0"),
}
DIFFERENT: dict[str, Case] = {
    "other width": (replace(SOFTMAX, shared_size=32), {}, "F32", "F32"),
    "other format": (SOFTMAX, {}, "Q4_0", "Q8_0"),
    "blocks beside dense": (SOFTMAX, {}, "F32", "Q8_0"),
    "groups": (replace(SIGMOID, num_groups=4, top_groups=2), {}, "F32", "F32"),
    "biases": (replace(SOFTMAX, expert_bias=True), {}, "F32", "F32"),
    "norms": (SOFTMAX, {}, "F32", "F32"),
}
TOKENS = (1, 4, 5, 40)


@cache
def new_layer(name: str) -> tuple[ModelConfig, LayerWeights]:
    """A layer of random weights; a logit of the shared gate is about as large as one of the router."""
    moe, changes, of_experts, of_shared = (ALIKE | DIFFERENT)[name]
    rng = np.random.default_rng(len(name))
    config = replace(
        ModelConfig("llama", 64, D, 1, 4, 2, 24, 128, 512, ropes=(RopeConfig(1e4, 24),), moe=moe, eos_token_ids=(2,)),
        **changes,
    )

    def matrix(part: str, shape: tuple[int, ...]) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def vector(part: str, shape: tuple[int, ...]) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    names = HF_LLAMA
    if not config.gated_mlp:
        names = replace(names, shared_up=names.shared_up[1:], expert_up=names.expert_up[1:])
    (layer,) = assemble(config, names, matrix, vector).layers
    if layer.moe is None:
        raise TypeError("the layer has no experts")
    experts = layer.moe.experts
    own = replace(experts, up=_encoded(experts.up, of_experts), down=_encoded(experts.down, of_experts))
    up, down = _encoded((layer.up, layer.down), of_shared)
    norms = {"mlp_output_norm": NORM} if name == "norms" else {}
    return config, replace(layer, up=up, down=down, moe=replace(layer.moe, experts=own, **norms))


def _encoded(linears: tuple[Linear, ...], format: str) -> tuple[Linear, ...]:
    target = QuantFormat[format]
    return tuple(
        Linear(tuple(QuantizedTensor.quantize(part, target) for part in linear.parts), linear.biases)
        for linear in linears
    )


NO_TOKENS = Batch(np.zeros(0, np.int32), np.zeros(0, np.int32), None, (), None)  # an MLP reads its adapters alone


def mixed(kernels: KernelSet, config: ModelConfig, layer: LayerWeights, x: np.ndarray) -> np.ndarray:
    """x + the experts of its norm; the layer is prepared."""
    own: Any = kernels
    residual = own.from_host(x)
    normed = own.norm(residual, own.prepare_norm(NORM))
    out = feed_forward(layer, normed, config.activation, config.gated_mlp, NO_TOKENS, kernels, residual)
    return np.asarray(own.to_host(own.add(residual, out)))


def inputs(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).standard_normal((tokens, D)).astype(np.float32)


def worst(kernels: KernelSet, name: str, tokens: int) -> float:
    """The largest difference from the reference, of the largest value."""
    (config, layer), oracle, x = new_layer(name), ReferenceKernels(), inputs(tokens)
    ours = mixed(kernels, config, prepare_layer(layer, kernels), x)
    theirs = mixed(oracle, config, prepare_layer(layer, oracle), x)
    return float(np.abs(ours - theirs).max() / np.abs(theirs - x).max())


def check_folded(kernels: KernelSet, name: str, tokens: int, tolerance: float) -> None:
    """The layer has one expert more, no MLP beside them, and the output of the reference."""
    prepared = prepare_layer(new_layer(name)[1], kernels)
    assert prepared.moe is not None
    assert not prepared.up.parts
    assert not prepared.down.parts
    assert prepared.moe.shared_gate is None
    assert {stack.num_experts for stack in prepared.moe.experts.prepared} == {EXPERTS + 1}
    assert worst(kernels, name, tokens) < tolerance


def check_unfolded(kernels: KernelSet, name: str, tokens: int, tolerance: float) -> None:
    prepared = prepare_layer(new_layer(name)[1], kernels)
    assert prepared.moe is not None
    assert prepared.up.parts
    assert len(prepared.moe.experts.up) == EXPERTS
    assert worst(kernels, name, tokens) < tolerance


def check_alone(kernels: KernelSet, name: str) -> None:
    """A deterministic set: the bits of a token do not depend on its neighbours."""
    config, layer = new_layer(name)
    prepared, x = prepare_layer(layer, kernels), inputs(40)
    together = mixed(kernels, config, prepared, x)
    for rows in (slice(0, 1), slice(7, 11), slice(20, 37)):
        np.testing.assert_array_equal(mixed(kernels, config, prepared, x[rows]), together[rows])


def check_choice(kernels: KernelSet, num_experts: int, top_k: int) -> None:
    """Every kind of score against torch, with many equal logits, of which the first are chosen."""
    rng = np.random.default_rng(num_experts)
    oracle: Any = TorchKernels("cpu")
    logits = (np.round(rng.standard_normal((9, num_experts)) * 4) / 4).astype(np.float32)
    logits[0] = 0.0
    bias = (np.round(rng.standard_normal(num_experts) * 8) / 8).astype(np.float32)
    for scoring in ("softmax", "sigmoid"):
        for own_bias in (None, bias):
            router = Router(top_k, scoring, renormalise=own_bias is None, scale=1.5)  # type: ignore[arg-type]
            theirs = oracle.route(torch.from_numpy(logits), _biased(router, own_bias, oracle))
            ours = kernels.route(kernels.from_host(logits), _biased(router, own_bias, kernels))
            scores = theirs.weights.numpy()
            np.testing.assert_allclose(kernels.to_host(ours.weights), scores, rtol=1e-5, atol=1e-7)
            if own_bias is None:  # equal logits have equal scores in every set; with a bias rounding decides
                np.testing.assert_array_equal(kernels.to_host(ours.experts), theirs.experts.numpy())


def _biased(router: Router, bias: np.ndarray | None, kernels: Any) -> Router:
    return router if bias is None else replace(router, bias=kernels.from_host(bias))


def check_like_unfolded(kernels: Any, name: str, tokens: int, tolerance: float) -> None:
    """Against the same set with the MLP beside the experts, whose choices are rounded alike."""
    (config, layer), x = new_layer(name), inputs(tokens)
    ours = mixed(kernels, config, prepare_layer(layer, kernels), x)
    kernels.fold_shared = lambda routed, shared: None
    beside = prepare_layer(layer, kernels)
    assert beside.up.parts
    theirs = mixed(kernels, config, beside, x)
    assert np.abs(ours - theirs).max() / np.abs(theirs - x).max() < tolerance
