"""Images of a prompt: pixels for a vision tower, and the tokens whose embeddings its rows replace.

tokens  |<- text ->|<---------- image ---------->|<- text ->|
rows               |<- places: one row for each ->|
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import RequestError

TEXT_ONLY = "this model reads text only: remove the image"
VECTORS_OF_TEXT = "vectors and scores are of texts alone: leave the images out"
ONE_PROCESS = "images are read by one process: set tensor_parallel_size=1"


class Mark(NamedTuple):
    """The content of tokens [start, end) of a sequence that their ids do not tell."""

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """One input of a vision tower in a prompt."""

    pixels: NDArray[np.uint8]  # u8[height, width, 3], in the size that the tower reads
    places: NDArray[np.int32]  # i32[rows]  tokens whose embeddings the rows of the tower replace, ascending
    digest: bytes  # of the pixels, and of how the model reads them
    both_ways: bool = False  # each of its tokens sees all of them: one pass computes them all
    grid: tuple[int, int] | None = None  # height and width in rows, if rope has positions for them

    @property
    def mark(self) -> Mark:
        """For the digests of the blocks that hold its tokens."""
        return Mark(self.start, self.end, self.digest)

    @property
    def start(self) -> int:
        return int(self.places[0])

    @property
    def end(self) -> int:
        return int(self.places[-1]) + 1


def whole_images(images: Sequence[PromptImage], start: int, limit: int) -> int:
    """The tokens of a chunk from `start` on, about `limit` of them: it ends inside no image that is read both ways.

    An image at the start of the chunk is computed whole, however long it is.
    """
    end = start + limit
    for image in images:
        if image.both_ways and image.start < end < image.end:
            return (image.start if image.start > start else image.end) - start
    return limit


def runs_of(images: Sequence[PromptImage], start: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """[start, end) as (start, end, whether it is causal), cut where an image that is read both ways begins or ends."""
    for image in images:
        first, last = max(image.start, start), min(image.end, end)
        if not image.both_ways or first >= last:
            continue
        if start < first:
            yield start, first, True
        yield first, last, False
        start = last
    if start < end:
        yield start, end, True


def kept_images(images: Sequence[PromptImage], count: int) -> tuple[PromptImage, ...]:
    """The images of the first `count` tokens; an error if one of them is cut."""
    for image in images:
        if image.start < count < image.end:
            raise RequestError(
                f"the first {count} tokens end inside an image: keep {image.start} tokens, or {image.end}, as a whole"
            )
    return tuple(image for image in images if image.end <= count)


def shift_at(images: Sequence[PromptImage], index: int) -> int:
    """The position of a token of text by rope, less its index: a grid takes as many positions as its longer edge."""
    grids = (image.grid for image in images if image.grid is not None and image.end <= index)
    return sum(max(height, width) - height * width for height, width in grids)


def rope_positions(images: Sequence[PromptImage], start: int, end: int) -> NDArray[np.int32]:
    """i32[3, end - start]: time, row and column of each token by rope; equal for tokens of text."""
    index = np.arange(start, end, dtype=np.int32)
    found = np.stack([index] * 3)
    for image in images:
        if image.grid is None:
            continue
        height, width = image.grid
        found[:, index >= image.end] += max(height, width) - height * width
        own = (index >= image.start) & (index < image.end)
        place = index[own] - image.start
        first = image.start + shift_at(images, image.start)
        found[:, own] = first + np.stack([np.zeros_like(place), place // width, place % width])
    return found
