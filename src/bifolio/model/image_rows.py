"""The rows that a pass reads in place of embeddings: `Batch.given`, [t, columns].

|<- d: in place of the embedding ->|<- in place of the second embedding ->|<- deep ->|<- cosine ->|<- sine ->|

deep: d columns for each of `num_deep` layers, added behind them. No network has these and second embeddings.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bifolio.kernels.interface import Array, Batch, KernelSet, Rotation


class RowLayout(NamedTuple):
    """How a text network takes the rows of a tower."""

    num_deep: int = 0  # layers of the network, from the first on, behind which further columns are added
    sections: tuple[int, ...] = ()  # frequencies of rope that time, row and column rotate; empty: one position each
    input_token: int | None = None  # the token whose second embedding rows have; None: tokens have one embedding
    windows_only: bool = False  # tokens of an image see later ones in layers with a window alone

    def axes(self, half: int) -> NDArray[np.int64]:
        """i64[half]: the position that rotates each frequency: 0 time, 1 row, 2 column."""
        found = np.zeros(half, np.int64)
        for axis in (1, 2):
            found[axis : self.sections[axis] * 3 : 3] = axis
        return found

    def width(self, size: int, input_columns: int, half: int) -> int:
        """Columns of `Batch.given`: `size` of an embedding, `input_columns` of a second one; `half`: of rope."""
        return size + input_columns + size * self.num_deep + (2 * half if self.sections else 0)


PLAIN_ROWS = RowLayout()


class GivenRows(NamedTuple):
    """The parts of `Batch.given`."""

    x: Array  # [t, d]
    inputs: Array | None  # [t, columns]  in place of second embeddings
    deep: tuple[Array, ...]  # [t, d] each
    rotation: Rotation | None  # in place of that by position


def given_rows(
    layout: RowLayout, size: int, input_columns: int, half: int, batch: Batch, kernels: KernelSet
) -> GivenRows:
    """The parts of a batch's rows: `size` columns, `input_columns`, and so on; `half`: frequencies of rope."""
    inputs_end = size + input_columns
    deep_end = inputs_end + size * layout.num_deep
    width = layout.width(size, input_columns, half)
    rows = kernels.given(batch, width, exact=True)
    if width == size:
        return GivenRows(rows, None, (), None)

    def columns(start: int, stop: int) -> Array:
        return kernels.join_columns([(rows, start, stop)])

    deep = tuple(columns(start, start + size) for start in range(inputs_end, deep_end, size))
    rotation = None
    if layout.sections:
        rotation = Rotation(columns(deep_end, deep_end + half), columns(deep_end + half, width))
    inputs = columns(size, inputs_end) if input_columns else None
    return GivenRows(columns(0, size), inputs, deep, rotation)


def joint_rotation(
    layout: RowLayout,
    positions: NDArray[np.int32],
    frequencies: Array,
    scale: float,
    kernels: KernelSet,
) -> Rotation:
    """The rotation of tokens with three positions, i32[3, t]: each frequency turns by one of them."""
    each = [kernels.rotation(frequencies, scale, kernels.from_host(np.ascontiguousarray(own))) for own in positions]
    half = frequencies.shape[-1]
    axes = layout.axes(half)
    chosen = [kernels.from_host((axes == axis).astype(np.float32)) for axis in range(3)]

    def joined(parts: list[Array]) -> Array:
        masked = [kernels.join_columns([(part, 0, half)], columns) for part, columns in zip(parts, chosen, strict=True)]
        return kernels.add(kernels.add(masked[0], masked[1]), masked[2])

    return Rotation(joined([one.cos for one in each]), joined([one.sin for one in each]))
