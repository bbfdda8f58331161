# mypy: disallow-untyped-decorators=False
"""Mixtures of experts: the products of the experts that the tokens of a batch choose (`expert_choice`).

Few tokens: the experts of each pair (token, choice) are read by a GEMV (`up_kernel`, `down_kernel`), so that one token
reads the weights of its own experts alone, in two launches; one token and dense weights have kernels in CUDA C++
(`row_experts`) on a GPU of compute capability 9.0 or higher. More tokens: grouped products over tiles of one expert
each (`expert_order`). On such a GPU with activations in bf16, experts in MXFP4 have kernels in CUDA C++ instead
(`expert_fragments`). Shapes follow from the number of tokens, so that a CUDA graph can hold the launches. Every sum has
one order, and the outputs of a token are added in the order of its choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from bifolio.kernels.cuda.mxfp4_fragments import FragmentStack, pack_fragments
from bifolio.kernels.cuda.row_experts import can_mix, mix_row
from bifolio.kernels.interface import Experts, Linear, Norm, Routing
from bifolio.kernels.native.encode import quickly_converted
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import quantised
from bifolio.kernels.triton.expert_fragments import can_mix_fragments, mix_fragments
from bifolio.kernels.triton.expert_kernels import down_kernel, grouped_kernel, sum_kernel, up_kernel
from bifolio.kernels.triton.expert_order import Tiles, cut_pairs
from bifolio.kernels.triton.expert_words import down_words_kernel, spread_kernel, up_words_kernel
from bifolio.kernels.triton.gemm_tuning import INTERPRETED
from bifolio.kernels.triton.mxfp4 import WordsWeight, dequantise_words, pack_words
from bifolio.kernels.triton.norm import ACTIVATIONS
from bifolio.kernels.triton.pdl import OVERLAPPED
from bifolio.kernels.triton.row_layouts import LAYOUTS, QuantisedWeight, pack
from bifolio.kernels.triton.tma import can_be_described, describe
from bifolio.quant.convert import DENSE_FORMATS, convert
from bifolio.quant.formats import QuantFormat

ROWS, WORDS = 0, 3  # KIND of quantised rows, of MXFP4
NO_LAYOUT = LAYOUTS[QuantFormat.Q8_0].constants(0)  # constants of kernels with other weights
FEW_TOKENS = 4  # up to this number every pair reads its expert's weights
EXACT_TOKENS = 512  # up to this number the outputs of experts are kept in f32 until they are added
DEQUANTISED_ROWS = 256  # pairs of an expert from which on weights in blocks are dequantised before the product


@dataclass(frozen=True, slots=True)
class Stack:
    """One projection of all experts."""

    weight: torch.Tensor | QuantisedWeight | WordsWeight  # [experts * outputs, depth]
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
        if isinstance(self.weight, torch.Tensor):
            return -1
        return ROWS if isinstance(self.weight, QuantisedWeight) else WORDS

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arrays of the weights as three arguments of a kernel."""
        weight = self.weight
        if isinstance(weight, torch.Tensor):
            return weight, weight, weight
        return weight.arrays() if isinstance(weight, QuantisedWeight) else (weight.values, weight.scales, weight.scales)

    @property
    def group(self) -> int:
        """Columns that a tile has at least."""
        return self.weight.layout.group if isinstance(self.weight, QuantisedWeight) else 1

    def constants(self) -> dict[str, int]:
        """Constants of a kernel: the kind of weights, and the layout of quantised rows."""
        layout = self.weight.constants() if isinstance(self.weight, QuantisedWeight) else NO_LAYOUT
        return {"KIND": self.kind, **layout}

    def dense(self, dtype: torch.dtype) -> Stack:
        if isinstance(self.weight, torch.Tensor):
            return self
        if isinstance(self.weight, QuantisedWeight):
            return Stack(quantised.dequantise(self.weight, dtype), self.bias, self.num_experts)
        return Stack(dequantise_words(self.weight, dtype), self.bias, self.num_experts)


def prepare_stacks(
    experts: Experts, torch_kernels: TorchKernels
) -> tuple[Stack | FragmentStack, Stack | FragmentStack]:
    """Gate and up, and down of all experts: MXFP4 as fragments where CUDA kernels can be compiled."""
    if experts.gated and can_mix_fragments(torch_kernels.device, torch_kernels.dtype):
        up = _prepare_fragments(experts.up, torch_kernels, gated=True)
        down = None if up is None else _prepare_fragments(experts.down, torch_kernels, gated=False)
        if up is not None and down is not None:
            quantised.release(tuple(experts.matrices()))
            return up, down
    return prepare_stack(experts.up, torch_kernels), prepare_stack(experts.down, torch_kernels)


def _prepare_fragments(
    linears: tuple[Linear, ...], torch_kernels: TorchKernels, *, gated: bool
) -> FragmentStack | None:
    parts = [part for linear in linears for part in linear.parts]
    if not quantised.usable(tuple(parts)) or parts[0].format is not QuantFormat.MXFP4:
        return None
    biases = [bias for linear in linears for bias in linear.biases]
    bias = None if biases[0] is None else torch.cat([torch_kernels.vector(each) for each in biases])
    return pack_fragments([linear.parts for linear in linears], bias, torch_kernels.device, gated=gated)


def prepare_stack(linears: tuple[Linear, ...], torch_kernels: TorchKernels) -> Stack:
    """Concatenate the weights of all experts: quantised if all have one format, dense otherwise."""
    files = tuple(part for linear in linears for part in linear.parts)
    parts = tuple(convert(part, quantised.FORMATS, quickly_converted) for part in files)
    if not quantised.usable(parts) and quantised.usable(parts, mixed=True):  # a stack has one format
        parts = tuple(convert(part, DENSE_FORMATS | {QuantFormat.Q8_0}, quickly_converted) for part in parts)
    weight: torch.Tensor | QuantisedWeight | WordsWeight | None = None
    if quantised.usable(parts):
        is_words = parts[0].format is QuantFormat.MXFP4
        weight = (pack_words if is_words else pack)(parts, torch_kernels.device)
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
    stages: int = 1  # for one token and MXFP4: steps that are unrolled


def up_tile(kind: int, depth: int) -> Tile:
    if INTERPRETED:
        return Tile(64, 64, 4)
    if kind >= 0:
        return Tile(2, 1024, 2) if kind == WORDS else Tile(4, 1024, 4)
    return Tile(2, 2048, 8) if depth <= 2048 else Tile(4, 1024, 4)


def down_tile(kind: int, depth: int) -> Tile:
    """Few rows of each expert: enough programs for the device, and all experts are read at once."""
    if INTERPRETED:
        return Tile(16, 64, 4)
    if kind >= 0:
        return Tile(2, 1024, 8, 3) if kind == WORDS else Tile(2, 1024, 4)
    return Tile(1, 256, 4)


def grouped_tile(kind: int, rows: int, gated: bool, dtype: torch.dtype) -> Tile:
    if INTERPRETED:
        return Tile(64, 64, 4)
    if dtype == torch.float32:
        return Tile(32, 32, 4, 2)
    if kind == WORDS and gated:
        return Tile(64, 128 if rows <= 16 else 64, 4, 3)
    if kind >= 0:
        return Tile(64, 64, 4, 4 if rows <= 64 else 3)
    if rows == 32 and not gated:
        return Tile(64, 128, 4, 3)
    if rows <= 64:
        return Tile(64 if gated else 128, 64, 4, 4)
    return Tile(64 if gated else 128, 64, 8, 4)


def tile_rows(pairs: int, num_experts: int, kind: int, fixed: bool) -> int:
    """At least twice the pairs of an expert on average, so that the weights of most experts are read once.

    Few sizes: every other one would be compiled for each product. A shared expert, of all tokens, is not counted.
    """
    wanted = triton.cdiv(2 * pairs, num_experts)
    if fixed or wanted <= 16:
        return 16
    if wanted <= 32 and kind < 0:
        return 32
    return 64 if wanted <= 64 else 128


def mixed(
    x: torch.Tensor,  # [tokens, depth]; not normed yet if there is a norm
    routing: Routing,
    experts: Experts,
    dtype: torch.dtype,  # of hidden values
    *,
    norm: Norm | None = None,  # of one token
    residual: torch.Tensor | None = None,
    fixed: bool = False,  # results of a token do not depend on the number of tokens
    num_processors: int = 0,  # multiprocessors of a GPU; 0: there is none
) -> torch.Tensor:
    """[tokens, d], in the dtype of the residual, or in `dtype` without one."""
    tokens, top_k = routing.experts.shape
    up, down = experts.prepared
    if isinstance(up, FragmentStack):
        return mix_fragments(x, routing, experts, norm=norm, residual=residual, fixed=fixed)
    out = torch.empty((tokens, down.outputs), dtype=dtype if residual is None else residual.dtype, device=x.device)
    if not tokens:
        return out
    if tokens <= FEW_TOKENS and not fixed and up.kind == WORDS:
        _mix_words(x, routing, experts, norm, residual, out)
        return out
    own: dict[str, Any] = {"norm": norm, "residual": residual, "num_processors": num_processors}
    if num_processors and not fixed and _is_row(x, up, down, experts, top_k, own):
        mix_row(x, routing, up.weight, down.weight, out, activation=ACTIVATIONS[experts.activation], **own)
        return out
    if tokens <= FEW_TOKENS and not fixed:
        hidden = _up(x, routing, up, experts, norm, dtype)
        _down(hidden, routing, down, residual, out)
        return out
    pairs = tokens * top_k
    chosen, others = pairs - tokens * routing.shared, up.num_experts - routing.shared
    if chosen >= DEQUANTISED_ROWS * others and not fixed:
        up, down = up.dense(dtype), down.dense(dtype)
    tiles = cut_pairs(routing.experts, up.num_experts, tile_rows(chosen, others, up.kind, fixed))
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


def _is_row(x: torch.Tensor, up: Stack, down: Stack, experts: Experts, top_k: int, own: dict[str, Any]) -> bool:
    """Whether these experts of one token have a kernel in CUDA C++."""
    if up.kind >= 0 or down.kind >= 0 or up.bias is not None or down.bias is not None or not experts.gated:
        return False
    return can_mix(x, up.arrays()[0], down.arrays()[0], top_k, **own)


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
        DEPTH=up.depth, **up.constants(), TOP_K=top_k, OUTPUTS=tile.outputs, BLOCK=_block(tile, up), STAGES=tile.stages,
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
        DEPTH=down.depth, **down.constants(), TOP_K=top_k, CHOICES=triton.next_power_of_2(top_k), OUTPUTS=tile.outputs,
        BLOCK=_block(tile, down), STAGES=tile.stages, HAS_BIAS=down.bias is not None,
        HAS_RESIDUAL=residual is not None, num_warps=tile.warps, **OVERLAPPED,
    )  # fmt: skip


def _block(tile: Tile, stack: Stack) -> int:
    """Columns that a program reads at once."""
    return int(max(min(tile.depth, triton.next_power_of_2(stack.depth)), stack.group))


def _mix_words(
    x: torch.Tensor,
    routing: Routing,
    experts: Experts,
    norm: Norm | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Few tokens and weights in MXFP4."""
    (tokens, top_k), (up, down) = routing.experts.shape, experts.prepared
    normed = torch.empty((tokens, up.depth), dtype=torch.float32, device=x.device)
    spread_kernel[(tokens,)](
        x.contiguous(), x if norm is None else norm.weight, normed, 0.0 if norm is None else norm.eps, DEPTH=up.depth,
        BLOCK=triton.next_power_of_2(up.depth), HAS_NORM=norm is not None, num_warps=8, **OVERLAPPED,
    )  # fmt: skip
    tile = up_tile(up.kind, up.depth)
    hidden = torch.empty((tokens * top_k, down.depth), dtype=torch.float32, device=x.device)
    up_words_kernel[(triton.cdiv(down.depth, tile.outputs), tokens * top_k)](
        normed, *up.arrays()[:2], x if up.bias is None else up.bias, routing.experts, hidden, down.depth,
        DEPTH=up.depth, NEXT_DEPTH=down.depth, TOP_K=top_k, OUTPUTS=tile.outputs, BLOCKS=_block(tile, up) // 32,
        UNROLLED=tile.stages, HAS_BIAS=up.bias is not None, ACTIVATION=ACTIVATIONS[experts.activation],
        num_warps=tile.warps, **OVERLAPPED,
    )  # fmt: skip
    tile = down_tile(down.kind, down.depth)
    down_words_kernel[(triton.cdiv(down.outputs, 2), tokens)](
        hidden, *down.arrays()[:2], x if down.bias is None else down.bias, x if residual is None else residual,
        routing.experts, routing.weights, out, down.outputs,
        DEPTH=down.depth, TOP_K=top_k, CHOICES=triton.next_power_of_2(top_k), BLOCKS=_block(tile, down) // 32,
        UNROLLED=tile.stages, HAS_BIAS=down.bias is not None, HAS_RESIDUAL=residual is not None, num_warps=tile.warps,
        **OVERLAPPED,
    )  # fmt: skip


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
    depth = max(tile.depth, stack.group)
    weight, halves, raw = stack.arrays()
    source: Any = weight
    described = stack.kind < 0 and x.dtype == weight.dtype and can_be_described(weight)
    if described:
        source = describe(weight, tile.outputs, depth)
    grouped_kernel[(triton.cdiv(outputs, tile.outputs), len(tiles.expert))](
        x, source, halves, raw, x if stack.bias is None else stack.bias, tiles.pairs, shares, tiles.expert,
        tiles.begin, tiles.end, out, stack.num_experts, outputs,
        DEPTH=stack.depth, **stack.constants(), TOP_K=top_k, FIRST=first is not None, GATED=gated,
        ACTIVATION=-1 if first is None else ACTIVATIONS[first.activation], HAS_BIAS=stack.bias is not None,
        ROWS=tiles.rows, OUTPUTS=tile.outputs, BLOCK=depth, STAGES=tile.stages, DESCRIBED=described,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
        **OVERLAPPED,
    )  # fmt: skip
