"""Passes of a tower by the size of the tile: their arrays are kept, and the pass is captured when a size comes again.

Launched kernel by kernel, a tower takes the host longer than the device. A size that comes once is not captured: that
takes as long as two passes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bifolio.engine.fault.out_of_memory import is_out_of_memory
from bifolio.kernels.interface import Array, Batch, KernelSet
from bifolio.model.vision.tower import Fixed, Tower
from bifolio.schedule.orchestrators import PrefillOrchestrator

PASS_BYTES = 128 << 20  # of the arrays of all sizes; those of the last size are kept even if they are larger
MOST_PATCHES = 4096  # of a captured pass: larger ones take the device longer than the host


@dataclass(slots=True, eq=False)
class TilePass:
    """The pass over tiles of one size."""

    launch: Callable[[Array], Array]  # [rows, d] from u8[height, width, 3]
    num_bytes: int
    may_be_captured: bool


class TilePasses:
    """The passes of a prepared tower, the last used size last."""

    def __init__(self, tower: Tower, kernels: KernelSet, most_bytes: int = PASS_BYTES) -> None:
        self.tower = tower
        self._kernels, self._most_bytes = kernels, most_bytes
        self._cut = tower.cut
        self._values = kernels.for_towers.from_host(self._cut.values)
        self._passes: OrderedDict[tuple[int, int], TilePass] = OrderedDict()

    def rows(self, pixels: NDArray[np.uint8]) -> Array:
        """[rows, d] of a tile."""
        size = pixels.shape[0], pixels.shape[1]
        tile = self._kernels.for_towers.from_host(np.ascontiguousarray(pixels))
        own = self._passes.get(size)
        if own is None:
            own = self._passes[size] = self._new(*size)
            found = own.launch(tile)
        elif own.may_be_captured:
            found = self._captured(own, tile)
        else:
            found = own.launch(tile)
        self._passes.move_to_end(size)
        while len(self._passes) > 1 and sum(each.num_bytes for each in self._passes.values()) > self._most_bytes:
            self._passes.popitem(last=False)
        return found

    def _new(self, height: int, width: int) -> TilePass:
        count = (height // self._cut.size) * (width // self._cut.size)
        fixed, batch = self.tower.fixed(height, width, self._kernels.for_towers), self._patches(count)
        num_bytes = sum(int(array.nbytes) for array in (*fixed, batch.positions))
        return TilePass(lambda tile: self._run(tile, fixed, batch), num_bytes, count <= MOST_PATCHES)

    def _captured(self, own: TilePass, tile: Array) -> Array:
        """The rows of a tile, whose pass is one launch from now on, where the kernel set can capture it."""
        own.may_be_captured = False
        try:
            launch = self._kernels.capture(own.launch, tile)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._kernels.release_memory()
            launch = None
        if launch is None:
            return own.launch(tile)
        own.launch = launch
        found = launch(tile)
        own.num_bytes += int(tile.nbytes + found.nbytes)
        return found

    def _run(self, tile: Array, fixed: Fixed, batch: Batch) -> Array:
        kernels = self._kernels.for_towers
        return self.tower.rows(self._cut.patches(tile, self._values), fixed, batch, kernels)

    def _patches(self, count: int) -> Batch:
        lengths = np.full(1, count, np.int32)
        segment = PrefillOrchestrator.lay_out(np.zeros(1, np.int32), lengths, None, causal=False)
        positions = self._kernels.for_towers.from_host(np.arange(count, dtype=np.int32))
        return Batch(positions, positions, None, (segment,), None, count - 1)
