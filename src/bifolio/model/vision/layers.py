"""The layers of a tower, composed of the operations that the network of text uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

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


class Bounds(NamedTuple):
    """The least and the most of each column: f32[columns] each."""

    least: Array
    most: Array

    def prepared(self, kernels: KernelSet) -> Bounds:
        return Bounds(*(kernels.from_host(array) for array in self))


@dataclass(frozen=True, slots=True)
class Clipped:
    """Products of one input, side by side, whose inputs and outputs are kept between bounds."""

    parts: tuple[tuple[Bounds, Linear], ...]  # matrices whose inputs have equal bounds are one
    outputs: Bounds

    def prepared(self, kernels: KernelSet) -> Clipped:
        parts = ((bounds.prepared(kernels), kernels.prepare_linear(linear)) for bounds, linear in self.parts)
        return Clipped(tuple(parts), self.outputs.prepared(kernels))

    def __call__(self, x: Array, kernels: KernelSet) -> Array:
        found = [kernels.linear(kernels.clamp(x, *bounds), linear) for bounds, linear in self.parts]
        joined = kernels.join_columns([(part, 0, part.shape[1]) for part in found]) if len(found) > 1 else found[0]
        return kernels.clamp(joined, *self.outputs)

    def matrices(self) -> list[QuantizedTensor | Array]:
        return [part for _, linear in self.parts for part in linear.parts]


Product: TypeAlias = Linear | Clipped


def product(x: Array, weights: Product, kernels: KernelSet) -> Array:
    return weights(x, kernels) if isinstance(weights, Clipped) else kernels.linear(x, weights)


def prepared_product(weights: Product, kernels: KernelSet) -> Product:
    return weights.prepared(kernels) if isinstance(weights, Clipped) else kernels.prepare_linear(weights)


@dataclass(frozen=True, slots=True)
class TowerLayer:
    """Attention that sees every patch, and an MLP; both have a norm before them and are added."""

    shape: AttentionShape
    attention_norm: Norm
    qkv: Product
    output: Product
    mlp_norm: Norm
    up: Product  # gate and up, if the MLP is gated
    down: Product
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
            qkv=prepared_product(self.qkv, kernels),
            output=prepared_product(self.output, kernels),
            mlp_norm=kernels.prepare_norm(self.mlp_norm),
            up=prepared_product(self.up, kernels),
            down=prepared_product(self.down, kernels),
            post_attention_norm=norm(self.post_attention_norm),
            post_mlp_norm=norm(self.post_mlp_norm),
        )

    def __call__(self, x: Array, rotation: Rotation | None, batch: Batch, kernels: KernelSet) -> Array:
        """[t, d] after the layer."""
        normed = kernels.norm(x, self.attention_norm)
        qkv = product(normed, self.qkv, kernels)
        heads = kernels.rope_and_write(qkv, self.shape, rotation, batch, None)
        mixed = product(kernels.attend(heads, self.shape, batch.segments, None), self.output, kernels)
        mixed = mixed if self.post_attention_norm is None else kernels.norm(mixed, self.post_attention_norm)
        x = kernels.add(x, mixed)
        up = product(kernels.norm(x, self.mlp_norm), self.up, kernels)
        inner = kernels.act_mul(up, self.activation) if self.gated else kernels.act(up, self.activation)
        delta = product(inner, self.down, kernels)
        delta = delta if self.post_mlp_norm is None else kernels.norm(delta, self.post_mlp_norm)
        return kernels.add(x, delta)

    def matrices(self) -> list[QuantizedTensor | Array]:
        products = (self.qkv, self.output, self.up, self.down)
        return [part for each in products for part in (each.matrices() if isinstance(each, Clipped) else each.parts)]


def grid_rotation(
    first: NDArray[np.int64],  # i64[patches]
    second: NDArray[np.int64],
    frequencies: tuple[NDArray[np.float32], NDArray[np.float32]],
    kernels: KernelSet,
) -> Rotation:
    """The first pairs of a head are rotated by the first position of a patch, the others by its second."""
    both = zip((first, second), frequencies, strict=True)
    angles = np.concatenate([places.astype(np.float32)[:, None] * own for places, own in both], axis=1)
    return Rotation(kernels.from_host(np.cos(angles)), kernels.from_host(np.sin(angles)))


def rope_frequencies(size: int, theta: float) -> NDArray[np.float32]:
    """f32[size / 2]: of the pairs of `size` dimensions."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.asarray(1.0 / np.power(np.float32(theta), exponents), np.float32)


def pooled(x: Array, parts: tuple[Array, ...], kernels: KernelSet) -> Array:
    """The mean of each square of patches; x: [height * width, d], row by row; parts: of `square_rows`."""
    total = kernels.take(x, parts[0])
    for number, rows in enumerate(parts[1:], start=2):
        scale = 1.0 / len(parts) if number == len(parts) else 1.0
        total = kernels.add(total, kernels.take(x, rows), scale)
    return total


def square_rows(height: int, width: int, size: int, kernels: KernelSet) -> tuple[Array, ...]:
    """For each place in a square of `size` * `size` patches, the patches at this place: i64[squares]."""
    grid = np.arange(height * width).reshape(height // size, size, width // size, size)
    parts = (grid[:, row, :, column].reshape(-1) for row in range(size) for column in range(size))
    return tuple(kernels.from_host(part) for part in parts)
