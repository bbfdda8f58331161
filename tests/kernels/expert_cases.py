"""Cases of mixtures of experts: the choice of experts, and the sum of their outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from case_table import Outputs, activations, case, normal
from network_cases import CONVERTED, ROUNDED, matrix

from bifolio.kernels.interface import Experts, KernelSet, Linear, RoutedExperts, Router, SharedMlp
from bifolio.quant.formats import ENCODABLE_FORMATS, QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from exotic_weights import exotic_tensor

EXPERTS = 8
ROUTERS = {
    "softmax": Router(3),
    "softmax of the chosen": Router(3, renormalise=True),
    "sigmoid": Router(2, "sigmoid", renormalise=True, scale=2.5),
    "shares of close logits": Router(2, band=0.3, scale=1.5),
    "best groups": Router(3, num_groups=4, top_groups=2),
    "factors of experts": Router(3, renormalise=True, expert_scales=np.linspace(0.5, 2.0, EXPERTS).astype(np.float32)),
    "groups by two, biased": Router(
        2, "sigmoid", True, 1.8, np.linspace(-0.5, 0.5, EXPERTS).astype(np.float32)[::-1].copy(), 2, 1, 2
    ),
}
ROWS = (1, 5, 70)


def spread_logits(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Logits far enough apart that a set in 16 bits makes the same choice."""
    order = np.argsort(rng.standard_normal((rows, EXPERTS)), axis=-1)
    return normal(rng, rows, EXPERTS, scale=0.02) + (order * 0.5 - 2).astype(np.float32)


@case("weigh")
def weigh(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Rows times the weight of their first choice."""
    routing = kernels.route(kernels.from_host(spread_logits(rng, 5)), ROUTERS["sigmoid"])
    return (kernels.to_host(kernels.weigh(activations(kernels, normal(rng, 5, 48)), routing)),)


def new_experts(
    rng: np.random.Generator, width: int, depth: int, activation: str = "silu", *, bias: bool = False
) -> Experts:
    def biases(*sizes: int) -> tuple[np.ndarray | None, ...]:
        return tuple(normal(rng, size, scale=0.5) if bias else None for size in sizes)

    up = [Linear((matrix(rng, width, depth), matrix(rng, width, depth)), biases(width, width)) for _ in range(EXPERTS)]
    return Experts(
        tuple(up), tuple(Linear((matrix(rng, depth, width),), biases(depth)) for _ in range(EXPERTS)), activation
    )


def _own(kernels: KernelSet, values: np.ndarray | None) -> Any:
    return None if values is None else kernels.from_host(values)


@case("route")
def route(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Every kind of choice; of equal logits the first expert."""
    found = []
    for router in ROUTERS.values():
        own = replace(router, bias=_own(kernels, router.bias), expert_scales=_own(kernels, router.expert_scales))
        for rows in ROWS:
            routing = kernels.route(kernels.from_host(spread_logits(rng, rows)), own)
            found += [kernels.to_host(routing.experts), kernels.to_host(routing.weights)]
    equal = kernels.route(kernels.from_host(np.zeros((2, EXPERTS), np.float32)), ROUTERS["softmax"])
    assert kernels.to_host(equal.experts).tolist() == [[0, 1, 2]] * 2
    return *found, kernels.to_host(equal.weights)


def mixed(
    kernels: KernelSet, rng: np.random.Generator, experts: Experts, rows: tuple[int, ...] = ROWS, scale: float = 1.0
) -> Outputs:
    prepared = kernels.prepare_experts(experts)
    depth, found = experts.up[0].in_features, []
    for count in rows:
        routing = kernels.route(kernels.from_host(spread_logits(rng, count)), ROUTERS["softmax of the chosen"])
        x = activations(kernels, normal(rng, count, depth, scale=scale))
        found.append(kernels.to_host(kernels.mix_experts(x, routing, prepared)))
    return tuple(found)


@case("mix_experts")
def mix_experts(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    return mixed(kernels, rng, new_experts(rng, 64, 96))


@case("mix_experts", "of odd sizes with biases")
def mix_biased(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    return mixed(kernels, rng, new_experts(rng, 48, 80, "swiglu_clamped", bias=True))


@case("mix_experts", "without gates")
def mix_ungated(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    gated = new_experts(rng, 64, 96, "relu2", bias=True)
    up = tuple(Linear(linear.parts[:1], linear.biases[:1]) for linear in gated.up)
    return mixed(kernels, rng, replace(gated, up=up, gated=False))


@case("mix_experts", "of which most have no token")
def mix_unused(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """All tokens choose the same experts; a token's sum does not depend on its neighbours where the set promises it."""
    prepared = kernels.prepare_experts(new_experts(rng, 32, 64))
    x, router = normal(rng, 40, 64), Router(2, renormalise=True)
    logits = np.tile(np.array([[0, 5, 0, 0, 4, 0, 0, 0]], np.float32), (40, 1))

    def run(rows: slice) -> np.ndarray:
        routing = kernels.route(kernels.from_host(logits[rows]), router)
        return kernels.to_host(kernels.mix_experts(activations(kernels, x[rows]), routing, prepared))

    together, alone = run(slice(None)), run(slice(17, 18))
    if kernels.deterministic:
        np.testing.assert_array_equal(alone[0], together[17])
    return together, alone


@case("fold_shared")
def fold_shared(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The shared MLP with its gate, among the experts or beside them."""
    experts, up = new_experts(rng, 64, 96), Linear((matrix(rng, 64, 96), matrix(rng, 64, 96)), (None, None))
    shared = SharedMlp(up, Linear((matrix(rng, 96, 64),), (None,)), Linear((matrix(rng, 1, 96),), (None,)))
    router = Linear((np.eye(EXPERTS, 96, dtype=np.float32),), (None,))  # the first columns are logits
    routed = RoutedExperts(router, ROUTERS["softmax of the chosen"], experts)
    folded = kernels.fold_shared(routed, shared)
    own, found = folded or routed, []
    product, prepared = kernels.prepare_linear(own.router), kernels.prepare_experts(own.experts)
    beside = [kernels.prepare_linear(linear) for linear in shared if linear is not None]
    for count in ROWS:
        rows = normal(rng, count, 96)
        rows[:, :EXPERTS] = spread_logits(rng, count)
        x = activations(kernels, rows)
        total = kernels.mix_experts(x, kernels.route(kernels.linear(x, product), own.choice), prepared)
        if folded is None:
            hidden = kernels.act_mul(kernels.linear(x, beside[0]), "silu")
            total = kernels.add(total, kernels.gate(kernels.linear(hidden, beside[1]), kernels.linear(x, beside[2])))
        found.append(kernels.to_host(total))
    return tuple(found)


@case("prepare_experts", "of a format to convert", rounding=CONVERTED)
def prepare_converted(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    pytest.importorskip("gguf", reason="decodes the blocks for the reference")
    up = tuple(
        Linear(tuple(exotic_tensor(name, 256, 256) for name in ("Q4_K", "Q4_K")), (None, None)) for _ in range(EXPERTS)
    )
    down = tuple(Linear((exotic_tensor("Q6_K", 256, 256),), (None,)) for _ in range(EXPERTS))
    return mixed(kernels, rng, Experts(up, down, "silu"), (1, 5), scale=2**-8)  # products stay in the range of f16


@case("prepare_experts", "MXFP4 with biases", rounding=CONVERTED)
def prepare_mxfp4(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The experts of gpt-oss."""
    pytest.importorskip("gguf", reason="decodes the blocks for the reference")

    def part(seed: int, rows: int, columns: int) -> QuantizedTensor:
        return exotic_tensor("MXFP4", rows, columns, seed)

    up = tuple(
        Linear((part(e, 64, 96), part(e + 50, 64, 96)), (normal(rng, 64), normal(rng, 64))) for e in range(EXPERTS)
    )
    down = tuple(Linear((part(e + 100, 96, 64),), (normal(rng, 96),)) for e in range(EXPERTS))
    return mixed(kernels, rng, Experts(up, down, "swiglu_clamped"), (1, 40))


def _enter_format(format: QuantFormat) -> None:
    @case("prepare_experts", format.name, rounding=ROUNDED if format.is_quantized else 0.0)
    def of_format(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
        def encoded(linear: Linear) -> Linear:
            return Linear(tuple(QuantizedTensor.quantize(part, format) for part in linear.parts), linear.biases)

        dense = new_experts(rng, 64, 96)
        return mixed(
            kernels, rng, Experts(tuple(map(encoded, dense.up)), tuple(map(encoded, dense.down)), "silu"), (1, 40)
        )


for _format in ENCODABLE_FORMATS:
    _enter_format(_format)


@case("gate")
def gate(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """One logit for each row, for each value, and for parts of 7, 25, 24 and 2 values; many rows, one and none."""
    found = []
    for width, counts in ((49, (1, 7, 49)), (50, (2,)), (96, (4, 48))):
        x = activations(kernels, normal(rng, 5, width))
        each = [activations(kernels, normal(rng, 5, count, scale=2.0)) for count in counts]
        found += [kernels.gate(x[:rows], logits[:rows]) for logits in each for rows in (5, 1, 0)]
    return tuple(kernels.to_host(gated) for gated in found)
