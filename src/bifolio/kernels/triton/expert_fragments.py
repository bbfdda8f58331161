"""Launches of the products of experts in MXFP4 (`kernels/cuda/mxfp4_*.cu`), which unpack weights in registers.

Few tokens: two launches, each pair of a token and an expert on its own. More tokens: products over the tiles of
`expert_order`, then the sum over the choices of each token. Every sum has one order. In grouped products the result of
a token does not depend on the other tokens, so that deterministic mode uses them for every number of tokens.
"""

from __future__ import annotations

import logging

import torch
import triton

from bifolio.errors import KernelCompileError
from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.cuda.mxfp4_fragments import CHUNK_BYTES, GROUP_TILES, FragmentStack
from bifolio.kernels.interface import Experts, Norm, Routing
from bifolio.kernels.triton.expert_kernels import sum_kernel
from bifolio.kernels.triton.expert_order import Tiles, cut_pairs
from bifolio.kernels.triton.norm import ACTIVATIONS, norm_rows
from bifolio.kernels.triton.pdl import OVERLAPPED

SOURCES = "common", "activations", "mxfp4_common"
FEW_TOKENS = 2  # up to this number every pair reads its expert's weights
EXACT_TOKENS = 512  # up to this number the outputs of experts are kept in f32 until they are added
UP_TILES, UP_SPLITS = 2, 2  # warps of `few_up`: tiles of 16 rows, parts of the columns
DOWN_WARPS = 16  # of `few_down`, for all choices of a token
AHEAD = 3  # pairs of chunks that a warp of both has in flight
WARPGROUPS, GROUPS = 1, 2  # of a thread block of grouped products: times four warps; groups of 64 rows of each four
STAGE_BYTES, RESIDENT = 75264, 3  # of grouped products: shared memory, thread blocks on a multiprocessor
TILE_TOKENS = 64  # of grouped products

logger = logging.getLogger(__name__)


def few_kernels() -> nvrtc.CudaModule:
    return nvrtc.load_source((*SOURCES, "mxfp4_few"), torch.cuda.current_device(), AHEAD=AHEAD)


def grouped_kernels() -> nvrtc.CudaModule:
    sizes = {"WARPGROUPS": WARPGROUPS, "GROUPS": GROUPS, "STAGE_BYTES": STAGE_BYTES, "RESIDENT": RESIDENT}
    return nvrtc.load_source((*SOURCES, "mxfp4_grouped"), torch.cuda.current_device(), **sizes)


def can_mix_fragments(device: str, dtype: torch.dtype) -> bool:
    """Whether the kernels run on this device with activations of this dtype; compiles them."""
    if not device.startswith("cuda") or dtype != torch.bfloat16 or not nvrtc.is_available():
        return False
    try:
        few_kernels()
        grouped_kernels()
    except KernelCompileError as error:
        logger.warning("experts in MXFP4 run on kernels in Triton, which are slower: %s", error)
        return False
    return True


def mix_fragments(
    x: torch.Tensor,  # [tokens, depth]; not normed yet if there is a norm
    routing: Routing,
    experts: Experts,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    fixed: bool = False,  # results of a token do not depend on the number of tokens
) -> torch.Tensor:
    """[tokens, d], in the dtype of the residual, or in bf16 without one."""
    if residual is not None and residual.dtype != torch.float32:
        return residual + mix_fragments(x, routing, experts, norm=norm, fixed=fixed)
    tokens, (_, down) = len(x), experts.prepared
    kind = torch.bfloat16 if residual is None else torch.float32
    out = torch.empty((tokens, down.rows), dtype=kind, device=x.device)
    if not tokens:
        return out
    normed = (x if norm is None else norm_rows(x, norm, out_dtype=torch.bfloat16)[1]).contiguous()
    if tokens <= FEW_TOKENS and routing.experts.shape[1] <= DOWN_WARPS and not fixed:
        _mix_few(normed, routing, experts, residual, out, is_early=norm is not None)
    else:
        _mix_many(normed, routing, experts, residual, out, fixed)
    return out


def _mix_few(
    x: torch.Tensor,
    routing: Routing,
    experts: Experts,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    is_early: bool,  # the kernel before this one is not the routing, so that experts are known before its end
) -> None:
    (tokens, top_k), (up, down) = routing.experts.shape, experts.prepared
    hidden = torch.empty((tokens * top_k, down.depth), dtype=torch.bfloat16, device=x.device)
    warps = UP_TILES * UP_SPLITS
    few_kernels().function("few_up").launch(
        (triton.cdiv(up.tiles, UP_TILES), tokens * top_k), 32 * warps,
        (up.data, x, x if up.bias is None else up.bias, routing.experts, hidden, up.tiles, up.chunks, up.depth,
         down.depth, top_k, UP_SPLITS, ACTIVATIONS[experts.activation], int(up.bias is not None),
         int(is_early)),
        shared_bytes=_few_bytes(up, 1, warps), pdl=True,
    )  # fmt: skip
    splits = max(DOWN_WARPS // top_k, 1)
    few_kernels().function("few_down").launch(
        (down.tiles, tokens), 32 * top_k * splits,
        (down.data, hidden, x if down.bias is None else down.bias, routing.experts, routing.weights,
         out if residual is None else residual, out, down.tiles, down.chunks, down.depth, down.rows, top_k, splits,
         int(down.bias is not None), int(residual is not None), int(out.dtype == torch.float32)),
        shared_bytes=_few_bytes(down, top_k, top_k * splits), pdl=True,
    )  # fmt: skip


def _few_bytes(stack: FragmentStack, tokens: int, warps: int) -> int:
    """Shared memory: tokens, chunks in flight, sums."""
    return tokens * -(-stack.chunks // 2) * 256 + warps * (AHEAD * 2 * CHUNK_BYTES + 64)


def _mix_many(
    x: torch.Tensor,
    routing: Routing,
    experts: Experts,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    fixed: bool,
) -> None:
    (tokens, top_k), (up, down) = routing.experts.shape, experts.prepared
    tiles = cut_pairs(routing.experts, up.num_experts, TILE_TOKENS)
    hidden = torch.empty((tokens * top_k, down.depth), dtype=torch.bfloat16, device=x.device)
    kept = torch.float32 if tokens <= EXACT_TOKENS or fixed else torch.bfloat16
    parts = torch.empty((tokens, top_k, down.rows), dtype=kept, device=x.device)
    _multiply("grouped_up", x, up, down.depth, routing, tiles, hidden, ACTIVATIONS[experts.activation])
    _multiply("grouped_down", hidden, down, down.rows, routing, tiles, parts, -1)
    block = min(triton.next_power_of_2(down.rows), 1024)
    sum_kernel[(triton.cdiv(down.rows, block), tokens)](
        parts, parts if residual is None else residual, out, down.rows, TOP_K=top_k, BLOCK=block,
        HAS_RESIDUAL=residual is not None, num_warps=4, **OVERLAPPED,
    )  # fmt: skip


def _multiply(
    name: str,
    x: torch.Tensor,
    stack: FragmentStack,
    outputs: int,
    routing: Routing,
    tiles: Tiles,
    out: torch.Tensor,
    activation: int,
) -> None:
    grouped_kernels().function(name).launch(
        (triton.cdiv(stack.tiles // GROUP_TILES, WARPGROUPS * GROUPS), len(tiles.expert)), 128 * WARPGROUPS,
        (stack.data, x, x if stack.bias is None else stack.bias, routing.weights, tiles.pairs, tiles.expert,
         tiles.begin, tiles.end, out, stack.num_experts, stack.tiles, stack.chunks, stack.depth, outputs,
         routing.experts.shape[1], activation, int(stack.bias is not None), int(out.dtype == torch.float32)),
        shared_bytes=STAGE_BYTES, pdl=True,
    )  # fmt: skip
