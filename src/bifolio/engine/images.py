"""Images in prompt chunks: the tower reads them when their chunk is launched, and a cache keeps its rows by digest."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bifolio.images import PromptImage, rope_positions
from bifolio.kernels.interface import Batch, KernelSet
from bifolio.model import transformer
from bifolio.model.image_rows import joint_rotation
from bifolio.model.vision.tower import Tower
from bifolio.model.weights import ModelWeights
from bifolio.schedule.orchestrators import PrefillOrchestrator
from bifolio.schedule.plan import StepPlan

CACHE_BYTES = 256 << 20  # of rows; the images of one chunk are kept even if they are larger


class ImageReader:
    """A tower on its kernels, and the rows of the images that it has read, the last used ones last."""

    def __init__(self, tower: Tower, kernels: KernelSet, cache_bytes: int = CACHE_BYTES) -> None:
        self.tower = tower
        self.num_rows = 0  # computed so far
        self._kernels = kernels
        self._cache_bytes = cache_bytes
        self._known: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._held_bytes = 0

    def rows(self, image: PromptImage) -> NDArray[np.float32]:
        """f32[rows, width] of an image, from the cache if it is known."""
        found = self._known.get(image.digest)
        if found is None:
            found = self._known[image.digest] = self.tower.rows(image.pixels, self._kernels, self._patches)
            self._held_bytes += found.nbytes
            self.num_rows += len(found)
            while self._held_bytes > self._cache_bytes and len(self._known) > 1:
                self._held_bytes -= self._known.popitem(last=False)[1].nbytes
        self._known.move_to_end(image.digest)
        return found

    def _patches(self, count: int) -> Batch:
        lengths = np.full(1, count, np.int32)
        segment = PrefillOrchestrator.lay_out(np.zeros(1, np.int32), lengths, None, causal=False)
        positions = self._kernels.from_host(np.arange(count, dtype=np.int32))
        return Batch(positions, positions, None, (segment,), None, count - 1)

    def place(self, plan: StepPlan, batch: Batch, weights: ModelWeights) -> Batch:
        """The batch with the embeddings of its tokens, where the rows of images replace some of them."""
        found: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        first = sum(item.num_new for item in plan.decodes)
        for item in plan.prefills:
            for image in item.sequence.request.images:
                is_read = (image.places >= item.start) & (image.places < item.start + item.num_new)
                if is_read.any():
                    found.append((image.places[is_read] - item.start + first, self.rows(image)[is_read]))
            first += item.num_new
        if not found:
            return batch
        kernels, layout = self._kernels, weights.image_rows
        embeddings = np.asarray(kernels.to_host(transformer.embedded(weights, batch, kernels)), np.float32)
        rows = np.zeros((batch.num_tokens, embeddings.shape[1] * (1 + layout.num_deep)), np.float32)
        rows[:, : embeddings.shape[1]] = embeddings
        for places, values in found:
            rows[places] = values
        if layout.sections:
            rows = np.concatenate([rows, *self._rotated(plan, batch, weights)], axis=1)
        return replace(batch, given=kernels.from_host(rows))

    def _rotated(self, plan: StepPlan, batch: Batch, weights: ModelWeights) -> list[np.ndarray]:
        """Cosine and sine f32[t, half] of the positions of all tokens, those of images included."""
        kernels = self._kernels
        positions = np.stack([np.asarray(kernels.to_host(batch.positions))] * 3)
        first = sum(item.num_new for item in plan.decodes)
        for item in plan.prefills:
            if item.sequence.request.images:
                end = item.start + item.num_new
                positions[:, first : first + item.num_new] = rope_positions(
                    item.sequence.request.images, item.start, end
                )
            first += item.num_new

        def rotation(own: NDArray[np.int32]) -> tuple[np.ndarray, np.ndarray]:
            frequencies, scale = weights.inverse_frequencies[0], weights.rope_scales[0]
            cos, sin = kernels.rotation(frequencies, scale, kernels.from_host(np.ascontiguousarray(own)))
            return np.asarray(kernels.to_host(cos)), np.asarray(kernels.to_host(sin))

        return joint_rotation(weights.image_rows, positions, rotation)
