"""Checks of norms, activations and products with dense weights, each with the operations that may be fused into it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from check_bench import Bench, Check, relative_error

from bifolio.kernels.interface import Linear, Norm
from bifolio.kernels.triton.lazy_fusion import tensor

EXTRAS = ("plain", "norm", "bias", "residual", "gated")
SHAPES = [(1, 48, 64), (1, 33, 80), (2, 48, 64), (5, 33, 80), (16, 70, 96)]  # rows, outputs, depth
LARGE_SHAPES = [
    (1, 3072, 2048), (1, 1024, 3072), (16, 4096, 4096), (9, 2048, 8192), (1, 50001, 512), (64, 512, 512),
    (64, 4096, 4096), (33, 40000, 512), (24, 1024, 3072), (48, 2048, 8192), (2, 6144, 4096), (17, 6144, 4096),
    (33, 4100, 1000), (48, 4096, 4096), (64, 2048, 2048), (64, 4096, 14336), (40, 3072, 2044), (64, 14336, 4096),
    (112, 14336, 4096), (70, 3072, 1024),
]  # fmt: skip


def norm_checks() -> Iterator[Check]:
    for rows, width, centered in ((1, 64, False), (3, 80, True), (5, 576, False), (700, 4096, False)):
        name = f"norm {rows}x{width}{' centered' * centered}"
        yield Check(name, partial(norm_error, rows=rows, width=width, centered=centered), large=rows > 100)
    for activation in ("silu", "gelu_tanh", "gelu"):
        yield Check(f"act_mul {activation}", partial(activation_error, activation=activation))


def norm_error(bench: Bench, *, rows: int, width: int, centered: bool) -> float:
    norm = Norm(
        bench.normal(width, dtype=torch.float32),
        bench.normal(width, dtype=torch.float32) if centered else None,
        1e-5,
        centered,
    )
    x, delta = bench.normal(rows, width), bench.normal(rows, width)
    total, normed = bench.kernels.add_norm(x, delta, norm)
    expected_total = (x + delta).float()
    expected = bench.reference.norm(expected_total, norm)
    alone = relative_error(tensor(bench.kernels.norm(x, norm)), bench.reference.norm(x.float(), norm))
    return max(relative_error(total, expected_total), relative_error(tensor(normed), expected), alone)


def activation_error(bench: Bench, *, activation: str) -> float:
    x = bench.normal(7, 2 * 72, scale=2.0)
    return relative_error(bench.kernels.act_mul(x, activation), bench.reference.act_mul(x.float(), activation))


def product_checks() -> Iterator[Check]:
    for shape in (*SHAPES, *LARGE_SHAPES):
        large, name = shape in LARGE_SHAPES, "x".join(str(size) for size in shape)
        for extra in EXTRAS:
            yield Check(f"linear {name} {extra}", partial(product_error, shape=shape, extra=extra), large)
        if shape[0] > 1:
            yield Check(f"linear, added, normed, linear {name}", partial(chain_error, shape=shape), large)


def product_error(bench: Bench, *, shape: tuple[int, int, int], extra: str) -> float:
    kernels, reference = bench.kernels, bench.reference
    rows, outputs, depth = shape
    parts = tuple(bench.normal(outputs, depth, scale=depth**-0.5) for _ in range(2 if extra == "gated" else 1))
    biases = tuple(bench.normal(outputs) if extra == "bias" else None for _ in parts)
    ours = kernels.prepare_linear(Linear(parts, biases))
    theirs = reference.prepare_linear(Linear(parts, biases))
    x = bench.normal(rows, depth)
    norm = Norm(bench.normal(depth, dtype=torch.float32), None, 1e-5)
    source: Any = kernels.norm(x, norm) if extra in ("norm", "gated") else x
    expected_source = reference.norm(x.float(), norm) if extra in ("norm", "gated") else x.float()
    result, expected = kernels.linear(source, ours), reference.linear(expected_source, theirs)
    if extra == "gated":
        result, expected = kernels.act_mul(result, "silu"), reference.act_mul(expected, "silu")
    if extra == "residual":
        residual = bench.normal(rows, outputs)
        result, expected = kernels.add(residual, result), residual.float() + expected
    return relative_error(tensor(result), expected)


def chain_error(bench: Bench, *, shape: tuple[int, int, int]) -> float:
    """Of the sum between two products, of its norm, and of the second product, which may do half of that norm."""
    kernels, reference = bench.kernels, bench.reference
    rows, outputs, depth = shape
    matrices = bench.normal(depth, outputs, scale=outputs**-0.5), bench.normal(outputs, depth, scale=depth**-0.5)
    layers = [Linear((matrix,), (None,)) for matrix in matrices]
    first, second = (kernels.prepare_linear(layer) for layer in layers)
    norm = Norm(bench.normal(depth, dtype=torch.float32), None, 1e-5)
    x, residual = bench.normal(rows, outputs), bench.normal(rows, depth, dtype=torch.float32)
    total, normed = kernels.add_norm(residual, kernels.linear(x, first), norm)
    result = tensor(kernels.linear(normed, second))
    expected = residual + reference.linear(x.float(), reference.prepare_linear(layers[0]))
    expected_normed = reference.norm(expected, norm)
    expected_result = reference.linear(expected_normed, reference.prepare_linear(layers[1]))
    return max(
        relative_error(total, expected),
        relative_error(result, expected_result),
        relative_error(tensor(normed), expected_normed),
    )
