# mypy: disallow-untyped-decorators=False
"""Mixtures of experts: routing, and the products of the experts that the tokens of a batch choose.

Few tokens: the experts of each pair (token, choice) are read by a GEMV (`up_kernel`, `down_kernel`), so that one token
reads the weights of its own experts alone, in two launches. More tokens: grouped products over tiles of one expert each
(`expert_order`). Shapes follow from the number of tokens, so that a CUDA graph can hold the launches. Every sum has one
order, and the outputs of a token are added in the order of its choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Experts, Linear, Norm, Router, Routing
from bifolio.kernels.native.encode import quickly_converted
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import quantised
from bifolio.kernels.triton.expert_kernels import down_kernel, grouped_kernel, sum_kernel, up_kernel
from bifolio.kernels.triton.expert_order import Tiles, cut_pairs
from bifolio.kernels.triton.gemm_tuning import INTERPRETED
from bifolio.kernels.triton.mxfp4 import dequantise_words, pack_words
from bifolio.kernels.triton.norm import ACTIVATIONS
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.quantised import QuantisedWeight
from bifolio.kernels.triton.tma import can_be_described, describe
from bifolio.quant.convert import convert
from bifolio.quant.formats import QuantFormat

WORDS = 3  # KIND of MXFP4
MOST_SORTED_EXPERTS = 1024  # of the routing kernel: the logits of a token are one block
FEW_TOKENS = 4  # up to this number every pair reads its expert's weights
EXACT_TOKENS = 512  # up to this number the outputs of experts are kept in f32 until they are added
DEQUANTISED_ROWS = 256  # pairs of an expert from which on weights in blocks are dequantised before the product


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
    wait_for_inputs()
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
    if BLOCK <= 128:  # the rank of every expert at once, instead of one search after the other
        ahead = (ranked[None, :] > ranked[:, None]) | (
            (ranked[None, :] == ranked[:, None]) & (expert[None, :] < expert[:, None])
        )
        rank = tl.sum(ahead.to(tl.int32), axis=1)
        is_chosen = (rank[None, :] == choice[:, None]) & (choice < TOP_K)[:, None]
        chosen = tl.minimum(tl.sum(tl.where(is_chosen, expert[None, :], 0), axis=1), num_experts - 1)
        shares = tl.sum(tl.where(is_chosen, scores[None, :], 0.0), axis=1)
    else:
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
            HAS_BIAS=router.bias is not None, BLOCK=triton.next_power_of_2(num_experts),
            num_warps=4 if num_experts <= 128 else 1, **OVERLAPPED,
        )  # fmt: skip
    return Routing(experts, weights)


@dataclass(frozen=True, slots=True)
class Stack:
    """One projection of all experts."""

    weight: torch.Tensor | QuantisedWeight  # [experts * outputs, depth]; dense, or in blocks
    bias: torch.Tensor | None  # [experts * outputs]
    num_experts: int

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0]) // self.num_experts

    @property
    def depth(self) -> int:
        return int(self.weight.shape[1])

    @property
    def kind(self) -> int:
        return self.weight.kind if isinstance(self.weight, QuantisedWeight) else -1

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights, scales and minima, or the weights in their place."""
        weight = self.weight
        if isinstance(weight, torch.Tensor):
            return weight, weight, weight
        return weight.values, weight.scales, weight.scales if weight.minima is None else weight.minima

    def dense(self, dtype: torch.dtype) -> Stack:
        if isinstance(self.weight, torch.Tensor):
            return self
        is_words = self.weight.format is QuantFormat.MXFP4
        dequantise = dequantise_words if is_words else quantised.dequantise
        return Stack(dequantise(self.weight, dtype), self.bias, self.num_experts)


def prepare_stack(linears: tuple[Linear, ...], torch_kernels: TorchKernels) -> Stack:
    """Concatenate the weights of all experts: in blocks if all have one format, dense otherwise."""
    files = tuple(part for linear in linears for part in linear.parts)
    parts = tuple(convert(part, quantised.FORMATS, quickly_converted) for part in files)
    weight: torch.Tensor | QuantisedWeight | None = None
    if quantised.usable(parts):
        pack = pack_words if parts[0].format is QuantFormat.MXFP4 else quantised.pack
        weight = pack(parts, torch_kernels.device)
    if weight is None:
        weight = torch.cat([torch_kernels.tensor(part) for part in parts])
    quantised.release(files)
    biases = [bias for linear in linears for bias in linear.biases]
    if biases[0] is None:
        return Stack(weight, None, len(linears))
    return Stack(weight, torch.cat([torch_kernels.tensor(bias) for bias in biases]), len(linears))


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes of one product."""

    outputs: int
    depth: int  # columns; of weights in blocks a multiple of 32
    warps: int
    stages: int = 1


def up_tile(kind: int, depth: int) -> Tile:
    if INTERPRETED:
        return Tile(64, 64, 4)
    if kind >= 0:
        return Tile(8 if kind == WORDS else 4, 1024, 4)
    return Tile(4, 512, 2) if depth <= 2048 else Tile(4, 1024, 4)


def down_tile(kind: int, depth: int) -> Tile:
    """Two rows of each expert: enough programs for the device, and all experts are read at once."""
    if INTERPRETED:
        return Tile(16, 64, 4)
    if kind >= 0:
        return Tile(2, 1024, 4)
    return Tile(2, 256, 4, 3)


def grouped_tile(kind: int, rows: int, gated: bool, dtype: torch.dtype) -> Tile:
    if INTERPRETED:
        return Tile(64, 64, 4)
    if dtype == torch.float32:
        return Tile(32, 32, 4, 2)
    if kind >= 0:
        return Tile(64, 64, 4, 4 if rows <= 64 else 3)
    if rows <= 64:
        return Tile(64 if gated else 128, 64, 4, 4)
    return Tile(64 if gated else 128, 64, 8, 4)


def tile_rows(pairs: int, num_experts: int, fixed: bool) -> int:
    """At least twice the pairs of an expert on average, so that the weights of most experts are read once.

    Three sizes: every other one would be compiled for each product.
    """
    wanted = triton.cdiv(2 * pairs, num_experts)
    if fixed or wanted <= 16:
        return 16
    return 64 if wanted <= 64 else 128


def mix_experts(
    x: torch.Tensor,  # [tokens, depth]; not normed yet if there is a norm
    routing: Routing,
    experts: Experts,
    dtype: torch.dtype,  # of hidden values
    *,
    norm: Norm | None = None,  # of one token
    residual: torch.Tensor | None = None,
    fixed: bool = False,  # results of a token do not depend on the number of tokens
) -> torch.Tensor:
    """[tokens, d], in the dtype of the residual, or in `dtype` without one."""
    tokens, top_k = routing.experts.shape
    up, down = experts.prepared
    out = torch.empty((tokens, down.outputs), dtype=dtype if residual is None else residual.dtype, device=x.device)
    if not tokens:
        return out
    if tokens <= FEW_TOKENS and not fixed:
        hidden = _up(x, routing, up, experts, norm, dtype)
        _down(hidden, routing, down, residual, out)
        return out
    pairs = tokens * top_k
    if pairs >= DEQUANTISED_ROWS * up.num_experts and not fixed:
        up, down = up.dense(dtype), down.dense(dtype)
    tiles = cut_pairs(routing.experts, up.num_experts, tile_rows(pairs, up.num_experts, fixed))
    hidden = torch.empty((pairs, down.depth), dtype=dtype, device=x.device)
    kept = torch.float32 if tokens <= EXACT_TOKENS or fixed else dtype
    parts = torch.empty((tokens, top_k, down.outputs), dtype=kept, device=x.device)
    _multiply(x.contiguous(), up, routing.weights, tiles, hidden, top_k, experts)
    _multiply(hidden, down, routing.weights, tiles, parts, top_k, None)
    block = min(triton.next_power_of_2(down.outputs), 1024)
    sum_kernel[(triton.cdiv(down.outputs, block), tokens)](
        parts, parts if residual is None else residual, out, down.outputs, TOP_K=top_k, BLOCK=block,
        HAS_RESIDUAL=residual is not None, num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return out


def _up(
    x: torch.Tensor, routing: Routing, up: Stack, experts: Experts, norm: Norm | None, dtype: torch.dtype
) -> torch.Tensor:
    """[pairs, outputs]"""
    tokens, top_k = routing.experts.shape
    outputs, tile = up.outputs // (2 if experts.gated else 1), up_tile(up.kind, up.depth)
    hidden = torch.empty((tokens * top_k, outputs), dtype=dtype, device=x.device)
    up_kernel[(triton.cdiv(outputs, tile.outputs), tokens * top_k)](
        x.contiguous(), *up.arrays(), x if up.bias is None else up.bias, x if norm is None else norm.weight,
        routing.experts, hidden, outputs, 0.0 if norm is None else norm.eps,
        DEPTH=up.depth, KIND=up.kind, TOP_K=top_k, OUTPUTS=tile.outputs, BLOCK=_block(tile, up), STAGES=tile.stages,
        HAS_NORM=norm is not None, HAS_BIAS=up.bias is not None, GATED=experts.gated,
        ACTIVATION=ACTIVATIONS[experts.activation], num_warps=tile.warps, **OVERLAPPED,
    )  # fmt: skip
    return hidden


def _down(
    hidden: torch.Tensor, routing: Routing, down: Stack, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    tokens, top_k = routing.experts.shape
    tile = down_tile(down.kind, down.depth)
    down_kernel[(triton.cdiv(down.outputs, tile.outputs), tokens)](
        hidden, *down.arrays(), hidden if down.bias is None else down.bias, hidden if residual is None else residual,
        routing.experts, routing.weights, out, down.outputs,
        DEPTH=down.depth, KIND=down.kind, TOP_K=top_k, CHOICES=triton.next_power_of_2(top_k), OUTPUTS=tile.outputs,
        BLOCK=_block(tile, down), STAGES=tile.stages, HAS_BIAS=down.bias is not None,
        HAS_RESIDUAL=residual is not None, num_warps=tile.warps, **OVERLAPPED,
    )  # fmt: skip


def _block(tile: Tile, stack: Stack) -> int:
    """Columns that a program reads at once."""
    return int(min(tile.depth, triton.next_power_of_2(stack.depth)))


def _multiply(
    x: torch.Tensor,
    stack: Stack,
    shares: torch.Tensor,
    tiles: Tiles,
    out: torch.Tensor,
    top_k: int,
    first: Experts | None,  # None: the second product
) -> None:
    gated = first is not None and first.gated
    outputs = stack.outputs // (2 if gated else 1)
    tile = grouped_tile(stack.kind, tiles.rows, gated, x.dtype)
    weight, scales, minima = stack.arrays()
    source: Any = weight
    described = stack.kind < 0 and x.dtype == weight.dtype and can_be_described(weight)
    if described:
        source = describe(weight, tile.outputs, tile.depth)
    grouped_kernel[(triton.cdiv(outputs, tile.outputs), len(tiles.expert))](
        x, source, scales, minima, x if stack.bias is None else stack.bias, tiles.pairs, shares, tiles.expert,
        tiles.begin, tiles.end, out, stack.num_experts, outputs,
        DEPTH=stack.depth, KIND=stack.kind, TOP_K=top_k, FIRST=first is not None, GATED=gated,
        ACTIVATION=-1 if first is None else ACTIVATIONS[first.activation], HAS_BIAS=stack.bias is not None,
        ROWS=tiles.rows, OUTPUTS=tile.outputs, BLOCK=tile.depth, STAGES=tile.stages, DESCRIBED=described,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
        **OVERLAPPED,
    )  # fmt: skip
