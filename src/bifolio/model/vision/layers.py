"""The layers of a tower, composed of the operations that the network of text uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bifolio.kernels.interface import (
    Array,
    AttentionShape,
    Batch,
    KernelSet,
    Linear,
    Norm,
    Rotation,
)
from bifolio.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class TowerLayer:
    """Attention that sees every patch, and an MLP; both have a norm before them and are added."""

    shape: AttentionShape
    attention_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    up: Linear  # gate and up, if the MLP is gated
    down: Linear
    activation: str
    gated: bool = False
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None

    def prepared(self, kernels: KernelSet) -> TowerLayer:
        def norm(value: Norm | None) -> Norm | None:
            return None if value is None else kernels.prepare_norm(value)

        return replace(
            self,
            shape=replace(
                self.shape,
                query_norm=norm(self.shape.query_norm),
                key_norm=norm(self.shape.key_norm),
                value_norm=norm(self.shape.value_norm),
            ),
            attention_norm=kernels.prepare_norm(self.attention_norm),
            qkv=kernels.prepare_linear(self.qkv),
            output=kernels.prepare_linear(self.output),
            mlp_norm=kernels.prepare_norm(self.mlp_norm),
            up=kernels.prepare_linear(self.up),
            down=kernels.prepare_linear(self.down),
            post_attention_norm=norm(self.post_attention_norm),
            post_mlp_norm=norm(self.post_mlp_norm),
        )

    def __call__(self, x: Array, rotation: Rotation | None, batch: Batch, kernels: KernelSet) -> Array:
        """[t, d] after the layer."""
        normed = kernels.norm(x, self.attention_norm)
        qkv = kernels.linear(normed, self.qkv)
        heads = kernels.rope_and_write(qkv, self.shape, rotation, batch, None)
        mixed = kernels.linear(kernels.attend(heads, self.shape, batch.segments, None), self.output)
        mixed = mixed if self.post_attention_norm is None else kernels.norm(mixed, self.post_attention_norm)
        x = kernels.add(x, mixed)
        up = kernels.linear(kernels.norm(x, self.mlp_norm), self.up)
        inner = kernels.act_mul(up, self.activation) if self.gated else kernels.act(up, self.activation)
        delta = kernels.linear(inner, self.down)
        delta = delta if self.post_mlp_norm is None else kernels.norm(delta, self.post_mlp_norm)
        return kernels.add(x, delta)

    def matrices(self) -> list[QuantizedTensor | Array]:
        return [*self.qkv.parts, *self.output.parts, *self.up.parts, *self.down.parts]


def pooled(x: Array, side: tuple[int, int], size: int, kernels: KernelSet) -> Array:
    """The mean of each square of `size` * `size` patches; x: [height * width, d], row by row."""
    parts = square_rows(side, size)
    total = kernels.take(x, kernels.from_host(parts[0]))
    for number, rows in enumerate(parts[1:], start=2):
        scale = 1.0 / len(parts) if number == len(parts) else 1.0
        total = kernels.add(total, kernels.take(x, kernels.from_host(rows)), scale)
    return total


def square_rows(side: tuple[int, int], size: int) -> list[np.ndarray]:
    """For each place in a square of `size` * `size` patches, the patches at this place: i64[squares]."""
    height, width = side
    grid = np.arange(height * width).reshape(height // size, size, width // size, size)
    return [grid[:, row, :, column].reshape(-1) for row in range(size) for column in range(size)]
