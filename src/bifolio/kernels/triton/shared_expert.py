"""The shared MLP of a layer as one more expert, where it has the sizes and the format of the others.

A decode step of few tokens is a chain of short kernels: beside the experts, the shared MLP, its gate and the additions
would be seven more of them. As an expert of every token it is part of the launches of the others:

    experts   the matrices of the shared MLP behind those of the others
    router    the row of its gate behind those of the others
    choice    for each token one pair more: the shared expert, with weight 1 or the sigmoid of its gate
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from bifolio.kernels.interface import Linear, RoutedExperts, Router, SharedMlp
from bifolio.kernels.triton import quantised
from bifolio.kernels.triton.row_layouts import LAYOUTS
from bifolio.quant.convert import target_format
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

ROUTER_ROWS = 16  # the columns of logits are a multiple of it: rows are aligned for the choice and for cuBLAS


@dataclass(frozen=True, slots=True)
class SharedRouter(Router):
    """A choice with one expert more for every token, behind those that it chooses; logits may have unused columns."""

    num_others: int = 0  # experts to choose from; the number of the shared one
    has_gate: bool = False  # its weight is the sigmoid of logit `num_others`; else 1


def fold_shared(routed: RoutedExperts, shared: SharedMlp) -> RoutedExperts | None:
    """The experts of a layer with the shared MLP as the last one, not prepared yet; None: it differs from them."""
    experts = routed.experts
    if not _is_alike(experts.up, shared.up) or not _is_alike(experts.down, shared.down):
        return None
    own = {field.name: getattr(routed.choice, field.name) for field in fields(Router)}
    return RoutedExperts(
        routed.router if shared.gate is None else _with_gate(routed.router, shared.gate),
        SharedRouter(**own, num_others=len(experts.up), has_gate=shared.gate is not None),
        replace(experts, up=(*experts.up, shared.up), down=(*experts.down, shared.down)),
    )


def _with_gate(router: Linear, gate: Linear) -> Linear:
    """The rows of both, and rows of zeros."""
    padding = ROUTER_ROWS - (router.out_features + gate.out_features) % ROUTER_ROWS
    zeros = np.zeros((padding, router.in_features), np.float32)
    return Linear((*router.parts, *gate.parts, zeros), (*router.biases, *gate.biases, None))


def _is_alike(linears: tuple[Linear, ...], shared: Linear) -> bool:
    """Whether one stack can hold all of these: equal sizes, one format, and no biases. MXFP4 has kernels of its own."""
    first = linears[0]
    if (first.out_features, first.in_features) != (shared.out_features, shared.in_features):
        return False
    if any(bias is not None for linear in (*linears, shared) for bias in linear.biases):
        return False
    formats = {_format(part) for linear in (*linears, shared) for part in linear.parts}
    return len(formats) == 1 and QuantFormat.MXFP4 not in formats


def _format(part: Any) -> QuantFormat | None:
    """The format of a matrix on the device; None: dense."""
    if not isinstance(part, QuantizedTensor):
        return None
    format = target_format(part.format, quantised.FORMATS)
    return format if format in LAYOUTS else None
