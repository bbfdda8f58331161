"""Gemma 3: SigLIP on images of one size, the mean of neighbouring patches, and a projection. Tokens see both ways."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from bifolio.errors import UnsupportedModelError
from bifolio.kernels.interface import Array, Batch, KernelSet, Linear, Norm
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.vision.decoding import resized
from bifolio.model.vision.layers import pooled, square_rows
from bifolio.model.vision.processing import Processor
from bifolio.model.vision.resampling import BILINEAR
from bifolio.model.vision.siglip import Siglip, SiglipSizes
from bifolio.model.vision.tensors import TowerTensors
from bifolio.model.vision.tower import PLAIN_ROWS, Cut, Fixed, Normalisation, Picture, Pixels, RowLayout, Vision
from bifolio.quant.tensor import QuantizedTensor

TYPES = ("gemma3",)
BEGIN, ROW, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Vision(Vision):
    """Images in one size, with the same number of rows each."""

    sizes: SiglipSizes
    text_size: int
    tokens: int  # rows of an image
    height: int
    width: int
    resample: int
    normalisation: Normalisation

    def picture(self, pixels: Pixels) -> Picture:
        pixels = resized(pixels, self.height, self.width, self.resample)
        return Picture(f"\n\n{BEGIN}{ROW * self.tokens}{END}\n\n", (pixels,))

    def num_rows(self, pixels: Pixels) -> int:
        return self.tokens

    def largest(self, num_rows: int) -> tuple[int, int]:
        return self.height, self.width

    def load(self, source: TowerTensors) -> Gemma3Tower:
        size = self.sizes.hidden_size
        stored = source.array("multi_modal_projector.mm_input_projection_weight", (size, self.text_size))
        norm = source.norm("multi_modal_projector.mm_soft_emb_norm", size, self.sizes.eps, offset=1.0)
        weights = Linear((np.ascontiguousarray(stored.T),), (None,))
        return Gemma3Tower(self, Siglip.load(source, self.sizes), norm, weights)


@dataclass(frozen=True, slots=True)
class Gemma3Tower:
    vision: Gemma3Vision
    encoder: Siglip
    norm: Norm
    projection: Linear
    prepared_for: KernelSet | None = None

    @property
    def layout(self) -> RowLayout:
        return PLAIN_ROWS

    def prepared(self, kernels: KernelSet) -> Gemma3Tower:
        if self.prepared_for is kernels:
            return self
        return replace(
            self,
            encoder=self.encoder.prepared(kernels),
            norm=kernels.prepare_norm(self.norm),
            projection=kernels.prepare_linear(self.projection),
            prepared_for=kernels,
        )

    @property
    def cut(self) -> Cut:
        return Cut(self.vision.sizes.patch_size, self.vision.normalisation.values)

    def fixed(self, height: int, width: int, kernels: KernelSet) -> Fixed:
        side = self.vision.sizes.side
        return square_rows(side, side, side // math.isqrt(self.vision.tokens), kernels)

    def rows(self, values: Array, fixed: Fixed, batch: Batch, kernels: KernelSet) -> Array:
        x = pooled(self.encoder.states(values, batch, kernels), fixed, kernels)
        return kernels.linear(kernels.norm(x, self.norm), self.projection)

    def matrices(self) -> list[QuantizedTensor | Array]:
        return [*self.encoder.matrices(), *self.projection.parts]


def read(config: JsonObject, processor: JsonObject) -> Gemma3Vision:
    """The processing and the sizes of a folder."""
    sizes = SiglipSizes.read(config.needed_object("vision_config"))
    found = Processor(processor, resample=BILINEAR, size={"height": sizes.image_size, "width": sizes.image_size})
    if found.json.get("do_pan_and_scan"):
        raise UnsupportedModelError(f"{processor.path}: do_pan_and_scan is on, which is not supported: set it to false")
    tokens = config.count("mm_tokens_per_image", 256, most=1 << 16)
    side = math.isqrt(tokens)
    if side * side != tokens or sizes.side % side:
        raise config.wrong("mm_tokens_per_image", f"the square of a divisor of {sizes.side}, the patches of an edge")
    height, width = (found.size().count(name) for name in ("height", "width"))
    if (height, width) != (sizes.image_size, sizes.image_size):
        raise UnsupportedModelError(
            f"{processor.path}: size is {height} x {width} and the tower reads {sizes.image_size} x {sizes.image_size}"
        )
    return Gemma3Vision(
        name="gemma3",
        placeholder=BEGIN,
        row_token=config.count("image_token_index", config.count("image_token_id", 262144)),
        both_ways=True,
        sizes=sizes,
        text_size=config.needed_object("text_config").count("hidden_size", 2304),
        tokens=tokens,
        height=height,
        width=width,
        resample=found.resample,
        normalisation=found.normalisation(),
    )
