"""`Vision`, the processing of images for a model, and `Tower`, the network that reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bifolio.arrays import array_namespace
from bifolio.kernels.interface import Array, Batch, KernelSet
from bifolio.model.image_rows import PLAIN_ROWS as PLAIN_ROWS
from bifolio.model.image_rows import RowLayout as RowLayout
from bifolio.model.vision.decoding import Pixels as Pixels
from bifolio.model.vision.decoding import pixels_of
from bifolio.model.vision.tensors import TowerTensors
from bifolio.quant.tensor import QuantizedTensor

Fixed: TypeAlias = tuple[Array, ...]  # arrays that follow from the size of a tile, of its positions above all


class Picture(NamedTuple):
    """An image as a model reads it."""

    text: str  # in place of the placeholder in a prompt, with one `Vision.row_token` for each row
    tiles: tuple[Pixels, ...]  # inputs of the tower, in the order of their rows
    digests: tuple[bytes, ...] = ()  # of the tiles (`Vision.digest`), where they are known


class Cut(NamedTuple):
    """How the bytes of a tile become the values of its patches."""

    size: int  # pixels of an edge of a patch
    values: NDArray[np.float32]  # f32[256, 3]  of each byte and channel
    merge: int = 1  # patches of an edge of a square, whose patches follow each other

    def patches(self, pixels: Array, values: Array) -> Array:
        """f32[patches, 3 * size * size] of u8[height, width, 3], each channel by channel.

        Squares follow row by row, and the patches of each. `values`: those of this object on the device of the pixels.
        """
        xp, size, merge = array_namespace(pixels), self.size, self.merge
        height, width = (edge // (size * merge) for edge in pixels.shape[:2])
        whole = pixels[: height * size * merge, : width * size * merge]
        grid = xp.reshape(whole, (height, merge, size, width, merge, size, 3))
        own = xp.reshape(xp.permute_dims(grid, (0, 3, 1, 4, 6, 2, 5)), (-1, 3, size * size))
        found = [values[:, channel][xp.astype(own[:, channel], xp.int64)] for channel in range(3)]
        return xp.reshape(xp.stack(found, axis=1), (-1, 3 * size * size))


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

    @property
    def cut(self) -> Cut:
        """The patches of a tile."""
        ...

    def fixed(self, height: int, width: int, kernels: KernelSet) -> Fixed:
        """Arrays that depend on the height and width of a tile alone, such as its rotations."""
        ...

    def rows(self, values: Array, fixed: Fixed, batch: Batch, kernels: KernelSet) -> Array:
        """[rows, d] of one tile; the features of `RowLayout.num_deep` layers follow in further columns.

        values: f32[patches, ...] of `cut`; `batch` holds one sequence of these patches, each of which sees all. No
        array comes from the host, so that a kernel set can capture the pass.
        """
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

    def read(self, image: Any) -> Picture:
        """The tiles and the text of a `PIL.Image` or u8[height, width, 3], as the processor of the model makes them."""
        return self.picture(pixels_of(image))

    @abstractmethod
    def picture(self, pixels: Pixels) -> Picture:
        """The tiles and the text of an image."""

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
        found.update(np.ascontiguousarray(pixels).data)
        return found.digest()


class Normalisation(NamedTuple):
    """From the bytes of a pixel to floats."""

    factor: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @property
    def values(self) -> NDArray[np.float32]:
        """f32[256, 3]: of each byte and channel."""
        scaled = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        mean, std = (np.asarray(each, np.float32) for each in (self.mean, self.std))
        return (scaled[:, None] - mean) / std
