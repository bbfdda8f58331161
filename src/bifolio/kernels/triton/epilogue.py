# mypy: disallow-untyped-decorators=False
"""The epilogue of every matrix product, for all weight formats.

out = act(sums + bias) + residual          (each part optional; an activated gate is multiplied by its up projection)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.norm import ACTIVATIONS, gated

NO_ACTIVATION = -1


def fused(bias: torch.Tensor | None, residual: torch.Tensor | None, activation: str | None) -> dict[str, int]:
    """The constexpr flags of `finish` and of the kernels that call it."""
    return {
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "ACTIVATION": NO_ACTIVATION if activation is None else ACTIVATIONS[activation],
    }


@triton.jit
def load_residual(residual: tl.tensor, place: tl.tensor, inside: tl.tensor, HAS_RESIDUAL: tl.constexpr) -> tl.tensor:
    """f32[...]: prefetched before the product."""
    added = tl.zeros(place.shape, tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    return added


@triton.jit
def finish(
    sums: tl.tensor,  # f32[...]
    up_sums: tl.tensor,  # f32[...]  up projection; unused without an activation
    output: tl.tensor,  # i32[outputs], or with a dimension of 1 in front
    place: tl.tensor,  # [...]  offsets in `out`
    inside: tl.tensor,  # bool[...]  mask of `place`
    bias: tl.tensor,  # [outputs (times 2 if gated)]
    added: tl.tensor,  # f32[...]  the residual at `place`; unused without one
    out: tl.tensor,
    num_outputs: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of a gate; -1: none
) -> None:
    exists = output < num_outputs
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=exists, other=0.0).to(tl.float32)
    if ACTIVATION >= 0:
        if HAS_BIAS:
            up_sums += tl.load(bias + num_outputs + output, mask=exists, other=0.0).to(tl.float32)
        sums = gated(sums, up_sums, ACTIVATION)
    if HAS_RESIDUAL:
        sums += added
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)
