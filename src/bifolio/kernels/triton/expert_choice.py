# mypy: disallow-untyped-decorators=False
"""The choice of experts from one logit for each: one program for each token.

The shared expert of a layer is one more pair (expert, weight) behind those that a token chooses (`shared_expert`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Router, Routing
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.shared_expert import SharedRouter

MOST_SORTED_EXPERTS = 1024  # the logits of a token are one block
LOWEST = tl.constexpr(-(1 << 31))  # below -inf in order


@triton.jit
def _in_order(values: tl.tensor) -> tl.tensor:
    """i32 in the order of f32 values: a warp reduces integers in one instruction."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _route_kernel(
    logits: tl.tensor,  # [rows, experts], or more columns
    bias: tl.tensor,  # f32[experts]
    experts: tl.tensor,  # i32[rows, top_k, or one more if SHARED]
    weights: tl.tensor,  # f32, as experts
    num_experts: tl.tensor,
    scale: tl.tensor,
    stride: tl.tensor,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHARED: tl.constexpr,  # expert `num_experts` is the last of every token
    SHARED_GATE: tl.constexpr,  # its weight is the sigmoid of the logit behind those of the others; else 1
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < num_experts
    PAIRS: tl.constexpr = TOP_K + 1 if SHARED else TOP_K
    choice = tl.arange(0, triton.next_power_of_2(PAIRS))
    chosen = tl.zeros(choice.shape, tl.int32)
    source = logits + row * stride
    wait_for_inputs()
    values = tl.load(source + expert, mask=exists, other=-float("inf")).to(tl.float32)
    highest, total, share = 0.0, 1.0, 1.0
    if SHARED_GATE:
        share = 1.0 / (1.0 + tl.exp(-tl.load(source + num_experts).to(tl.float32)))
    if SIGMOID:
        ranked = 1.0 / (1.0 + tl.exp(-values))
    else:
        highest = tl.max(values, axis=0)
        ranked = tl.exp(values - highest)
        total = tl.sum(ranked, axis=0)
        ranked = ranked / total
    if HAS_BIAS:
        ranked += tl.load(bias + expert, mask=exists, other=0.0)
    order = tl.where(exists, _in_order(ranked), LOWEST)
    for i in tl.static_range(TOP_K):
        best = tl.min(tl.where(order == tl.max(order, axis=0), expert, BLOCK), axis=0)  # of equal ones the first
        chosen = tl.where(choice == i, best, chosen)
        order = tl.where(expert == best, LOWEST, order)
    own = tl.load(source + chosen, mask=choice < TOP_K, other=0.0).to(tl.float32)
    shares = 1.0 / (1.0 + tl.exp(-own)) if SIGMOID else tl.exp(own - highest) / total
    if RENORMALISE:
        shares = shares / (tl.sum(tl.where(choice < TOP_K, shares, 0.0), axis=0) + 1e-20)
    shares = shares * scale
    if SHARED:
        chosen = tl.where(choice == TOP_K, num_experts, chosen)
        shares = tl.where(choice == TOP_K, share, shares)
    place = row * PAIRS + choice
    tl.store(experts + place, chosen, mask=choice < PAIRS)
    tl.store(weights + place, shares, mask=choice < PAIRS)


def can_route(router: Router, num_logits: int) -> bool:
    """Whether `route` can choose: no groups of experts, no factors of experts, usual scores, not too many."""
    plain = router.top_groups == router.num_groups and router.expert_scales is None and not router.band
    plain = plain and router.scoring != "sqrt_softplus"
    return plain and _num_choices(router, num_logits) <= MOST_SORTED_EXPERTS


def _num_choices(router: Router, num_logits: int) -> int:
    return router.num_others if isinstance(router, SharedRouter) else num_logits


def route(logits: torch.Tensor, router: Router) -> Routing:
    """Experts and weights of each token."""
    rows, num_experts = logits.shape[0], _num_choices(router, logits.shape[1])
    shared, has_gate = isinstance(router, SharedRouter), isinstance(router, SharedRouter) and router.has_gate
    pairs = router.top_k + shared
    experts = torch.empty((rows, pairs), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, pairs), dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits, logits if router.bias is None else router.bias, experts, weights, num_experts, router.scale,
            logits.stride(0), TOP_K=router.top_k, SIGMOID=router.scoring == "sigmoid", RENORMALISE=router.renormalise,
            HAS_BIAS=router.bias is not None, SHARED=shared, SHARED_GATE=has_gate,
            BLOCK=triton.next_power_of_2(num_experts), num_warps=1, **OVERLAPPED,
        )  # fmt: skip
    return Routing(experts, weights, int(shared))
