"""`StreamOperations` of the GPU set: torch's functions on values that may be deferred."""

from __future__ import annotations

from typing import Any

import torch

from bifolio.kernels.interface import Array, Norm
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import quantised
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.lookup import embed_rows
from bifolio.kernels.triton.quantised import QuantisedWeight


class TritonStreams:
    """A part of `TritonKernels`."""

    _torch: TorchKernels

    def add_scaled(self, x: Array, y: Array, scale: float) -> Array:
        return self._torch.add_scaled(tensor(x), tensor(y), scale)

    def embed_known(self, table: Any, ids: Array, scale: float) -> Array:
        known = torch.where(ids < table.shape[0], ids, 0)
        if isinstance(table, QuantisedWeight):
            return quantised.dequantise(table, torch.float32, rows=known, factor=scale)
        return embed_rows(table, known, scale)

    def norm_groups(self, x: Array, norm: Norm) -> Array:
        return self._torch.norm_groups(tensor(x), norm)

    def columns(self, x: Array, start: int, width: int, factors: Array | None = None) -> Array:
        return self._torch.columns(tensor(x), start, width, factors).contiguous()

    def act_gate(self, x: Array, inputs: Array, start: int, activation: str) -> Array:
        return self._torch.act_gate(tensor(x), tensor(inputs), start, activation)

    def sparse_act_mul(self, x: Array, deviations: float, activation: str) -> Array:
        return self._torch.sparse_act_mul(tensor(x), deviations, activation)

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        return self._torch.mix_streams(tensor(x), tensor(coefficients), streams)

    def correct_streams(self, x: Array, y: Array, coefficients: Array, active: int) -> Array:
        return self._torch.correct_streams(tensor(x), tensor(y), tensor(coefficients), active)

    def add_to_streams(self, x: Array, y: Array, first: int) -> Array:
        return self._torch.add_to_streams(tensor(x), tensor(y), first)

    def spread_streams(self, x: Array, y: Array) -> Array:
        return self._torch.spread_streams(tensor(x), tensor(y))

    def merge_streams(self, x: Array, y: Array) -> Array:
        return self._torch.merge_streams(tensor(x), tensor(y))
