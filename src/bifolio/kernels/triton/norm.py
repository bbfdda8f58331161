# mypy: disallow-untyped-decorators=False
"""RMS norm and layer norm, alone or fused with the addition before them; activations of the MLP; gates.

One program per row: a row is read once and written once, with all fused operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Norm
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu2": 3, "swiglu_clamped": 4, "silu_clamped": 5}


@triton.jit
def _norm_kernel(
    x: tl.tensor,  # [rows, columns]
    delta: tl.tensor,  # the same; added to x first
    weight: tl.tensor,  # [columns]
    bias: tl.tensor,  # f32[columns]
    total: tl.tensor,  # [rows, columns]  x + delta
    out: tl.tensor,  # [rows, columns]
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    num_columns: tl.tensor,
    eps: tl.tensor,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs()
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        change = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + change.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * num_columns + columns, values, mask=inside)
    numbers = values.to(tl.float32)
    if CENTERED:
        numbers = tl.where(inside, numbers - tl.sum(numbers, axis=0) / num_columns, 0.0)
    spread = tl.sum(numbers * numbers, axis=0) / num_columns
    numbers = numbers * (1.0 / tl.sqrt(spread + eps))
    numbers = numbers * factor
    if HAS_BIAS:
        numbers = numbers + tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(out + row * num_columns + columns, numbers.to(out.dtype.element_ty), mask=inside)


def norm_rows(
    x: torch.Tensor, norm: Norm, delta: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, or x without a delta; its norm), each [rows, columns]."""
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=out_dtype or x.dtype, device=x.device)
    total = x if delta is None else torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if not rows:
        return total, out
    block = triton.next_power_of_2(columns)
    _norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        norm.weight,
        norm.weight if norm.bias is None else norm.bias,
        total,
        out,
        x.stride(0),
        x.stride(0) if delta is None else delta.stride(0),
        columns,
        norm.eps,
        HAS_DELTA=delta is not None,
        HAS_BIAS=norm.bias is not None,
        CENTERED=norm.centered,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **OVERLAPPED,
    )
    return total, out


@triton.jit
def activate(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """SiLU, GELU by tanh, exact GELU or squared ReLU of f32 values."""
    if ACTIVATION == 0:
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))  # 0.5 * (1 + tanh(inner)), without overflow
    if ACTIVATION == 3:
        positive = tl.maximum(x, 0.0)
        return positive * positive
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """The activation of an f32 gate times its up projection."""
    if ACTIVATION == 4:
        gate = tl.minimum(gate, 7.0)  # SWIGLU_LIMIT and SWIGLU_SLOPE
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    if ACTIVATION == 5:
        gate = tl.minimum(gate, 10.0)  # SILU_LIMIT
        up = tl.minimum(tl.maximum(up, -10.0), 10.0)
        return gate / (1.0 + tl.exp(-gate)) * up
    return activate(gate, ACTIVATION) * up


@triton.jit
def _act_mul_kernel(
    x: tl.tensor, out: tl.tensor, x_stride: tl.tensor, width: tl.tensor, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_inputs()
    gate = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, gated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=inside)


def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up for [rows, 2 * width], gate and up concatenated: [rows, width]."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    block = min(triton.next_power_of_2(width), 2048)
    grid = (triton.cdiv(width, block), rows)
    kind = ACTIVATIONS[activation]
    _act_mul_kernel[grid](x, out, x.stride(0), width, ACTIVATION=kind, BLOCK=block, num_warps=4, **OVERLAPPED)
    return out


@triton.jit
def _gate_kernel(
    x: tl.tensor,  # [rows, width]
    logits: tl.tensor,  # [rows, width / SIZE]
    out: tl.tensor,  # [rows, width]
    x_stride: tl.tensor,
    logit_stride: tl.tensor,
    width: tl.tensor,
    SIZE: tl.constexpr,  # values of one logit
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_inputs()
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    place = row * logit_stride + columns // SIZE
    opened = 1.0 / (1.0 + tl.exp(-tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)))
    result = opened.to(values.dtype).to(tl.float32) * values.to(tl.float32)
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


def gate(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """sigmoid(logits) * x by equal parts of rows, where the sigmoid is rounded to the dtype of x: [rows, width]."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    block = min(triton.next_power_of_2(width), 1024)
    _gate_kernel[(triton.cdiv(width, block), rows)](
        x, logits, out, x.stride(0), logits.stride(0), width, SIZE=width // logits.shape[1], BLOCK=block, num_warps=4,
        **OVERLAPPED,
    )  # fmt: skip
    return out
