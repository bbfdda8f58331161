"""`StreamOperations` on torch tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bifolio.kernels.interface import Array, KernelSet, Norm
from bifolio.kernels.stream_interface import LEAST_MEAN_SQUARE


class TorchStreams:
    """A part of `TorchKernels`; means and standard deviations are computed in float32."""

    def add_scaled(self, x: Array, y: Array, scale: float) -> Array:
        return torch.add(x, y) * scale

    def embed_known(self, table: Any, ids: Array, scale: float) -> Array:
        return F.embedding(torch.where(ids < table.shape[0], ids, 0), table) * scale

    def norm_groups(self: KernelSet, x: Array, norm: Norm) -> Array:
        groups = x.unflatten(-1, (-1, norm.weight.shape[0]))
        return self.norm(groups, norm).flatten(-2)

    def columns(self, x: Array, start: int, width: int, factors: Array | None = None) -> Array:
        part = x.narrow(-1, start, width)
        return part if factors is None else (part * factors).to(x.dtype)

    def act_gate(self: KernelSet, x: Array, inputs: Array, start: int, activation: str) -> Array:
        return self.act(x, activation) * inputs.narrow(-1, start, x.shape[-1])

    def sparse_act_mul(self: KernelSet, x: Array, deviations: float, activation: str) -> Array:
        gate, up = x.chunk(2, dim=-1)
        spread, mean = torch.std_mean(gate.float(), dim=-1, keepdim=True, correction=0)
        kept = F.relu(gate - torch.addcmul(mean, spread, torch.full_like(spread, deviations)))
        return (self.act(kept, activation) * up).to(x.dtype)

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        factors = coefficients.unflatten(-1, (-1, streams)).to(x.dtype)
        return torch.bmm(factors, x.unflatten(-1, (streams, -1))).flatten(1)

    def correct_streams(self, x: Array, y: Array, coefficients: Array, active: int) -> Array:
        streams = x.unflatten(-1, (-1, y.shape[-1]))
        change = torch.einsum("tn,td->tnd", coefficients.to(x.dtype), (y - streams[:, active]).to(x.dtype))
        return (streams + change).flatten(1)

    def add_to_streams(self, x: Array, y: Array, first: int) -> Array:
        streams = x.unflatten(-1, (-1, y.shape[-1]))
        return torch.cat([streams[:, :first], streams[:, first:] + y.unsqueeze(1)], dim=1).flatten(1)

    def spread_streams(self, x: Array, y: Array) -> Array:
        return torch.cat([x, _matched(x, y).flatten(1)], dim=-1)

    def merge_streams(self, x: Array, y: Array) -> Array:
        return torch.cat([x.unsqueeze(1), _matched(x, y)], dim=1).mean(dim=1)


def _matched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[t, n, d]: the streams of y, scaled to the root mean square of x."""
    streams: torch.Tensor = torch.unflatten(y.float(), -1, (-1, x.shape[-1]))
    target = x.float().square().mean(dim=-1, keepdim=True).sqrt().unsqueeze(1)
    found = streams.square().mean(dim=-1, keepdim=True).clamp(min=LEAST_MEAN_SQUARE)
    matched: torch.Tensor = streams * target * found.rsqrt()
    return matched.to(x.dtype)
