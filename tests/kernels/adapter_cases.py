"""Cases of low-rank adapters: several in a batch, some of whose tokens have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from case_table import Outputs, activations, case, normal
from expert_cases import EXPERTS, new_experts, spread_logits
from network_cases import new_linear

from bifolio.kernels.interface import Adapter, AdapterUse, Batch, ExpertLowRank, KernelSet, Linear, LowRank, Router
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

WIDTHS, DEPTH = (48, 16, 31), 64
RANKS = (1, 8, 33)
ROWS = (1, 4, 70)
TOKENS = 40


def low_rank(
    rng: np.random.Generator, rows: int, depth: int, rank: int, column: int = 0, *, bias: bool = False
) -> LowRank:
    down, up = normal(rng, rank, depth, scale=depth**-0.5), normal(rng, rows, rank, scale=rank**-0.5)
    return LowRank(column, down, up, normal(rng, rows) if bias else None)


def new_adapters(rng: np.random.Generator) -> list[Adapter]:
    """Of all columns, of the last ones and twice of the first, and of another site alone."""
    last = sum(WIDTHS[:2])
    return [
        Adapter({3: (low_rank(rng, sum(WIDTHS), DEPTH, RANKS[1]),)}),
        Adapter(
            {
                3: (
                    low_rank(rng, WIDTHS[0], DEPTH, RANKS[0]),
                    low_rank(rng, WIDTHS[0], DEPTH, RANKS[2], bias=True),
                    low_rank(rng, WIDTHS[2], DEPTH, RANKS[1], last),
                )
            }
        ),
        Adapter({5: (low_rank(rng, sum(WIDTHS), DEPTH, RANKS[0]),)}),
    ]


def rows_of(rng: np.random.Generator, count: int, adapters: int) -> np.ndarray:
    """One of the adapters, or none, of each token; neighbours often have the same."""
    return np.repeat(rng.integers(-1, adapters, count), rng.integers(1, 4, count))[:count].astype(np.int32)


@case("prepare_adapter")
def prepare_adapter(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """An adapter that is prepared twice changes a product in the same way; half floats are kept or widened."""
    found = new_adapters(rng)[0]
    half = replace(found.products[3][0], down=found.products[3][0].down.astype(np.float16))
    x, linear = activations(kernels, normal(rng, 5, DEPTH)), kernels.prepare_linear(new_linear(rng, WIDTHS, DEPTH))
    results = []
    for adapter in (found, found, Adapter({3: (half,)})):
        use = AdapterUse((kernels.prepare_adapter(adapter),), np.zeros(5, np.int32))
        results.append(kernels.to_host(kernels.adapt(kernels.linear(x, linear), x, 3, use)))
    return tuple(results)


@case("adapt")
def adapt(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Tokens of several adapters, of none, and of one that does not change this product."""
    adapters = tuple(kernels.prepare_adapter(each) for each in new_adapters(rng))
    linear, results = kernels.prepare_linear(new_linear(rng, WIDTHS, DEPTH, bias=True)), []
    for count in ROWS:
        x, use = activations(kernels, normal(rng, count, DEPTH)), AdapterUse(adapters, rows_of(rng, count, 3))
        plain = kernels.linear(x, linear)
        before = kernels.to_host(plain).copy()
        results.append(kernels.to_host(kernels.adapt(plain, x, 3, use)))
        np.testing.assert_array_equal(kernels.to_host(plain), before)  # the product is not changed in place
    return tuple(results)


def expert_adapter(rng: np.random.Generator, width: int, depth: int) -> Adapter:
    """Changes of some experts: of gate and up, of up alone, of both products, and of none."""
    every = [ExpertLowRank() for _ in range(EXPERTS)]
    every[1] = ExpertLowRank((low_rank(rng, 2 * width, depth, 4),))
    every[2] = ExpertLowRank((low_rank(rng, width, depth, 3, width),), (low_rank(rng, depth, width, 5),))
    every[5] = ExpertLowRank((), (low_rank(rng, depth, width, 2),))
    return Adapter(experts={7: tuple(every)})


def mixed_with_adapters(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The experts of tokens with two adapters, and of tokens without."""
    width, depth, results = 32, 64, []
    for activation in ("silu", "gelu"):
        experts = kernels.prepare_experts(replace(new_experts(rng, width, depth, activation, bias=True), site=7))
        adapters = tuple(kernels.prepare_adapter(expert_adapter(rng, width, depth)) for _ in range(2))
        for count in ROWS:
            x = activations(kernels, normal(rng, count, depth))
            routing = kernels.route(kernels.from_host(spread_logits(rng, count)), Router(3, renormalise=True))
            use = AdapterUse(adapters, rows_of(rng, count, 2))
            results.append(kernels.to_host(kernels.mix_experts(x, routing, experts, use)))
    return tuple(results)


@case("adapt_embedding")
def adapt_embedding(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Tokens of a table in place of the base's, of low-rank changes of it, of both, and of none."""
    own = QuantizedTensor.quantize(normal(rng, TOKENS, DEPTH), QuantFormat.BF16)
    thin = LowRank(0, normal(rng, RANKS[0], DEPTH), normal(rng, TOKENS, RANKS[0]))
    every = (LowRank(0, None, own),), (thin,), (LowRank(0, None, own), thin), ()
    adapters = tuple(kernels.prepare_adapter(Adapter(embedding=each)) for each in every)
    table, results = kernels.prepare_embedding(normal(rng, TOKENS, DEPTH)), []
    for count in ROWS:
        ids = kernels.from_host(rng.integers(0, TOKENS, count).astype(np.int32))
        use = AdapterUse(adapters, rows_of(rng, count, len(every)))
        for scale in (1.0, 2.5):
            plain = kernels.embed(table, ids, scale)
            results.append(kernels.to_host(kernels.adapt_embedding(plain, ids, scale, use)))
    return tuple(results)


@case("logits", "with adapters")
def adapted_logits(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Rows of a head in place of the base's, of a low-rank change, and of none, before the cap."""
    own = QuantizedTensor.quantize(normal(rng, sum(WIDTHS), DEPTH), QuantFormat.F16)
    thin = low_rank(rng, sum(WIDTHS), DEPTH, RANKS[0])
    every = (LowRank(0, None, own, normal(rng, sum(WIDTHS))),), (thin,), ()
    adapters = tuple(kernels.prepare_adapter(Adapter({7: parts} if parts else {})) for parts in every)
    weight = QuantizedTensor.from_array(normal(rng, sum(WIDTHS), DEPTH))
    head, results = kernels.prepare_linear(Linear((weight,), (None,), site=7)), []
    for count in ROWS:
        tokens = kernels.from_host(np.arange(2 * count, dtype=np.int32))
        rows = kernels.from_host(np.arange(0, 2 * count, 2, dtype=np.int32))
        use = AdapterUse(adapters, rows_of(rng, 2 * count, len(every)))
        batch = Batch(tokens, tokens, None, (), rows, adapters=use)
        x = activations(kernels, normal(rng, count, DEPTH))
        results += [kernels.to_host(kernels.logits(x, head, softcap, batch)) for softcap in (0.0, 3.0)]
    return tuple(results)
