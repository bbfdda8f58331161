"""Products and embeddings with quantised weights on a GPU, against the same weights dequantised to float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bifolio.kernels.interface import Linear, Norm
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.quantised import FEW_ROWS, KINDS
from bifolio.measure.check_bench import Bench, Named, relative_error
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

EXTRAS = ("plain", "norm", "bias", "residual", "gated", "logits")


def quantised_checks(bench: Bench, large: bool) -> Iterator[Named]:
    shapes = [(1, 33, 96), (3, 70, 160), (FEW_ROWS + 1, 33, 64)]  # one row, few, many
    if large:
        shapes += [(1, 3072, 2048), (1, 50001, 576), (7, 4096, 4096), (64, 2048, 8192), (64, 1000, 1536),
                   (300, 4096, 1024)]  # fmt: skip
    for format in KINDS:
        for rows, outputs, depth in shapes:
            for extra in EXTRAS:

                def error(
                    format: QuantFormat = format,
                    rows: int = rows,
                    outputs: int = outputs,
                    depth: int = depth,
                    extra: str = extra,
                ) -> float:
                    return _product_error(bench, format, rows, outputs, depth, extra)

                yield f"linear {format.name} {rows}x{outputs}x{depth} {extra}", error
        for width in (32, 96, 2048) if large else (32, 96):

            def embedding_error(format: QuantFormat = format, width: int = width) -> float:
                return _embedding_error(bench, format, width)

            yield f"embedding {format.name} {width}", embedding_error


def quantised(bench: Bench, format: QuantFormat, rows: int, columns: int) -> QuantizedTensor:
    return QuantizedTensor.quantize(bench.normal(rows, columns, scale=columns**-0.5).float().cpu().numpy(), format)


def _product_error(bench: Bench, format: QuantFormat, rows: int, outputs: int, depth: int, extra: str) -> float:
    kernels, reference = bench.kernels, bench.reference
    parts = tuple(quantised(bench, format, outputs, depth) for _ in range(2 if extra in ("gated", "bias") else 1))
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


def _embedding_error(bench: Bench, format: QuantFormat, width: int) -> float:
    """Rows in any order, some twice, and the head that is tied to the table."""
    source = quantised(bench, format, 41, width)
    ids = np.array([40, 0, 7, 7, 31, 1])
    table = bench.kernels.prepare_embedding(source)
    rows = bench.kernels.embed(table, bench.integers(ids), 2.5)
    expected = torch.from_numpy(source.dequantize_rows(ids) * np.float32(2.5)).to(bench.device)
    head = bench.kernels.prepare_linear(Linear((source,), (None,)))
    return relative_error(rows, expected) if head.prepared[0] is table else float("inf")
