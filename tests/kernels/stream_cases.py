"""Operations on parallel streams, on inputs of layers and on sparse gates."""

from __future__ import annotations

import numpy as np
from case_table import Outputs, activations, case, normal
from network_cases import new_norm

from bifolio.kernels.interface import KernelSet

D, STREAMS = 48, 4


def rows(kernels: KernelSet, rng: np.random.Generator, count: int, *widths: int) -> list[object]:
    return [activations(kernels, normal(rng, count, width)) for width in widths]


@case("add_scaled")
def add_scaled(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    return (kernels.to_host(kernels.add_scaled(*rows(kernels, rng, 5, D, D), 0.75)),)


@case("embed_known")
def embed_known(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Ids past the last row read row 0."""
    table = kernels.prepare_embedding(normal(rng, 40, D))
    ids = kernels.from_host(np.array([39, 40, 0, 7, 31, 2000], np.int32))
    return (kernels.to_host(kernels.embed_known(table, ids, 2.5)),)


@case("norm_groups")
def norm_groups(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    weights = kernels.prepare_norm(new_norm(rng, 16, centered=False))
    return tuple(kernels.to_host(kernels.norm_groups(*rows(kernels, rng, n, 3 * 16), weights)) for n in (1, 5))


@case("columns")
def columns(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    (x,) = rows(kernels, rng, 5, D)
    factors = kernels.from_host(normal(rng, 16))
    return kernels.to_host(kernels.columns(x, 7, 20)), kernels.to_host(kernels.columns(x, 32, 16, factors))


@case("act_gate")
def act_gate(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    x, inputs = rows(kernels, rng, 5, 16, D)
    return tuple(kernels.to_host(kernels.act_gate(x, inputs, at, "gelu_tanh")) for at in (0, 32))


@case("sparse_act_mul")
def sparse_act_mul(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    (x,) = rows(kernels, rng, 5, 2 * 80)
    return tuple(kernels.to_host(kernels.sparse_act_mul(x, cutoff, "gelu_tanh")) for cutoff in (0.5, -0.25))


@case("mix_streams")
def mix_streams(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """As many streams as before, and one of all."""
    x, square, row = rows(kernels, rng, 5, STREAMS * D, STREAMS * STREAMS, STREAMS)
    return tuple(kernels.to_host(kernels.mix_streams(x, each, STREAMS)) for each in (square, row))


@case("correct_streams")
def correct_streams(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    x, y, coefficients = rows(kernels, rng, 5, STREAMS * D, D, STREAMS)
    return tuple(kernels.to_host(kernels.correct_streams(x, y, coefficients, active)) for active in (0, 2))


@case("add_to_streams")
def add_to_streams(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    x, y = rows(kernels, rng, 5, STREAMS * D, D)
    return tuple(kernels.to_host(kernels.add_to_streams(x, y, first)) for first in (0, 1, STREAMS))


@case("spread_streams")
def spread_streams(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A stream of zeros stays one: its mean square is not below a limit."""
    y = normal(rng, 5, 3 * D)
    y[0, :D] = 0
    (x,) = rows(kernels, rng, 5, D)
    return (kernels.to_host(kernels.spread_streams(x, activations(kernels, y))),)


@case("merge_streams")
def merge_streams(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    return (kernels.to_host(kernels.merge_streams(*rows(kernels, rng, 5, D, 3 * D))),)
