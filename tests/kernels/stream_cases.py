"""Operations on parallel streams, and the options of others that networks with streams and inputs of layers use."""

from __future__ import annotations

import numpy as np
from case_table import Outputs, activations, case, normal
from network_cases import new_norm

from bifolio.kernels.interface import KernelSet

D, STREAMS = 48, 4


def rows(kernels: KernelSet, rng: np.random.Generator, count: int, *widths: int) -> list[object]:
    return [activations(kernels, normal(rng, count, width)) for width in widths]


@case("add", "scaled")
def add_scaled(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    return (kernels.to_host(kernels.add(*rows(kernels, rng, 5, D, D), 0.75)),)


@case("embed", "of a partial table")
def embed_known(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Ids past the last row read row 0."""
    table = kernels.prepare_embedding(normal(rng, 40, D))
    ids = kernels.from_host(np.array([39, 40, 0, 7, 31, 2000], np.int32))
    return (kernels.to_host(kernels.embed(table, ids, 2.5, is_partial=True)),)


@case("norm", "of groups")
def norm_groups(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Of rows, and of a sum, which a set may norm in one pass."""
    weights = kernels.prepare_norm(new_norm(rng, 16, centered=False))
    plain = [kernels.norm(*rows(kernels, rng, n, 3 * 16), weights) for n in (1, 5)]
    summed = [kernels.norm(kernels.add(*rows(kernels, rng, n, 3 * 16, 3 * 16)), weights) for n in (1, 5)]
    return tuple(kernels.to_host(each) for each in (*plain, *summed))


@case("join_columns", "with factors")
def columns(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    x, y = rows(kernels, rng, 5, D, 9)
    factors = kernels.from_host(normal(rng, 16))
    return (
        kernels.to_host(kernels.join_columns([(x, 7, 27)])),
        kernels.to_host(kernels.join_columns([(x, 32, D)], factors)),
        kernels.to_host(kernels.join_columns([(y, 2, 9), (x, 0, 9)], factors)),
    )


@case("act_mul", "of gates above a cutoff")
def sparse_act_mul(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    (x,) = rows(kernels, rng, 5, 2 * 80)
    return tuple(kernels.to_host(kernels.act_mul(x, "gelu_tanh", cutoff)) for cutoff in (0.5, -0.25, 0.0))


@case("mix_streams")
def mix_streams(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """As many streams as before, and one of all."""
    x, square, row = rows(kernels, rng, 5, STREAMS * D, STREAMS * STREAMS, STREAMS)
    return tuple(kernels.to_host(kernels.mix_streams(x, each, STREAMS)) for each in (square, row))


@case("add_to_streams")
def add_to_streams(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """By coefficients of each token, of all tokens, and to one stream."""
    x, y, coefficients = rows(kernels, rng, 5, STREAMS * D, D, STREAMS)
    found = [kernels.add_to_streams(x, y, each) for each in (coefficients, (0.0, 1.0, 1.0, -0.5))]
    return tuple(kernels.to_host(each) for each in (*found, kernels.add_to_streams(y, y, (-1.0,))))


@case("match_streams")
def match_streams(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A stream of zeros stays one: its mean square is not below a limit."""
    y = normal(rng, 5, 3 * D)
    y[0, :D] = 0
    (x,) = rows(kernels, rng, 5, D)
    return (kernels.to_host(kernels.match_streams(x, activations(kernels, y))),)
