"""One attention layer over the paged cache: project, rotate and write, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.kernels.interface import Array, Batch, KernelSet, Rotation, Storage
from bifolio.model.weights import LayerWeights


@dataclass(frozen=True, slots=True, eq=False)  # the compiler of torch wants to hash it before it is filled
class PagedAttentionLayer:
    """The attention half of a transformer layer. Blocks were allocated before; a layer never allocates."""

    weights: LayerWeights

    def __call__(
        self, x: Array, batch: Batch, kernels: KernelSet, storage: Storage | None, rotations: tuple[Rotation, ...]
    ) -> Array:
        layer = self.weights
        rotation = None if layer.rope is None else rotations[layer.rope]
        qkv = kernels.linear(x, layer.qkv)
        heads = kernels.rope_and_write(qkv, layer.shape, rotation, batch, storage)
        mixed = kernels.attend(heads, layer.shape, batch.segments, storage)
        return kernels.linear(mixed, layer.output)
