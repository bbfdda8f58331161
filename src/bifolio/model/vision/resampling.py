"""Images in another size, bit by bit as Pillow makes them, by the native kernels.

Along each edge an output is a weighted sum of the inputs around its place. The weights are multiples of 2^-22, and the
sums along rows are rounded to bytes before those along columns. Later versions of Pillow begin with the columns of some
images that lose rows, which changes bits: such images are left to Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bifolio.kernels.cpu import resample

WEIGHT_BITS = 22
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # filters, as Pillow numbers them
Values = NDArray[np.float64]


class Taps(NamedTuple):
    """The inputs of each output along one edge, and their weights."""

    first: NDArray[np.int32]  # i32[outputs]
    counts: NDArray[np.int32]  # i32[outputs]
    weights: NDArray[np.int32]  # i32[outputs, most]


UNCHANGED = Taps(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32))


def resized_pixels(pixels: NDArray[np.uint8], height: int, width: int, filter: int) -> NDArray[np.uint8] | None:
    """u8[height, width, 3] of u8[h, w, 3]; None: Pillow's order is not known, or the native kernels are not built."""
    if pixels.shape[:2] == (height, width):
        return pixels
    if filter not in FILTERS or (height < pixels.shape[0] and width != pixels.shape[1]):
        return None
    down, along = (
        UNCHANGED if inputs == outputs else taps_of(inputs, outputs, filter)
        for inputs, outputs in zip(pixels.shape, (height, width), strict=False)
    )
    return resample(np.ascontiguousarray(pixels), tuple(down), tuple(along), height, width)


@lru_cache(maxsize=256)
def taps_of(inputs: int, outputs: int, filter: int) -> Taps:
    """The weights from `inputs` pixels of an edge to `outputs`."""
    weigh, reach = FILTERS[filter]
    scale = inputs / outputs
    spread = max(scale, 1.0)
    support = reach * spread
    centers = (np.arange(outputs) + 0.5) * scale
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centers + support + 0.5).astype(np.int64), inputs) - first
    most = int(count.max())
    places = np.arange(most)
    values = weigh((places + first[:, None] - centers[:, None] + 0.5) * (1.0 / spread))
    values[places >= count[:, None]] = 0.0
    total = np.zeros(outputs)
    for place in range(most):  # one after the other: the order of a sum decides on its last bit
        total += values[:, place]
    values /= np.where(total == 0.0, 1.0, total)[:, None]
    scaled = values * (1 << WEIGHT_BITS)
    weights = np.where(values < 0, scaled - 0.5, scaled + 0.5).astype(np.int32)
    return Taps(first.astype(np.int32), count.astype(np.int32), weights)


def _bilinear(x: Values) -> Values:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _bicubic(x: Values) -> Values:
    x, a = np.abs(x), -0.5
    near, far = ((a + 2.0) * x - (a + 3.0)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: Values) -> Values:
    inside = (x >= -3.0) & (x < 3.0)
    return np.where(inside, _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: Values) -> Values:
    turned = (x * math.pi).reshape(-1).tolist()
    return np.array([1.0 if value == 0.0 else math.sin(value) / value for value in turned]).reshape(x.shape)


FILTERS: dict[int, tuple[Callable[[Values], Values], float]] = {
    LANCZOS: (_lanczos, 3.0),
    BILINEAR: (_bilinear, 1.0),
    BICUBIC: (_bicubic, 2.0),
}  # by number: the weight at a distance, and the largest distance with a weight
