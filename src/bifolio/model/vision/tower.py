"""`Vision`, the processing of images for a model, and `Tower`, the network that reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bifolio.kernels.interface import Array, Batch, KernelSet
from bifolio.model.image_rows import PLAIN_ROWS as PLAIN_ROWS
from bifolio.model.image_rows import RowLayout as RowLayout
from bifolio.model.vision.tensors import TowerTensors
from bifolio.quant.tensor import QuantizedTensor

Pixels = NDArray[np.uint8]  # u8[height, width, 3]
NewBatch: TypeAlias = Callable[[int], Batch]  # of that many patches, each of which sees all


class Picture(NamedTuple):
    """An image as a model reads it."""

    text: str  # in place of the placeholder in a prompt, with one `Vision.row_token` for each row
    tiles: tuple[Pixels, ...]  # inputs of the tower, in the order of their rows


class Tower(Protocol):
    """The network that turns the pixels of a tile into rows in place of embeddings."""

    @property
    def layout(self) -> RowLayout:
        """How the text network takes the rows."""
        ...

    @property
    def vision(self) -> Vision:
        """The processing of its images."""
        ...

    def prepared(self, kernels: KernelSet) -> Tower:
        """The tower with its weights prepared for a kernel set, once."""
        ...

    def rows(self, pixels: Pixels, kernels: KernelSet, new_batch: NewBatch) -> Array:
        """[rows, d] of one tile; the features of `RowLayout.num_deep` layers follow in further columns."""
        ...

    def matrices(self) -> list[QuantizedTensor | Array]:
        """Every matrix once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision(ABC):
    """How a model takes images, without its weights."""

    name: str  # of the family of the tower
    sizes: Any  # of the tower: hidden_size, num_layers, patch_size and others of its family
    placeholder: str  # the text of an image in a prompt
    row_token: int  # the token that stands for one row
    both_ways: bool = False  # the tokens of a tile see all of them

    @abstractmethod
    def read(self, image: Any) -> Picture:
        """The tiles and the text of a `PIL.Image`, as the processor of the model makes them."""

    @abstractmethod
    def num_rows(self, pixels: Pixels) -> int:
        """Rows of a tile."""

    @abstractmethod
    def largest(self, num_rows: int) -> tuple[int, int]:
        """Height and width of the largest tile that has at most `num_rows` rows, or of the smallest one."""

    def grid(self, pixels: Pixels) -> tuple[int, int] | None:
        """Height and width of a tile in rows, where rope has a position for each; None: its tokens count like text."""
        return None

    @abstractmethod
    def load(self, source: TowerTensors) -> Tower:
        """The tower from the tensors of a folder."""

    def digest(self, pixels: Pixels) -> bytes:
        """Of the pixels and of everything that decides how the tower reads them."""
        found = blake2b(repr((self, pixels.shape)).encode(), digest_size=16, person=b"bifolio-image")
        found.update(np.ascontiguousarray(pixels).tobytes())
        return found.digest()


class Normalisation(NamedTuple):
    """From the bytes of a pixel to floats."""

    factor: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __call__(self, pixels: Pixels) -> NDArray[np.float32]:
        """f32[height, width, 3]"""
        scaled = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        mean, std = (np.asarray(each, np.float32) for each in (self.mean, self.std))
        table = (scaled[:, None] - mean) / std  # of each byte and channel
        found = np.empty(pixels.shape, np.float32)
        for channel in range(3):
            found[..., channel] = table[:, channel].take(pixels[..., channel])
        return found


def patches_of(values: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """f32[patches, 3 * size * size]: the squares of an image [height, width, 3] row by row, each channel by channel."""
    height, width = (edge // size for edge in values.shape[:2])
    cut = values[: height * size, : width * size].reshape(height, size, width, size, 3)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(height * width, 3 * size * size)
