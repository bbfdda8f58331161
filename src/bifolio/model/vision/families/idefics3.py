"""Idefics3 and SmolVLM: images are cut into tiles, which SigLIP reads one by one; squares of patches are joined."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import UnsupportedModelError
from bifolio.kernels.interface import Array, Batch, KernelSet, Linear
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.vision.decoding import resized
from bifolio.model.vision.layers import square_rows
from bifolio.model.vision.processing import Processor
from bifolio.model.vision.resampling import LANCZOS
from bifolio.model.vision.siglip import Siglip, SiglipSizes
from bifolio.model.vision.tensors import TowerTensors
from bifolio.model.vision.tower import PLAIN_ROWS, Cut, Fixed, Normalisation, Picture, Pixels, RowLayout, Vision
from bifolio.quant.tensor import QuantizedTensor

TYPES = ("smolvlm", "idefics3")
ROW, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
LONGEST_EDGE = 4096  # of any image
DEFAULTS = {"hidden_size": 1152, "image_size": 224, "patch_size": 32, "num_attention_heads": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Vision(Vision):
    """Tiles of one size, with the same number of rows each."""

    sizes: SiglipSizes
    text_size: int
    merge: int  # patches of an edge of a square
    longest_edge: int
    splits: bool  # an image is also cut into tiles
    resample: int
    normalisation: Normalisation

    def picture(self, pixels: Pixels) -> Picture:
        tile, (height, width, _) = self.sizes.image_size, pixels.shape
        height, width = longest(height, width, self.longest_edge)
        pixels = resized(pixels, height, width, self.resample)
        if not self.splits:
            return Picture(self._text(0, 0), (resized(pixels, tile, tile, self.resample),))
        height, width = whole_tiles(height, width, tile)
        pixels = resized(pixels, height, width, self.resample)
        if max(height, width) <= tile:
            return Picture(self._text(0, 0), (pixels,))
        rows, columns = height // tile, width // tile
        parts = [
            np.ascontiguousarray(pixels[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile])
            for row in range(rows)
            for column in range(columns)
        ]
        return Picture(self._text(rows, columns), (*parts, resized(pixels, tile, tile, self.resample)))

    def _text(self, rows: int, columns: int) -> str:
        image = ROW * self.num_tile_rows
        tiles = "".join(
            "".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return f"{tiles}{chr(10) if rows else ''}{AROUND}{WHOLE}{image}{AROUND}"

    @property
    def num_tile_rows(self) -> int:
        return (self.sizes.side // self.merge) ** 2

    def num_rows(self, pixels: Pixels) -> int:
        return self.num_tile_rows

    def largest(self, num_rows: int) -> tuple[int, int]:
        return self.sizes.image_size, self.sizes.image_size

    def load(self, source: TowerTensors) -> Idefics3Tower:
        width = self.sizes.hidden_size * self.merge**2
        projection = source.linear("connector.modality_projection.proj", rows=self.text_size, columns=width)
        encoder, places = Siglip.load(source, self.sizes), buckets(self.sizes.side)
        order = (places[:, None] * self.sizes.side + places).reshape(-1)
        return Idefics3Tower(self, replace(encoder, positions=encoder.positions[order]), projection)


@dataclass(frozen=True, slots=True)
class Idefics3Tower:
    vision: Idefics3Vision
    encoder: Siglip
    projection: Linear
    prepared_for: KernelSet | None = None

    @property
    def layout(self) -> RowLayout:
        return PLAIN_ROWS

    def prepared(self, kernels: KernelSet) -> Idefics3Tower:
        if self.prepared_for is kernels:
            return self
        projection = kernels.prepare_linear(self.projection)
        return replace(self, encoder=self.encoder.prepared(kernels), projection=projection, prepared_for=kernels)

    @property
    def cut(self) -> Cut:
        return Cut(self.vision.sizes.patch_size, self.vision.normalisation.values)

    def fixed(self, height: int, width: int, kernels: KernelSet) -> Fixed:
        side = self.vision.sizes.side
        return square_rows(side, side, self.vision.merge, kernels)

    def rows(self, values: Array, fixed: Fixed, batch: Batch, kernels: KernelSet) -> Array:
        x, size = self.encoder.states(values, batch, kernels), self.vision.sizes.hidden_size
        joined = kernels.join_columns([(kernels.take(x, rows), 0, size) for rows in fixed])
        return kernels.linear(joined, self.projection)

    def matrices(self) -> list[QuantizedTensor | Array]:
        return [*self.encoder.matrices(), *self.projection.parts]


def longest(height: int, width: int, edge: int) -> tuple[int, int]:
    """A size whose longer edge is `edge`, or `LONGEST_EDGE` if that is shorter; the shorter edge is even."""
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        height, width = edge, int(edge * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > LONGEST_EDGE:
        width, height = LONGEST_EDGE, int(LONGEST_EDGE / ratio)
    elif height > width and height > LONGEST_EDGE:
        height, width = LONGEST_EDGE, int(LONGEST_EDGE * ratio)
    return max(height, 1), max(width, 1)


def whole_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """The size in whole tiles, at least as large."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width


def buckets(side: int) -> NDArray[np.int64]:
    """i64[side]: the positions of the patches of an edge in the table, as fractions of the edge find them in f32."""
    count = math.ceil((1.0 - 1 / side) / (1 / side))
    boundaries = (1 / side + np.arange(count) * (1 / side)).astype(np.float32)
    places = np.arange(side, dtype=np.float32) * np.float32(1.0 / side)
    found = np.searchsorted(boundaries, np.minimum(places, np.float32(1.0 - 1e-6)), side="right")
    return np.asarray(found, np.int64)


def read(config: JsonObject, processor: JsonObject) -> Idefics3Vision:
    """The processing and the sizes of a folder."""
    sizes = SiglipSizes.read(config.needed_object("vision_config").with_defaults(DEFAULTS))
    usual = {"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}}
    found = Processor(processor, resample=LANCZOS, **usual)
    tile = found.size("max_image_size").count("longest_edge")
    if tile != sizes.image_size:
        raise UnsupportedModelError(
            f"{processor.path}: tiles have an edge of {tile} pixels and the tower reads {sizes.image_size}"
        )
    merge = config.count("scale_factor", 2, most=64)
    if sizes.side % merge:
        raise config.wrong("scale_factor", f"a divisor of {sizes.side}, the patches of an edge")
    return Idefics3Vision(
        name="idefics3",
        placeholder=ROW,
        row_token=config.count("image_token_id", 128257),
        sizes=sizes,
        text_size=config.needed_object("text_config").count("hidden_size"),
        merge=merge,
        longest_edge=found.size().count("longest_edge"),
        splits=found.json.flag("do_image_splitting", True),
        resample=found.resample,
        normalisation=found.normalisation(),
    )
