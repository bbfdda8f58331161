# mypy: disallow-untyped-decorators=False
"""Mixtures of experts: routing, and grouped products of the rows of each expert, in shapes fixed by the batch size.

    pairs   (token, choice), ordered by expert; those of one expert by token
    tiles   |<- expert 0 ->|<- expert 0, padded ->|<- expert 3, padded ->|   at most `ROWS` pairs of one expert each

The number of tiles is an upper bound that depends on the number of pairs alone, so that a CUDA graph can hold the
launches; tiles beyond the last one return at once. Both products sum along the depth in the same order for any number
of tokens, and the outputs of a token are added in the order of its choice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Experts, Router, Routing
from bifolio.kernels.triton.norm import ACTIVATIONS, gated

MOST_SORTED_EXPERTS = 1024  # of the routing kernel: the logits of a token are one block


@triton.jit
def _route_kernel(
    logits: tl.tensor,  # [rows, experts]
    bias: tl.tensor,  # f32[experts]
    experts: tl.tensor,  # i32[rows, top_k]
    weights: tl.tensor,  # f32[rows, top_k]
    num_experts: tl.tensor,
    scale: tl.tensor,
    stride: tl.tensor,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < num_experts
    values = tl.load(logits + row * stride + expert, mask=exists, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        scores = tl.exp(values - tl.max(values, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias + expert, mask=exists, other=0.0)
    ranked = tl.where(exists, ranked, -float("inf"))
    choice = tl.arange(0, triton.next_power_of_2(TOP_K))
    chosen = tl.zeros(choice.shape, tl.int32)
    shares = tl.zeros(choice.shape, tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.argmax(ranked, axis=0, tie_break_left=True)
        chosen = tl.where(choice == i, best, chosen)
        shares = tl.where(choice == i, tl.sum(tl.where(expert == best, scores, 0.0), axis=0), shares)
        ranked = tl.where(expert == best, -float("inf"), ranked)
    if RENORMALISE:
        shares = shares / (tl.sum(shares, axis=0) + 1e-20)
    place = row * TOP_K + choice
    tl.store(experts + place, chosen, mask=choice < TOP_K)
    tl.store(weights + place, shares * scale, mask=choice < TOP_K)


def route(logits: torch.Tensor, router: Router) -> Routing:
    """Experts and weights of each token, for routers without groups of experts."""
    rows, num_experts = logits.shape
    experts = torch.empty((rows, router.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, router.top_k), dtype=torch.float32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits, logits if router.bias is None else router.bias, experts, weights, num_experts, router.scale,
            logits.stride(0), TOP_K=router.top_k, SIGMOID=router.scoring == "sigmoid", RENORMALISE=router.renormalise,
            HAS_BIAS=router.bias is not None, BLOCK=triton.next_power_of_2(num_experts), num_warps=1,
        )  # fmt: skip
    return Routing(experts, weights)


class Tiles(NamedTuple):
    """The pairs of a batch in tiles of one expert each."""

    pairs: torch.Tensor  # i32[pairs]  token * top_k + choice, ordered by expert
    expert: torch.Tensor  # i32[tiles]  experts: the tile is empty
    begin: torch.Tensor  # i32[tiles]  first of its pairs, in their order
    end: torch.Tensor  # i32[tiles]
    rows: int  # pairs of a full tile


def cut_pairs(experts: torch.Tensor, num_experts: int, rows: int) -> Tiles:
    """Order the pairs by expert and cut them into tiles; shapes depend on the number of pairs alone."""
    flat = experts.reshape(-1)
    numbers = torch.arange(num_experts, device=flat.device)
    pairs = torch.sort(flat, stable=True).indices.to(torch.int32)
    counts = (flat[:, None] == numbers[None, :]).sum(dim=0)
    ends = counts.cumsum(0)
    tile_ends = ((counts + rows - 1) // rows).cumsum(0)
    most = min(len(flat), triton.cdiv(len(flat), rows) + num_experts)
    tile = torch.arange(most, device=flat.device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    own = expert.clamp(max=num_experts - 1)
    first_tile = tile_ends[own] - (counts[own] + rows - 1) // rows
    begin = ends[own] - counts[own] + (tile - first_tile) * rows
    end = torch.minimum(begin + rows, ends[own])
    return Tiles(pairs, expert.to(torch.int32), begin.to(torch.int32), end.to(torch.int32), rows)


@triton.jit
def _grouped_kernel(
    x: tl.tensor,  # [tokens, depth] if GATED, else [pairs, depth] in the order of experts
    weight: tl.tensor,  # [experts, outputs (times 2 if GATED), depth]
    bias: tl.tensor,  # [experts, outputs (times 2 if GATED)]
    pairs: tl.tensor,
    shares: tl.tensor,  # f32[pairs]  weight of each pair; unused if GATED
    tile_expert: tl.tensor,
    tile_begin: tl.tensor,
    tile_end: tl.tensor,
    out: tl.tensor,  # [pairs, outputs], in the order of experts if GATED, else of tokens
    num_experts: tl.tensor,
    num_outputs: tl.tensor,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < num_experts:
        place = tl.load(tile_begin + tile) + tl.arange(0, ROWS)
        exists = place < tl.load(tile_end + tile)
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        output_exists = output < num_outputs
        pair = tl.load(pairs + place, mask=exists, other=0)
        row = pair // TOP_K if GATED else place
        stacked: tl.constexpr = 2 if GATED else 1
        matrix = weight + expert.to(tl.int64) * (num_outputs * stacked) * DEPTH
        source = matrix + output.to(tl.int64)[:, None] * DEPTH
        partner = matrix + (output + num_outputs).to(tl.int64)[:, None] * DEPTH
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in range(0, DEPTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < DEPTH
            values = tl.load(
                x + row.to(tl.int64)[:, None] * DEPTH + column[None, :],
                mask=exists[:, None] & inside[None, :],
                other=0.0,
            )
            mask = output_exists[:, None] & inside[None, :]
            weights = tl.load(source + column[None, :], mask=mask, other=0.0)
            sums = tl.dot(values, tl.trans(weights), sums, input_precision=PRECISION)
            if GATED:
                weights = tl.load(partner + column[None, :], mask=mask, other=0.0)
                up_sums = tl.dot(values, tl.trans(weights), up_sums, input_precision=PRECISION)
        if HAS_BIAS:
            own = bias + expert * num_outputs * stacked + output
            sums += tl.load(own, mask=output_exists, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up_sums += tl.load(own + num_outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
        if GATED:
            sums = gated(sums, up_sums, ACTIVATION)
            target = place
        else:
            sums *= tl.load(shares + pair, mask=exists, other=0.0)[:, None]
            target = pair
        tl.store(
            out + target.to(tl.int64)[:, None] * num_outputs + output[None, :],
            sums.to(out.dtype.element_ty),
            mask=exists[:, None] & output_exists[None, :],
        )


@triton.jit
def _sum_kernel(
    parts: tl.tensor,  # f32[tokens, top_k, columns]
    out: tl.tensor,  # [tokens, columns]
    num_columns: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        total += tl.load(parts + (token * TOP_K + choice) * num_columns + column, mask=inside, other=0.0)
    tl.store(out + token * num_columns + column, total.to(out.dtype.element_ty), mask=inside)


def mix_experts(x: torch.Tensor, routing: Routing, experts: Experts, *, fixed: bool = False) -> torch.Tensor:
    """[tokens, d]; `fixed`: the same tiles for any number of tokens."""
    tokens, top_k = routing.experts.shape
    (up, up_bias), (down, down_bias) = experts.prepared
    width, columns = down.shape[2], down.shape[1]
    out = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    rows = 16 if fixed or tokens * top_k <= 16 * up.shape[0] else 64
    tiles = cut_pairs(routing.experts, up.shape[0], rows)
    hidden = torch.empty((tokens * top_k, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((tokens, top_k, columns), dtype=torch.float32, device=x.device)
    _multiply(x.contiguous(), up, up_bias, routing.weights, tiles, hidden, top_k, experts.activation)
    _multiply(hidden, down, down_bias, routing.weights, tiles, parts, top_k, None)
    block = min(triton.next_power_of_2(columns), 1024)
    _sum_kernel[(triton.cdiv(columns, block), tokens)](parts, out, columns, TOP_K=top_k, BLOCK=block, num_warps=4)
    return out


def _multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shares: torch.Tensor,
    tiles: Tiles,
    out: torch.Tensor,
    top_k: int,
    activation: str | None,  # None: the second product
) -> None:
    num_experts, outputs, depth = weight.shape
    outputs = outputs if activation is None else outputs // 2
    block, columns = (64, 64) if tiles.rows == 16 else (64, 128)
    _grouped_kernel[(triton.cdiv(outputs, columns), len(tiles.expert))](
        x, weight, weight if bias is None else bias, tiles.pairs, shares.contiguous(), tiles.expert, tiles.begin,
        tiles.end, out, num_experts, outputs,
        DEPTH=depth, TOP_K=top_k, GATED=activation is not None,
        ACTIVATION=-1 if activation is None else ACTIVATIONS[activation], HAS_BIAS=bias is not None,
        ROWS=tiles.rows, OUTPUTS=columns, BLOCK=block, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3,
    )  # fmt: skip
