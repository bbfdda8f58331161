"""Qwen3-VL and Qwen3.5: images in any size, positions by interpolation, 2-D rope, and squares of patches merged.

Features of some layers of the tower (deepstack) are added behind the first layers of the text network. The rope of text
has three positions for each token of an image: of its time, row and column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import RequestError
from bifolio.kernels.interface import Array, AttentionShape, Batch, KernelSet, Linear, Norm, Rotation, Routing
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.vision.decoding import resized
from bifolio.model.vision.layers import TowerLayer, grid_rotation, rope_frequencies
from bifolio.model.vision.processing import CLIP_MEAN, CLIP_STD, Processor
from bifolio.model.vision.resampling import BICUBIC
from bifolio.model.vision.tensors import TowerTensors
from bifolio.model.vision.tower import Cut, Fixed, Normalisation, Picture, Pixels, RowLayout, Vision
from bifolio.quant.tensor import QuantizedTensor

TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
PAD = "<|image_pad|>"
EPS, THETA = 1e-6, 10000.0
MOST_OBLONG = 200  # times as long as wide


class QwenSizes(NamedTuple):
    """The sizes of a tower."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    frames: int  # of a patch; an image is repeated
    merge: int  # patches of an edge of a square
    text_size: int
    side: int  # of the table of positions
    taps: tuple[int, ...]  # layers whose features are added to the text network

    @classmethod
    def read(cls, json: JsonObject) -> QwenSizes:
        if json.text("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise json.wrong("hidden_act", "gelu_pytorch_tanh")
        side = math.isqrt(json.count("num_position_embeddings", 2304, most=1 << 20))
        sizes = cls(
            json.count("hidden_size", 1152, most=1 << 16),
            json.count("intermediate_size", 4304, most=1 << 20),
            json.count("depth", 27, most=1024),
            json.count("num_heads", 16, most=1024),
            json.count("patch_size", 16, most=1 << 10),
            json.count("temporal_patch_size", 2, most=16),
            json.count("spatial_merge_size", 2, most=16),
            json.count("out_hidden_size", 3584, most=1 << 16),
            side,
            json.counts("deepstack_visual_indexes", least=0, most=1024),
        )
        if sizes.hidden_size % (4 * sizes.num_heads):
            raise json.wrong("num_heads", "a divisor of hidden_size / 4")
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVision(Vision):
    sizes: QwenSizes
    least_pixels: int
    most_pixels: int
    resample: int
    normalisation: Normalisation
    sections: tuple[int, ...]  # frequencies of each position, interleaved

    def picture(self, pixels: Pixels) -> Picture:
        pixels = resized(pixels, *self.fitting(*pixels.shape[:2]), self.resample)
        return Picture(PAD * self.num_rows(pixels), (pixels,))

    def fitting(self, height: int, width: int) -> tuple[int, int]:
        """The nearest size of whole squares, with a number of pixels that the model takes."""
        factor = self.sizes.patch_size * self.sizes.merge
        if max(height, width) > MOST_OBLONG * min(height, width):
            raise RequestError(
                f"the image has {width} x {height} pixels: send one at most {MOST_OBLONG} times as long as wide"
            )
        tall, wide = round(height / factor) * factor, round(width / factor) * factor
        if tall * wide > self.most_pixels:
            scale = math.sqrt((height * width) / self.most_pixels)
            return tuple(max(factor, math.floor(edge / scale / factor) * factor) for edge in (height, width))  # type: ignore[return-value]
        if tall * wide < self.least_pixels:
            scale = math.sqrt(self.least_pixels / (height * width))
            return tuple(math.ceil(edge * scale / factor) * factor for edge in (height, width))  # type: ignore[return-value]
        return tall, wide

    def largest(self, num_rows: int) -> tuple[int, int]:
        factor = self.sizes.patch_size * self.sizes.merge
        side = max(math.isqrt(min(num_rows, self.most_pixels // factor**2)), 1)
        return side * factor, side * factor

    def grid(self, pixels: Pixels) -> tuple[int, int]:
        factor = self.sizes.patch_size * self.sizes.merge
        return pixels.shape[0] // factor, pixels.shape[1] // factor

    def num_rows(self, pixels: Pixels) -> int:
        return math.prod(self.grid(pixels))

    def load(self, source: TowerTensors) -> QwenTower:
        sizes = self.sizes
        size, patch = sizes.hidden_size, sizes.patch_size
        stored = source.array("tower.patch_embed.proj.weight", (size, 3, sizes.frames, patch, patch))
        weight = stored.astype(np.float32).sum(axis=2).reshape(size, 3 * patch * patch)  # all frames are the image
        return QwenTower(
            self,
            Linear((weight,), (source.array("tower.patch_embed.proj.bias", (size,)),)),
            source.array("tower.pos_embed.weight", (sizes.side**2, size)),
            tuple(_layer(source, f"tower.blocks.{number}.", sizes) for number in range(sizes.num_layers)),
            _merger(source, "tower.merger.", sizes, size),
            tuple(
                _merger(source, f"tower.deepstack_merger_list.{number}.", sizes, size * sizes.merge**2)
                for number in range(len(sizes.taps))
            ),
        )


@dataclass(frozen=True, slots=True)
class Merger:
    """A square of patches as one row of the text network."""

    norm: Norm  # of a patch, or of the whole square
    first: Linear
    second: Linear

    def prepared(self, kernels: KernelSet) -> Merger:
        first, second = (kernels.prepare_linear(linear) for linear in (self.first, self.second))
        return Merger(kernels.prepare_norm(self.norm), first, second)

    def __call__(self, x: Array, kernels: KernelSet) -> Array:
        width = self.first.in_features
        of_square = self.norm.weight.shape[0] == width
        x = x.reshape(-1, width) if of_square else kernels.norm(x, self.norm).reshape(-1, width)
        x = kernels.norm(x, self.norm) if of_square else x
        return kernels.linear(kernels.act(kernels.linear(x, self.first), "gelu"), self.second)


@dataclass(frozen=True, slots=True)
class QwenTower:
    vision: QwenVision
    patches: Linear
    positions: Array  # f32[side * side, d]
    layers: tuple[TowerLayer, ...]
    merger: Merger
    tapped: tuple[Merger, ...]  # of the layers `taps`
    prepared_for: KernelSet | None = None

    @property
    def layout(self) -> RowLayout:
        return RowLayout(len(self.tapped), self.vision.sections)

    def prepared(self, kernels: KernelSet) -> QwenTower:
        if self.prepared_for is kernels:
            return self
        return replace(
            self,
            patches=kernels.prepare_linear(self.patches),
            positions=kernels.from_host(np.asarray(self.positions, np.float32)),
            layers=tuple(layer.prepared(kernels) for layer in self.layers),
            merger=self.merger.prepared(kernels),
            tapped=tuple(merger.prepared(kernels) for merger in self.tapped),
            prepared_for=kernels,
        )

    @property
    def cut(self) -> Cut:
        sizes = self.vision.sizes
        return Cut(sizes.patch_size, self.vision.normalisation.values, sizes.merge)

    def fixed(self, height: int, width: int, kernels: KernelSet) -> Fixed:
        sizes = self.vision.sizes
        height, width = height // sizes.patch_size, width // sizes.patch_size
        order = squares_first(height, width, sizes.merge)
        own = rope_frequencies(sizes.hidden_size // sizes.num_heads // 2, THETA)
        rotation = grid_rotation(order // width, order % width, (own, own), kernels)
        return interpolated(self.positions, sizes.side, height, width, order, kernels), *rotation

    def rows(self, values: Array, fixed: Fixed, batch: Batch, kernels: KernelSet) -> Array:
        sizes, (positions, cos, sin) = self.vision.sizes, fixed
        x = kernels.add(kernels.linear(values, self.patches), positions)
        found = []
        for number, layer in enumerate(self.layers):
            x = layer(x, Rotation(cos, sin), batch, kernels)
            if number in sizes.taps:
                found.append(self.tapped[sizes.taps.index(number)](x, kernels))
        size = sizes.text_size
        return kernels.join_columns([(rows, 0, size) for rows in (self.merger(x, kernels), *found)])

    def matrices(self) -> list[QuantizedTensor | Array]:
        mergers = [part for each in (self.merger, *self.tapped) for part in (*each.first.parts, *each.second.parts)]
        return [*self.patches.parts, self.positions, *(p for layer in self.layers for p in layer.matrices()), *mergers]


def squares_first(height: int, width: int, merge: int) -> NDArray[np.int64]:
    """i64[patches]: the patches square by square, each row by row."""
    grid = np.arange(height * width).reshape(height // merge, merge, width // merge, merge)
    return np.ascontiguousarray(grid.transpose(0, 2, 1, 3)).reshape(-1)


def interpolated(
    table: Array, side: int, height: int, width: int, order: NDArray[np.int64], kernels: KernelSet
) -> Array:
    """[patches, d]: the table [side * side, d] stretched over a grid, corner to corner; its places in this order."""

    def taps(count: int, places: NDArray[np.int64]) -> list[tuple[np.ndarray, np.ndarray]]:
        at = np.linspace(0, side - 1, count, dtype=np.float32)[places]
        low = np.clip(np.floor(at).astype(np.int64), 0, side - 1)
        share = (at - low).astype(np.float32)
        return [(low, 1 - share), (np.minimum(low + 1, side - 1), share)]

    total = None
    for row, down in taps(height, order // width):
        for column, along in taps(width, order % width):
            weights = Routing(None, kernels.from_host((down * along)[:, None].astype(np.float32)))
            part = kernels.weigh(kernels.take(table, kernels.from_host(row * side + column)), weights)
            total = part if total is None else kernels.add(total, part)
    return total


def _layer(source: TowerTensors, name: str, sizes: QwenSizes) -> TowerLayer:
    size, inner, heads = sizes.hidden_size, sizes.intermediate_size, sizes.num_heads
    head = size // heads
    return TowerLayer(
        AttentionShape(0, heads, heads, head, head**-0.5),
        source.norm(f"{name}norm1", size, EPS, centered=True),
        source.linear(f"{name}attn.qkv", rows=3 * size, columns=size),
        source.linear(f"{name}attn.proj", rows=size, columns=size),
        source.norm(f"{name}norm2", size, EPS, centered=True),
        source.linear(f"{name}mlp.linear_fc1", rows=inner, columns=size),
        source.linear(f"{name}mlp.linear_fc2", rows=size, columns=inner),
        "gelu_tanh",
    )


def _merger(source: TowerTensors, name: str, sizes: QwenSizes, normed: int) -> Merger:
    width = sizes.hidden_size * sizes.merge**2
    return Merger(
        source.norm(f"{name}norm", normed, EPS, centered=True),
        source.linear(f"{name}linear_fc1", rows=width, columns=width),
        source.linear(f"{name}linear_fc2", rows=sizes.text_size, columns=width),
    )


def read(config: JsonObject, processor: JsonObject) -> QwenVision:
    """The processing and the sizes of a folder."""
    sizes = QwenSizes.read(config.needed_object("vision_config"))
    usual = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    found = Processor(processor, resample=BICUBIC, image_mean=list(CLIP_MEAN), image_std=list(CLIP_STD), size=usual)
    json, size = found.json, found.size()
    rope = config.needed_object("text_config").object("rope_parameters")
    rope = rope or config.needed_object("text_config").object("rope_scaling")
    sections = rope.counts("mrope_section", least=0, most=1 << 12) or (24, 20, 20)
    if len(sections) != 3:
        raise rope.wrong("mrope_section", "three numbers")
    return QwenVision(
        name="qwen3vl",
        placeholder=PAD,
        row_token=config.count("image_token_id", 151655),
        sizes=sizes,
        least_pixels=json.count("min_pixels", size.count("shortest_edge", usual["shortest_edge"])),
        most_pixels=json.count("max_pixels", size.count("longest_edge", usual["longest_edge"])),
        resample=found.resample,
        normalisation=found.normalisation(),
        sections=sections,
    )
