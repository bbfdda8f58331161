"""Experts of one token by `row_product.cu`: two launches; the weights of the second arrive while the first one runs."""

from __future__ import annotations

from functools import cache

import torch

from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.cuda.row_product import KNOWN, RowPlan, launch, plan_of
from bifolio.kernels.interface import Norm, Routing

MOST_CHOICES = 32  # lanes of the warp that copies
UP_RING_BYTES, DOWN_RING_BYTES = 134_000, 92_000  # of the units in flight: both products fit on a multiprocessor


@cache
def plans_of(hidden: int, depth: int, top_k: int, num_processors: int) -> tuple[RowPlan, RowPlan] | None:
    """Plans of both products of `top_k` experts with `hidden` hidden values, of a token with `depth` values."""
    if hidden % 8 or top_k > MOST_CHOICES:
        return None
    up = plan_of(
        2 * hidden * top_k, depth, gated=True, num_processors=num_processors, ring_bytes=UP_RING_BYTES
    )  # fmt: skip
    down = plan_of(
        depth, hidden * top_k, gated=False, num_processors=num_processors, is_whole=False, ring_bytes=DOWN_RING_BYTES
    )  # fmt: skip
    if up is None or down is None or 2 * hidden % up.unit:
        return None
    return up, down


def can_mix(
    x: torch.Tensor,
    up: torch.Tensor,  # [experts * 2 * hidden, depth]
    down: torch.Tensor,  # [experts * depth, hidden]
    top_k: int,
    *,
    norm: Norm | None,
    residual: torch.Tensor | None,
    num_processors: int,
) -> bool:
    """Whether the kernel multiplies such operands, on this device."""
    bf16 = torch.bfloat16
    if up.dtype != bf16 or down.dtype != bf16 or x.dtype not in KNOWN or x.shape[0] != 1:
        return False
    if norm is not None and (x.dtype != torch.float32 or norm.weight.dtype not in KNOWN):
        return False
    if residual is not None and residual.dtype != torch.float32:
        return False
    return plans_of(down.shape[1], x.shape[1], top_k, num_processors) is not None and nvrtc.works()


def mix_row(
    x: torch.Tensor,  # [1, depth]
    routing: Routing,
    up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,  # [1, depth]  written
    *,
    norm: Norm | None,
    residual: torch.Tensor | None,
    activation: int,
    num_processors: int,
) -> None:
    """out = residual + the sum of the chosen experts, each times its weight."""
    top_k, width = routing.experts.shape[1], down.shape[1]
    plans = plans_of(width, x.shape[1], top_k, num_processors)
    if plans is None:
        raise ValueError(f"no plan for {top_k} experts of {width} hidden values: ask `can_mix` first")
    hidden = torch.empty((1, top_k * width), dtype=torch.bfloat16, device=x.device)
    launch(plans[0], x, up, hidden, width, norm=norm, activation=activation, is_first=True, routing=routing)
    launch(plans[1], hidden, down, out, x.shape[1], residual=residual, routing=routing)
