"""Towers of images on a GPU: torch's operations, with the norms and rotations of all heads in one kernel each."""

from __future__ import annotations

import torch

from bifolio.kernels.interface import Array, AttentionShape, Batch, Heads, Norm, Rotation, Storage
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import cache
from bifolio.kernels.triton.norm import norm_rows


class TowerKernels(TorchKernels):
    """Heads of any size; results are in the type of the weights."""

    def norm(self, x: Array, norm: Norm) -> Array:
        rows = torch.reshape(x, (-1, norm.weight.shape[0]))
        return norm_rows(rows, norm, out_dtype=self.dtype)[1].reshape(x.shape)

    def rope_and_write(
        self, qkv: Array, shape: AttentionShape, rotation: Rotation | None, batch: Batch, storage: Storage | None
    ) -> Heads:
        """Patches are in no cache."""
        norms = (shape.query_norm, shape.key_norm, shape.value_norm)
        if rotation is None and all(norm is None for norm in norms):
            return super().rope_and_write(qkv, shape, rotation, batch, storage)
        return cache.rope_and_write(qkv, shape, rotation, None, None, self.dtype)
