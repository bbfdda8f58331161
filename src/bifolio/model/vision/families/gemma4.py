"""Gemma 4: images near their own shape, positions by row and column, 2-D rope, and the mean of neighbouring patches.

The models called "unified" have no tower: large patches are projected and get positions. In the larger models the
tokens of an image see each other in both directions, in layers with a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import RequestError
from bifolio.kernels.interface import Array, Batch, KernelSet, Linear, Norm, Rotation
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.vision.decoding import resized
from bifolio.model.vision.gemma4_layers import Gemma4Sizes, Positions, channels_first, tower_layer
from bifolio.model.vision.layers import TowerLayer, grid_rotation, pooled, rope_frequencies, square_rows
from bifolio.model.vision.processing import Processor
from bifolio.model.vision.resampling import BICUBIC
from bifolio.model.vision.tensors import TowerTensors
from bifolio.model.vision.tower import Cut, Fixed, Normalisation, Picture, Pixels, RowLayout, Tower, Vision
from bifolio.quant.tensor import QuantizedTensor

UNIFIED = "gemma4_unified"
TYPES = ("gemma4", UNIFIED)
BEGIN, ROW, END = "<|image>", "<|image|>", "<image|>"
PATCH_EPS = 1e-5  # of the layer norms of models without a tower


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Vision(Vision):
    sizes: Gemma4Sizes
    text_size: int
    most_rows: int  # of an image
    input_token: int | None  # whose second embedding rows have
    resample: int
    normalisation: Normalisation

    def picture(self, pixels: Pixels) -> Picture:
        pixels = resized(pixels, *self.fitting(*pixels.shape[:2]), self.resample)
        return Picture(f"{BEGIN}{ROW * self.num_rows(pixels)}{END}", (pixels,))

    def fitting(self, height: int, width: int) -> tuple[int, int]:
        """The largest size of the same shape in whole squares that has as many rows as the model takes, or fewer."""
        square, patch = self.sizes.square, self.sizes.patch_size
        factor = math.sqrt(self.most_rows * self.sizes.pool**2 * patch**2 / (height * width))
        tall, wide = (math.floor(factor * edge / square) * square for edge in (height, width))
        if not tall and not wide:
            raise RequestError(f"the image has {width} x {height} pixels, which are too many in one direction")
        if not tall:
            return square, min(width // height, self.most_rows) * square
        return (tall, wide) if wide else (min(height // width, self.most_rows) * square, square)

    def num_rows(self, pixels: Pixels) -> int:
        return math.prod(edge // self.sizes.square for edge in pixels.shape[:2])

    def largest(self, num_rows: int) -> tuple[int, int]:
        return self.sizes.square, max(min(num_rows, self.most_rows), 1) * self.sizes.square

    @property
    def layout(self) -> RowLayout:
        return RowLayout(input_token=self.input_token, windows_only=self.both_ways)

    def load(self, source: TowerTensors) -> Tower:
        return _tower(source, self) if self.sizes.num_layers else _projection(source, self)

    def places(self, height: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The columns and the rows of the patches of a tile."""
        height, width = height // self.sizes.patch_size, width // self.sizes.patch_size
        rows, columns = np.divmod(np.arange(height * width), width)
        return columns, rows


@dataclass(frozen=True, slots=True)
class Gemma4Tower:
    vision: Gemma4Vision
    input: Linear
    positions: Positions
    layers: tuple[TowerLayer, ...]
    scale: Array | None  # f32[d] of pooled values; None: the norm does without
    shift: Array | None  # f32[1, d]
    norm: Norm
    projection: Linear
    prepared_for: KernelSet | None = None

    @property
    def layout(self) -> RowLayout:
        return self.vision.layout

    def prepared(self, kernels: KernelSet) -> Gemma4Tower:
        if self.prepared_for is kernels:
            return self
        return replace(
            self,
            input=kernels.prepare_linear(self.input),
            positions=self.positions.prepared(kernels),
            layers=tuple(layer.prepared(kernels) for layer in self.layers),
            scale=None if self.scale is None else kernels.from_host(self.scale),
            shift=None if self.shift is None else kernels.from_host(self.shift),
            norm=kernels.prepare_norm(self.norm),
            projection=kernels.prepare_linear(self.projection),
            prepared_for=kernels,
        )

    @property
    def cut(self) -> Cut:
        values = self.vision.normalisation.values
        return Cut(self.vision.sizes.patch_size, 2 * (values - np.float32(0.5)))

    def fixed(self, height: int, width: int, kernels: KernelSet) -> Fixed:
        sizes, (columns, rows) = self.vision.sizes, self.vision.places(height, width)
        own = rope_frequencies(sizes.head_dim // 2, sizes.theta)
        rotation = grid_rotation(columns, rows, (own, own), kernels)
        parts = square_rows(height // sizes.patch_size, width // sizes.patch_size, sizes.pool, kernels)
        first = kernels.from_host(np.zeros(parts[0].shape[0], np.int64))
        return kernels.from_host(columns), kernels.from_host(rows), *rotation, first, *parts

    def rows(self, values: Array, fixed: Fixed, batch: Batch, kernels: KernelSet) -> Array:
        sizes, (columns, rows, cos, sin, first, *parts) = self.vision.sizes, fixed
        x = self.positions.added(kernels.linear(values, self.input), columns, rows, kernels)
        for layer in self.layers:
            x = layer(x, Rotation(cos, sin), batch, kernels)
        x = pooled(x, tuple(parts), kernels)
        if self.scale is not None and self.shift is not None:
            copies = kernels.take(self.shift, first)
            x = kernels.add(kernels.join_columns([(x, 0, sizes.hidden_size)], self.scale), copies)
        return kernels.linear(kernels.norm(x, self.norm), self.projection)

    def matrices(self) -> list[QuantizedTensor | Array]:
        found = [*self.input.parts, self.positions.by_column, self.positions.by_row, *self.projection.parts]
        return [*found, *(part for layer in self.layers for part in layer.matrices())]


@dataclass(frozen=True, slots=True)
class Gemma4Projection:
    """In place of a tower: each patch is normed and projected, and gets positions."""

    vision: Gemma4Vision
    norms: tuple[Norm, Norm, Norm, Norm]  # of values, of products, with positions, before the last product
    input: Linear
    positions: Positions
    projection: Linear
    prepared_for: KernelSet | None = None

    @property
    def layout(self) -> RowLayout:
        return self.vision.layout

    def prepared(self, kernels: KernelSet) -> Gemma4Projection:
        if self.prepared_for is kernels:
            return self
        first, second, third, last = (kernels.prepare_norm(norm) for norm in self.norms)
        return replace(
            self,
            norms=(first, second, third, last),
            input=kernels.prepare_linear(self.input),
            positions=self.positions.prepared(kernels),
            projection=kernels.prepare_linear(self.projection),
            prepared_for=kernels,
        )

    @property
    def cut(self) -> Cut:
        return Cut(self.vision.sizes.patch_size, self.vision.normalisation.values)

    def fixed(self, height: int, width: int, kernels: KernelSet) -> Fixed:
        return tuple(kernels.from_host(each) for each in self.vision.places(height, width))

    def rows(self, values: Array, fixed: Fixed, batch: Batch, kernels: KernelSet) -> Array:
        of_values, of_products, of_places, last = self.norms
        columns, rows = fixed
        x = kernels.linear(kernels.norm(values, of_values), self.input)
        x = self.positions.added(kernels.norm(x, of_products), columns, rows, kernels)
        return kernels.linear(kernels.norm(kernels.norm(x, of_places), last), self.projection)

    def matrices(self) -> list[QuantizedTensor | Array]:
        return [*self.input.parts, self.positions.by_column, self.positions.by_row, *self.projection.parts]


def _tower(source: TowerTensors, vision: Gemma4Vision) -> Gemma4Tower:
    sizes = vision.sizes
    size, root = sizes.hidden_size, math.sqrt(sizes.hidden_size)
    columns = 3 * sizes.patch_size**2
    weights = source.array("tower.patch_embedder.input_proj.weight", (size, columns))
    tables = source.array("tower.patch_embedder.position_embedding_table", (2, sizes.places, size))
    scale = shift = None
    if sizes.standardised:
        factors = source.array("tower.std_scale", (size,))
        scale = (factors * np.float32(root)).astype(np.float32)
        shift = (-source.array("tower.std_bias", (size,)) * factors).astype(np.float32)[None]
    eps = sizes.eps if sizes.standardised else sizes.eps / size  # pooled values are not multiplied by the root of d
    return Gemma4Tower(
        vision,
        Linear((weights[:, channels_first(sizes.patch_size)],), (None,)),
        Positions(*tables),
        tuple(tower_layer(source, f"tower.encoder.layers.{number}.", sizes) for number in range(sizes.num_layers)),
        scale,
        shift,
        Norm(np.ones(size, np.float32), None, eps),
        source.linear("embed_vision.embedding_projection", rows=vision.text_size, columns=size),
    )


def _projection(source: TowerTensors, vision: Gemma4Vision) -> Gemma4Projection:
    sizes = vision.sizes
    size, columns, name = sizes.hidden_size, 3 * sizes.patch_size**2, "tower."
    order = channels_first(sizes.patch_size)
    weights = source.array(f"{name}patch_dense.weight", (size, columns))[:, order]
    bias = source.array(f"{name}patch_dense.bias", (size,))
    first = source.norm(f"{name}patch_ln1", columns, PATCH_EPS, centered=True)
    tables = source.array(f"{name}pos_embedding", (sizes.places, 2, size))
    return Gemma4Projection(
        vision,
        (
            replace(first, weight=first.weight[order], bias=None if first.bias is None else first.bias[order]),
            source.norm(f"{name}patch_ln2", size, PATCH_EPS, centered=True),
            source.norm(f"{name}pos_norm", size, PATCH_EPS, centered=True),
            Norm(np.ones(size, np.float32), None, sizes.eps),
        ),
        Linear((weights,), (bias,)),
        Positions(*(np.ascontiguousarray(tables[:, axis]) for axis in range(2))),
        source.linear("embed_vision.embedding_projection", rows=vision.text_size, columns=size),
    )


def read(config: JsonObject, processor: JsonObject) -> Gemma4Vision:
    """The processing and the sizes of a folder."""
    is_unified = config.get("model_type") == UNIFIED
    own, text = config.needed_object("vision_config"), config.needed_object("text_config")
    sizes = Gemma4Sizes.read_unified(own) if is_unified else Gemma4Sizes.read(own)
    found = Processor(processor, resample=BICUBIC, do_normalize=False)
    for field, usual in (("patch_size", 16), ("pooling_kernel_size", 3)):
        if found.json.count(field, usual) != own.count(field, usual):
            raise found.json.wrong(field, f"{own.count(field, usual)}, as vision_config has it")
    most_rows = found.json.count("max_soft_tokens", 280, most=1 << 16)
    if most_rows * sizes.pool > sizes.places:
        raise found.json.wrong("max_soft_tokens", f"at most {sizes.places // sizes.pool}, as there are positions")
    has_inputs = not is_unified and text.count("hidden_size_per_layer_input", 256, least=0) > 0
    both_ways = text.text("use_bidirectional_attention", "vision" if is_unified else "")
    return Gemma4Vision(
        name="gemma4",
        placeholder=ROW,
        row_token=config.count("image_token_id", 258880),
        both_ways=both_ways == "vision",
        sizes=sizes,
        text_size=text.count("hidden_size", 2304),
        most_rows=most_rows,
        input_token=text.count("pad_token_id", 0, least=0) if has_inputs else None,
        resample=found.resample,
        normalisation=found.normalisation(),
    )
