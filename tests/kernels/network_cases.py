"""Cases of weights and of the verbs that the network is made of, attention aside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from case_table import Outputs, activations, case, normal

from bifolio.kernels.interface import AttentionShape, Batch, Heads, KernelSet, Linear, Norm, XieluCoefficients
from bifolio.long_rope import LONG_ROPE
from bifolio.quant.formats import ENCODABLE_FORMATS, QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from bifolio.schedule.orchestrators import PrefillOrchestrator
from exotic_weights import exotic_tensor

ROUNDED = 2e-2  # int8 activations beside quantised weights
CONVERTED = 3e-2  # of a format that the set does not take
ROWS = (1, 3, 70)  # products have kernels of their own for one row, a few, and many
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")


def matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return normal(rng, rows, columns, scale=columns**-0.5)


def new_norm(rng: np.random.Generator, width: int, *, centered: bool = False) -> Norm:
    return Norm(1 + normal(rng, width, scale=0.25), normal(rng, width) if centered else None, 1e-5, centered)


def new_linear(rng: np.random.Generator, outputs: tuple[int, ...], depth: int, *, bias: bool = False) -> Linear:
    """Parts side by side; with `bias`, every part but the first has one."""
    biases = tuple(normal(rng, rows) if bias and number else None for number, rows in enumerate(outputs))
    return Linear(tuple(matrix(rng, rows, depth) for rows in outputs), biases)


# -- weights -----------------------------------------------------------------------------------------------------------
@case("prepare_linear")
def prepare_linear(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The prepared layer has the sizes of the file's, and gives the same product whenever it is prepared again."""
    linear = new_linear(rng, (48, 16), 64, bias=True)
    prepared = [kernels.prepare_linear(linear) for _ in range(2)]
    for each in prepared:
        assert (each.out_features, each.in_features) == (64, 64)
    x = activations(kernels, normal(rng, 3, 64))
    return tuple(kernels.to_host(kernels.linear(x, each)) for each in prepared)


@case("prepare_linear", "of a format to convert", rounding=CONVERTED)
def prepare_converted(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    pytest.importorskip("gguf", reason="decodes the blocks for the reference")
    parts = tuple(exotic_tensor(name, 32, 256) for name in ("Q4_K", "Q6_K"))
    prepared = kernels.prepare_linear(Linear(parts, (None, normal(rng, 32))))
    return (kernels.to_host(kernels.linear(activations(kernels, normal(rng, 3, 256)), prepared)),)


@case("prepare_norm")
def prepare_norm(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    norms = [Norm(1 + normal(rng, 48), None, 1e-5), Norm(rng.standard_normal(48).astype(np.float32), None, 1e-6)]
    x = activations(kernels, normal(rng, 3, 48))
    return tuple(kernels.to_host(kernels.norm(x, kernels.prepare_norm(norm))) for norm in norms)


@case("prepare_embedding")
def prepare_embedding(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A table that is the head too: rows and products of the same weights."""
    table = QuantizedTensor.quantize(matrix(rng, 40, 64), QuantFormat.F16)
    ids = kernels.from_host(np.array([39, 0, 7], np.int32))
    rows = kernels.embed(kernels.prepare_embedding(table), ids, 1.0)
    head = kernels.prepare_linear(Linear((table,), (None,)))
    return kernels.to_host(rows), kernels.to_host(kernels.logits(activations(kernels, normal(rng, 2, 64)), head, 0.0))


@case("prepare_embedding", "of a format to convert", rounding=CONVERTED)
def prepare_converted_embedding(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    pytest.importorskip("gguf", reason="decodes the blocks for the reference")
    table = kernels.prepare_embedding(exotic_tensor("Q6_K", 24, 256))
    return (kernels.to_host(kernels.embed(table, kernels.from_host(np.array([23, 0, 5], np.int32)), 1.0)),)


def _enter_format(format: QuantFormat) -> None:
    @case("formats", format.name, rounding=ROUNDED if format.is_quantized else 0.0)
    def taken_as_it_is(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
        """Products with one row, a few and many, and rows of a table, in a format of the set."""
        assert isinstance(kernels.formats, frozenset)
        assert format in kernels.formats
        weight = QuantizedTensor.quantize(matrix(rng, 48, 64), format)
        linear = kernels.prepare_linear(Linear((weight,), (None,)))
        outputs = [kernels.to_host(kernels.linear(activations(kernels, normal(rng, n, 64)), linear)) for n in ROWS]
        ids = kernels.from_host(np.array([47, 0, 7, 7], np.int32))
        return *outputs, kernels.to_host(kernels.embed(kernels.prepare_embedding(weight), ids, 1.0))


for _format in ENCODABLE_FORMATS:
    _enter_format(_format)


# -- verbs -------------------------------------------------------------------------------------------------------------
@case("embed")
def embed(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    table = kernels.prepare_embedding(normal(rng, 40, 48))
    ids = kernels.from_host(np.array([39, 0, 7, 7, 31], np.int32))
    return tuple(kernels.to_host(kernels.embed(table, ids, scale)) for scale in (1.0, 2.5))


@case("rotation")
def rotation(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    frequencies = kernels.from_host((1e4 ** -(np.arange(16) / 16)).astype(np.float32))
    positions = kernels.from_host(np.array([0, 1, 2, 70, 4099], np.int32))
    return tuple(kernels.to_host(part) for part in kernels.rotation(frequencies, 1.25, positions))


@case("norm")
def norm(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    return _normed(kernels, rng, centered=False)


@case("norm", "centered")
def centered_norm(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    return _normed(kernels, rng, centered=True)


def _normed(kernels: KernelSet, rng: np.random.Generator, *, centered: bool) -> Outputs:
    weights = kernels.prepare_norm(new_norm(rng, 80, centered=centered))
    return tuple(kernels.to_host(kernels.norm(activations(kernels, normal(rng, n, 80)), weights)) for n in ROWS)


@case("add")
def add(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    x, y, z = (activations(kernels, normal(rng, 5, 48)) for _ in range(3))
    return kernels.to_host(kernels.add(x, y)), kernels.to_host(kernels.add(kernels.add(x, y), z))


@case("add", "to a product")
def add_product(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The residual of a layer, which a set may fuse into the product."""
    linear = kernels.prepare_linear(new_linear(rng, (48,), 64))
    sums = []
    for rows in ROWS:
        product = kernels.linear(activations(kernels, normal(rng, rows, 64)), linear)
        sums.append(kernels.to_host(kernels.add(activations(kernels, normal(rng, rows, 48)), product)))
    return tuple(sums)


@case("add_norm")
def add_norm(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The sum, its norm, and the product that follows them in the network."""
    found: list[Any] = []
    first, second = (kernels.prepare_linear(new_linear(rng, (width,), 96 - width)) for width in (32, 64))
    weights = kernels.prepare_norm(new_norm(rng, 32))
    for rows in ROWS:
        residual = activations(kernels, normal(rng, rows, 32))
        delta = kernels.linear(activations(kernels, normal(rng, rows, 64)), first)
        total, normed = kernels.add_norm(residual, delta, weights)
        found += [kernels.linear(normed, second), total, normed]
    return tuple(kernels.to_host(array) for array in found)


@case("linear")
def linear(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    one, several = (kernels.prepare_linear(new_linear(rng, sizes, 80, bias=True)) for sizes in ((33,), (48, 16, 16)))
    inputs = [activations(kernels, normal(rng, rows, 80)) for rows in ROWS]
    return tuple(kernels.to_host(kernels.linear(x, each)) for x in inputs for each in (one, several))


@case("linear", "of a norm")
def linear_of_norm(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    weights, layer = kernels.prepare_norm(new_norm(rng, 64)), kernels.prepare_linear(new_linear(rng, (48,), 64))
    inputs = [activations(kernels, normal(rng, rows, 64)) for rows in ROWS]
    return tuple(kernels.to_host(kernels.linear(kernels.norm(x, weights), layer)) for x in inputs)


@case("act_mul")
def act_mul(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    x = activations(kernels, normal(rng, 7, 2 * 72, scale=2.0))
    return tuple(kernels.to_host(kernels.act_mul(x, activation)) for activation in ACTIVATIONS)


@case("act_mul", "of a product")
def act_mul_of_product(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Gate and up of an MLP, which a set may multiply before anything is written."""
    layer = kernels.prepare_linear(new_linear(rng, (72, 72), 64))
    inputs = [activations(kernels, normal(rng, rows, 64)) for rows in ROWS]
    return tuple(kernels.to_host(kernels.act_mul(kernels.linear(x, layer), a)) for x in inputs for a in ACTIVATIONS)


@case("act")
def act(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    x = activations(kernels, normal(rng, 5, 72, scale=2.0))
    layer = kernels.prepare_linear(new_linear(rng, (48,), 72))
    plain = [kernels.to_host(kernels.act(x, activation)) for activation in (*ACTIVATIONS, "relu", "sigmoid", "tanh")]
    return *plain, kernels.to_host(kernels.act(kernels.linear(x, layer), "gelu"))


@case("sum_rows")
def sum_rows(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Sums of an array and of a sum."""
    x, y = (activations(kernels, normal(rng, 9, 32)) for _ in range(2))
    starts = np.array([0, 1, 6, 9])
    return tuple(kernels.to_host(kernels.sum_rows(each, starts)) for each in (x, kernels.add(x, y)))


@case("embed", "of positions and types")
def embed_types(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The type of a token travels with its position."""
    tables = [kernels.prepare_embedding(normal(rng, rows, 48)) for rows in (20, 3)]
    positions = kernels.from_host(np.array([19, 0, 7, 7], np.int32) + LONG_ROPE * np.array([0, 1, 2, 0], np.int32))
    ids = positions % LONG_ROPE, positions // LONG_ROPE
    return tuple(kernels.to_host(kernels.embed(*each, 1.0)) for each in zip(tables, ids, strict=True))


@case("xielu")
def xielu(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    x = activations(kernels, normal(rng, 5, 72, scale=2.0))
    return (kernels.to_host(kernels.xielu(x, XieluCoefficients(0.8, 1.3, 0.5, -1e-6))),)


@case("clamp")
def clamp(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Bounds of each column; some have one bound, some none, some admit one value."""
    x = activations(kernels, normal(rng, 5, 72, scale=2.0))
    least, most = np.sort(normal(rng, 2, 72), axis=0)
    least[:20], most[10:30], least[40:44] = -np.inf, np.inf, most[40:44]
    bounds = (kernels.from_host(each.astype(np.float32)) for each in (least, most))
    return (kernels.to_host(kernels.clamp(x, *bounds)),)


@case("with_rows")
def with_rows(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Rows of two images in place of others, as wide as the array and wider; the array stays as it is."""
    x = activations(kernels, normal(rng, 7, 16))
    before = kernels.to_host(x).copy()
    found = []
    for width in (16, 48):
        first, second = (activations(kernels, normal(rng, count, width)) for count in (2, 3))
        parts = [(np.array([5, 0]), first), (np.array([2, 3, 6]), second)]
        found.append(kernels.to_host(kernels.with_rows(x, parts)))
    np.testing.assert_array_equal(kernels.to_host(x), before)
    return tuple(found)


@case("for_towers")
def for_towers(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Its arrays are those of the set; patches of odd heads see each other."""
    towers = kernels.for_towers
    assert (towers.array_backend, towers.device) == (kernels.array_backend, kernels.device)
    shape = AttentionShape(0, 3, 3, 20, 20**-0.5)
    lengths = np.full(1, 9, np.int32)
    segment = PrefillOrchestrator.lay_out(np.zeros(1, np.int32), lengths, None, causal=False)
    heads = Heads(*(activations(towers, normal(rng, 9, 3, 20)) for _ in range(3)))
    return (kernels.to_host(towers.attend(heads, shape, (segment,), None)),)


@case("capture")
def capture(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A function as one launch gives the results of its calls, which later launches leave as they are."""
    first, second = (activations(kernels, normal(rng, 5, 32)) for _ in range(2))
    norm = kernels.prepare_norm(new_norm(rng, 32))

    def run(x: Any) -> Any:
        return kernels.add(kernels.norm(x, norm), x)

    launch = kernels.capture(run, first) or run
    found = [launch(x) for x in (first, second)]
    expected = [kernels.to_host(run(x)) for x in (first, second)]
    for own, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(kernels.to_host(own), right)
    return tuple(expected)


@case("take")
def take(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Rows in any order, some twice, of an array and of a sum."""
    x, y = (activations(kernels, normal(rng, 6, 32)) for _ in range(2))
    rows = kernels.from_host(np.array([5, 0, 2, 2], np.int32))
    return kernels.to_host(kernels.take(x, rows)), kernels.to_host(kernels.take(kernels.add(x, y), rows))


@case("given")
@case("tap")
def given_and_tapped(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Given rows are read as they are; taps fill their columns and no others; without an array they do nothing."""
    rows = normal(rng, 5, 32)
    taps = kernels.from_host(np.zeros((5, 80), np.float32))
    batch = Batch(None, None, None, (), None, given=kernels.from_host(rows), taps=taps)
    x = kernels.given(batch, 32)
    kernels.tap(kernels.add(x, x), 40, batch)
    kernels.tap(x, 0, batch)
    kernels.tap(x, 8, replace(batch, taps=None))
    return kernels.to_host(x), kernels.to_host(taps)


@case("logits")
def logits(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """f32 whatever the set's dtype is; capped softly; none for no rows."""
    head, weights = kernels.prepare_linear(new_linear(rng, (61,), 64)), kernels.prepare_norm(new_norm(rng, 64))
    found = []
    for rows in (0, *ROWS):
        x = activations(kernels, normal(rng, rows, 64, scale=4.0))
        found += [kernels.to_host(kernels.logits(x, head, cap)) for cap in (0.0, 3.0)]
        if rows:
            found.append(kernels.to_host(kernels.logits(kernels.norm(x, weights), head, 0.0)))
    assert {array.dtype for array in found} == {np.dtype(np.float32)}
    return tuple(found)


@case("join_columns")
def join_columns(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    x, y = (activations(kernels, normal(rng, 5, width)) for width in (24, 17))
    return (kernels.to_host(kernels.join_columns([(x, 3, 9), (y, 0, 17), (x, 20, 24), (x, 0, 1)])),)


# -- ranks of tensor parallelism ---------------------------------------------------------------------------------------
@case("ranks")
@case("all_gather")
@case("all_reduce")
def of_one_rank(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A whole model has no other ranks: both exchanges return their input. `test_ranks` runs them with others."""
    assert kernels.ranks is None
    x = activations(kernels, normal(rng, 3, 48))
    return kernels.to_host(kernels.all_gather(x, (48,))), kernels.to_host(kernels.all_reduce(x))
