"""Checks of products and embeddings with quantised weights, against the same weights dequantised to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from check_bench import Bench, Check, relative_error

from bifolio.kernels.interface import Linear, Norm
from bifolio.kernels.triton import fp8_rows
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.quantised import FEW_ROWS
from bifolio.kernels.triton.row_layouts import LAYOUTS
from bifolio.model.huggingface.scaled_tensors import _decoded
from bifolio.quant.formats import QuantFormat
from bifolio.quant.fp8 import DenseToFp8, Fp8Tensor
from bifolio.quant.tensor import QuantizedTensor
from exotic_weights import exotic_tensor

EXTRAS = ("plain", "norm", "bias", "residual", "gated", "logits")
SHAPES = [(1, 33, 96), (3, 70, 160), (FEW_ROWS + 1, 33, 64)]  # one row, few, many
LARGE_SHAPES = [
    (1, 3072, 2048),
    (1, 50001, 576),
    (7, 4096, 4096),
    (64, 2048, 8192),
    (64, 1000, 1536),
    (300, 4096, 1024),
]
SUPER_SHAPES = [(1, 33, 256), (3, 70, 768), (FEW_ROWS + 1, 33, 512)]  # the same for blocks of 256 columns
LARGE_SUPER_SHAPES = [
    (1, 6144, 4096),
    (1, 1000, 14336),
    (7, 4096, 4096),
    (16, 4096, 14336),
    (64, 2048, 8192),
    (300, 4096, 1024),
]

FP8_SHAPES = [(1, 33, 96), (3, 70, 160), (65, 32, 64), (1, 48, 384), (5, 48, 384), (65, 48, 384)]
LARGE_FP8_SHAPES = [(1, 6144, 4096), (1, 4096, 14336), (9, 6144, 4096), (64, 4096, 4096), (256, 4096, 14336)]
FP8_KINDS = {"rows": (1, None), "tensor": (None, None), "groups": (128, 128)}  # rows and columns of a block; None: all


def fp8_checks() -> Iterator[Check]:
    """Rows of x are rounded where there are many."""
    for kind in (*FP8_KINDS, "dense"):
        for shape in (*FP8_SHAPES, *LARGE_FP8_SHAPES):
            for extra in EXTRAS:
                error = partial(fp8_error, kind=kind, shape=shape, extra=extra)
                yield Check(f"linear FP8 {kind} {'x'.join(map(str, shape))} {extra}", error, shape in LARGE_FP8_SHAPES)


def fp8_matrix(bench: Bench, kind: str, rows: int, columns: int) -> QuantizedTensor:
    """Scales are powers of two, so that the reference's weights in bfloat16 are exact."""
    values = bench.normal(rows, columns, scale=columns**-0.5).float().cpu()
    if kind == "dense":
        rounded = (values * 448 / values.abs().amax(dim=1, keepdim=True)).to(torch.float8_e4m3fn).float() / 512
        return DenseToFp8(QuantizedTensor.from_array(rounded.numpy()).converted(QuantFormat.BF16))
    height, width = (size or whole for size, whole in zip(FP8_KINDS[kind], (rows, columns), strict=True))
    stored = (values * (448 / values.abs().amax())).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    exponents = np.random.default_rng(rows).integers(-12, -8, (-(-rows // height), -(-columns // width)))
    return Fp8Tensor("w", stored, np.exp2(exponents).astype(np.float32), (height, width), partial(_decoded, "w"))


def fp8_error(bench: Bench, *, kind: str, shape: tuple[int, int, int], extra: str) -> float:
    """Many rows are rounded to three bits of mantissa instead of seven."""
    is_rounded = fp8_rows.rounds(shape[0], bench.kernels.dtype) and not bench.kernels.deterministic
    error = product_error(bench, matrix=partial(fp8_matrix, bench, kind), shape=shape, extra=extra)
    return error / 8 if is_rounded else error


def quantised_checks() -> Iterator[Check]:
    yield from fp8_checks()
    for format in LAYOUTS:
        wide = format.block_elements > 32
        for shape in (*(SUPER_SHAPES if wide else SHAPES), *(LARGE_SUPER_SHAPES if wide else LARGE_SHAPES)):
            for extra in EXTRAS:
                name = f"linear {format.name} {'x'.join(map(str, shape))} {extra}"
                error = partial(quantised_error, format=format, shape=shape, extra=extra)
                yield Check(name, error, shape in LARGE_SHAPES or shape in LARGE_SUPER_SHAPES)
        for width in (256, 768, 2048) if wide else (32, 96, 2048):
            name = f"embedding {format.name} {width}"
            yield Check(name, partial(embedding_error, format=format, width=width), large=width > 1000)


def quantised(bench: Bench, format: QuantFormat, rows: int, columns: int) -> QuantizedTensor:
    if not format.is_encodable:
        pytest.importorskip("gguf", reason="decodes the blocks for the reference")
        return exotic_tensor(format.name, rows, columns, scale=2e-4)
    return QuantizedTensor.quantize(bench.normal(rows, columns, scale=columns**-0.5).float().cpu().numpy(), format)


def quantised_error(bench: Bench, *, format: QuantFormat, shape: tuple[int, int, int], extra: str) -> float:
    return product_error(bench, matrix=partial(quantised, bench, format), shape=shape, extra=extra)


def product_error(
    bench: Bench, *, matrix: Callable[[int, int], QuantizedTensor], shape: tuple[int, int, int], extra: str
) -> float:
    kernels, reference = bench.kernels, bench.reference
    rows, outputs, depth = shape
    parts = tuple(matrix(outputs, depth) for _ in range(2 if extra in ("gated", "bias") else 1))
    biases = (bench.normal(outputs).float().cpu().numpy(), None) if extra == "bias" else (None,) * len(parts)
    ours = kernels.prepare_linear(Linear(parts, biases))
    theirs = reference.prepare_linear(Linear(parts, biases))
    x = bench.normal(rows, depth)
    norm = Norm(bench.normal(depth, dtype=torch.float32), None, 1e-5)
    normed = extra in ("norm", "gated", "logits")
    source: Any = kernels.norm(x, norm) if normed else x
    expected_source = reference.norm(x.float(), norm) if normed else x.float()
    if extra == "logits":
        return relative_error(kernels.logits(source, ours, 3.0), reference.logits(expected_source, theirs, 3.0))
    result, expected = kernels.linear(source, ours), reference.linear(expected_source, theirs)
    if extra == "gated":
        result, expected = kernels.act_mul(result, "silu"), reference.act_mul(expected, "silu")
    if extra == "residual":
        residual = bench.normal(rows, outputs)
        result, expected = kernels.add(residual, result), residual.float() + expected
    return relative_error(tensor(result), expected)


def embedding_error(bench: Bench, *, format: QuantFormat, width: int) -> float:
    """Rows in any order, some twice, and the head that is tied to the table."""
    source = quantised(bench, format, 41, width)
    ids = np.array([40, 0, 7, 7, 31, 1])
    table = bench.kernels.prepare_embedding(source)
    rows = bench.kernels.embed(table, bench.integers(ids), 2.5)
    expected = torch.from_numpy(source.dequantize_rows(ids) * np.float32(2.5)).to(bench.device)
    head = bench.kernels.prepare_linear(Linear((source,), (None,)))
    return relative_error(rows, expected) if head.prepared[0] is table else float("inf")
