"""Pixtral of Mistral 3: images in any size up to a longest edge, 2-D rope, and squares of patches merged.

The rows of an image lie between tokens that end its lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import UnsupportedModelError
from bifolio.kernels.interface import Array, AttentionShape, Batch, KernelSet, Linear, Norm, Rotation
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.vision.decoding import resized
from bifolio.model.vision.layers import TowerLayer, grid_rotation, rope_frequencies, square_rows
from bifolio.model.vision.processing import CLIP_MEAN, CLIP_STD, Processor
from bifolio.model.vision.resampling import BICUBIC
from bifolio.model.vision.tensors import TowerTensors
from bifolio.model.vision.tower import PLAIN_ROWS, Cut, Fixed, Normalisation, Picture, Pixels, RowLayout, Vision
from bifolio.quant.tensor import QuantizedTensor

TYPES = ("mistral3",)
ROW, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
EPS = 1e-5
ACTIVATIONS = {"gelu": "gelu", "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class PixtralSizes(NamedTuple):
    """The sizes of a tower."""

    hidden_size: int
    intermediate_size: int
    num_layers: int  # that rows are read from
    num_heads: int
    patch_size: int
    theta: float
    activation: str

    @classmethod
    def read(cls, json: JsonObject, tap: int) -> PixtralSizes:
        """`tap`: the layer whose output is read, from the end if it is negative."""
        count = json.count("num_hidden_layers", 24, most=1024)
        layers = tap if tap >= 0 else count + 1 + tap
        if not 0 <= layers <= count:
            raise UnsupportedModelError(f"{json.path}: vision_feature_layer is {tap}, and the tower has {count} layers")
        theta = json.object("rope_parameters").number("rope_theta", json.number("rope_theta", 10000.0))
        sizes = cls(
            json.count("hidden_size", 1024, most=1 << 16),
            json.count("intermediate_size", 4096, most=1 << 20),
            layers,
            json.count("num_attention_heads", 16, most=1024),
            json.count("patch_size", 16, most=1 << 10),
            theta,
            activation_of(json, "hidden_act"),
        )
        if sizes.hidden_size % (4 * sizes.num_heads):
            raise json.wrong("num_attention_heads", "a divisor of hidden_size / 4")
        return sizes

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def activation_of(json: JsonObject, field: str) -> str:
    name = json.text(field, "gelu")
    if name not in ACTIVATIONS:
        raise json.wrong(field, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralVision(Vision):
    sizes: PixtralSizes
    text_size: int
    text_eps: float
    merge: int  # patches of an edge of a square
    activation: str  # of the projection
    height: int  # the most of an image
    width: int
    resample: int
    normalisation: Normalisation

    def picture(self, pixels: Pixels) -> Picture:
        pixels = resized(pixels, *self.fitting(*pixels.shape[:2]), self.resample)
        lines, rows = (edge // self.square for edge in pixels.shape[:2])
        return Picture(BREAK.join([ROW * rows] * lines) + END, (pixels,))

    def fitting(self, height: int, width: int) -> tuple[int, int]:
        """The size in whole squares, at least as large, of an image made as small as the model takes it."""
        ratio = max(height / self.height, width / self.width)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        tall, wide = ((edge - 1) // self.square + 1 for edge in (height, width))
        return max(tall, 1) * self.square, max(wide, 1) * self.square

    @property
    def square(self) -> int:
        """Pixels of an edge of a row's square."""
        return self.sizes.patch_size * self.merge

    def num_rows(self, pixels: Pixels) -> int:
        return math.prod(edge // self.square for edge in pixels.shape[:2])

    def largest(self, num_rows: int) -> tuple[int, int]:
        edges = (-(-edge // self.square) for edge in (self.height, self.width))
        side = max(math.isqrt(num_rows), 1)
        tall, wide = (min(side, edge) for edge in edges)
        return tall * self.square, wide * self.square

    def load(self, source: TowerTensors) -> PixtralTower:
        sizes, name = self.sizes, "multi_modal_projector."
        size, patch = sizes.hidden_size, sizes.patch_size
        merged = source.view(f"{name}patch_merger.merging_layer.weight", (size, size * self.merge**2))
        first, second = (
            source.linear(f"{name}linear_{number}", rows=self.text_size, columns=columns)
            for number, columns in ((1, size), (2, self.text_size))
        )
        return PixtralTower(
            self,
            source.patches("tower.patch_conv", size, 3 * patch * patch, (size, 3, patch, patch)),
            source.norm("tower.ln_pre", size, EPS),
            tuple(_layer(source, f"tower.transformer.layers.{number}.", sizes) for number in range(sizes.num_layers)),
            source.norm(f"{name}norm", size, self.text_eps),
            Linear((_places_first(merged.dequantize(), size),), (None,)),
            first,
            second,
        )


@dataclass(frozen=True, slots=True)
class PixtralTower:
    vision: PixtralVision
    patches: Linear
    norm: Norm
    layers: tuple[TowerLayer, ...]
    merge_norm: Norm
    merger: Linear
    first: Linear
    second: Linear
    prepared_for: KernelSet | None = None

    @property
    def layout(self) -> RowLayout:
        return PLAIN_ROWS

    def prepared(self, kernels: KernelSet) -> PixtralTower:
        if self.prepared_for is kernels:
            return self
        return replace(
            self,
            patches=kernels.prepare_linear(self.patches),
            norm=kernels.prepare_norm(self.norm),
            layers=tuple(layer.prepared(kernels) for layer in self.layers),
            merge_norm=kernels.prepare_norm(self.merge_norm),
            merger=kernels.prepare_linear(self.merger),
            first=kernels.prepare_linear(self.first),
            second=kernels.prepare_linear(self.second),
            prepared_for=kernels,
        )

    @property
    def cut(self) -> Cut:
        return Cut(self.vision.sizes.patch_size, self.vision.normalisation.values)

    def fixed(self, height: int, width: int, kernels: KernelSet) -> Fixed:
        sizes = self.vision.sizes
        height, width = height // sizes.patch_size, width // sizes.patch_size
        rotation = grid_rotation(*np.divmod(np.arange(height * width), width), pixtral_frequencies(sizes), kernels)
        return *rotation, *square_rows(height, width, self.vision.merge, kernels)

    def rows(self, values: Array, fixed: Fixed, batch: Batch, kernels: KernelSet) -> Array:
        vision, (cos, sin, *places) = self.vision, fixed
        x = kernels.norm(kernels.linear(values, self.patches), self.norm)
        for layer in self.layers:
            x = layer(x, Rotation(cos, sin), batch, kernels)
        x = kernels.norm(x, self.merge_norm)
        joined = kernels.join_columns([(kernels.take(x, rows), 0, vision.sizes.hidden_size) for rows in places])
        merged = kernels.linear(kernels.linear(joined, self.merger), self.first)
        return kernels.linear(kernels.act(merged, vision.activation), self.second)

    def matrices(self) -> list[QuantizedTensor | Array]:
        linears = (self.patches, self.merger, self.first, self.second)
        return [
            *(part for linear in linears for part in linear.parts),
            *(part for layer in self.layers for part in layer.matrices()),
        ]


def pixtral_frequencies(sizes: PixtralSizes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rows rotate by every second frequency from the first on, columns by the others."""
    found = rope_frequencies(sizes.head_dim, sizes.theta)
    return found[0::2], found[1::2]


def _places_first(weights: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """[d, places * d] of a matrix whose columns are ordered by value, then by place in a square."""
    return np.ascontiguousarray(weights.reshape(size, size, -1).transpose(0, 2, 1)).reshape(size, -1)


def _layer(source: TowerTensors, name: str, sizes: PixtralSizes) -> TowerLayer:
    size, inner, heads = sizes.hidden_size, sizes.intermediate_size, sizes.num_heads
    return TowerLayer(
        AttentionShape(0, heads, heads, sizes.head_dim, sizes.head_dim**-0.5),
        source.norm(f"{name}attention_norm", size, EPS),
        source.linear(*(f"{name}attention.{part}_proj" for part in "qkv"), rows=size, columns=size),
        source.linear(f"{name}attention.o_proj", rows=size, columns=size),
        source.norm(f"{name}ffn_norm", size, EPS),
        source.linear(*(f"{name}feed_forward.{part}_proj" for part in ("gate", "up")), rows=inner, columns=size),
        source.linear(f"{name}feed_forward.down_proj", rows=size, columns=inner),
        sizes.activation,
        gated=True,
    )


def read(config: JsonObject, processor: JsonObject) -> PixtralVision:
    """The processing and the sizes of a folder."""
    tap = config.get("vision_feature_layer")
    if not isinstance(tap, int | None):
        raise UnsupportedModelError(f"{config.path}: rows from several layers (vision_feature_layer) are not supported")
    sizes = PixtralSizes.read(config.needed_object("vision_config"), -1 if tap is None else tap)
    text = config.needed_object("text_config")
    usual = {"size": {"longest_edge": 1024}, "image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD)}
    found = Processor(processor, resample=BICUBIC, **usual)
    size = found.size()
    longest = size.count("longest_edge", 0, least=0)
    height, width = (longest or size.count(name) for name in ("height", "width"))
    return PixtralVision(
        name="pixtral",
        placeholder=ROW,
        row_token=config.count("image_token_index", config.count("image_token_id", 10)),
        sizes=sizes,
        text_size=text.count("hidden_size", 5120),
        text_eps=text.number("rms_norm_eps", 1e-5),
        merge=config.count("spatial_merge_size", 2, most=16),
        activation=activation_of(config, "projector_hidden_act"),
        height=height,
        width=width,
        resample=found.resample,
        normalisation=found.normalisation(),
    )
