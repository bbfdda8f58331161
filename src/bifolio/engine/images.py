"""Images in prompt chunks: the tower reads them when their chunk is launched, and a cache keeps its rows by digest.

Everything stays on the device: a chunk with images is a plain pass, whose embeddings the rows replace in part.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bifolio.engine.tile_passes import PASS_BYTES, TilePasses
from bifolio.images import PromptImage, rope_positions
from bifolio.kernels.interface import Array, Batch, KernelSet
from bifolio.model import transformer
from bifolio.model.image_rows import RowLayout, joint_rotation
from bifolio.model.layer_inputs import given_columns, token_inputs
from bifolio.model.stream_weights import LayerInputWeights
from bifolio.model.vision.tower import Tower
from bifolio.model.weights import ModelWeights
from bifolio.schedule.plan import StepPlan

CACHE_BYTES = 256 << 20  # of rows; the images of one chunk are kept even if they are larger
KEPT_BYTES = CACHE_BYTES + PASS_BYTES  # between steps, on a device


def has_images(plan: StepPlan) -> bool:
    """Whether a chunk of the plan has tokens of an image."""
    return any(
        image.start < item.start + item.num_new and item.start < image.end
        for item in plan.prefills
        for image in item.sequence.request.images
    )


def reading_images(weights: ModelWeights, layout: RowLayout) -> ModelWeights:
    """The weights of a network that takes rows of a tower."""
    weights = replace(weights, image_rows=layout)
    if not layout.windows_only:
        return weights
    layers = (
        layer if layer.shape.window is not None else replace(layer, shape=replace(layer.shape, causal=True))
        for layer in weights.layers
    )
    return replace(weights, layers=tuple(layers))


class ImageReader:
    """A tower on its kernels, and the rows of the images that it has read, the last used ones last."""

    def __init__(self, tower: Tower, kernels: KernelSet, cache_bytes: int = CACHE_BYTES) -> None:
        self.passes = TilePasses(tower.prepared(kernels.for_towers), kernels)
        self.num_rows = 0  # computed so far
        self._kernels = kernels
        self._cache_bytes = cache_bytes
        self._known: OrderedDict[bytes, Array] = OrderedDict()
        self._held_bytes = 0

    def rows(self, image: PromptImage) -> Array:
        """[rows, width] of an image, from the cache if it is known."""
        found = self._known.get(image.digest)
        if found is None:
            found = self._known[image.digest] = self.passes.rows(image.pixels)
            self._held_bytes += found.nbytes
            self.num_rows += len(found)
            while self._held_bytes > self._cache_bytes and len(self._known) > 1:
                self._held_bytes -= self._known.popitem(last=False)[1].nbytes
        self._known.move_to_end(image.digest)
        return found

    @property
    def tower(self) -> Tower:
        return self.passes.tower

    def place(self, plan: StepPlan, batch: Batch, weights: ModelWeights) -> Batch:
        """The batch with the embeddings of its tokens, where the rows of images replace some of them."""
        found: list[tuple[NDArray[np.int64], Array]] = []
        first = sum(item.num_new for item in plan.decodes)
        for item in plan.prefills:
            for image in item.sequence.request.images:
                is_read = (image.places >= item.start) & (image.places < item.start + item.num_new)
                if is_read.any():
                    rows = self.rows(image)
                    rows = rows if is_read.all() else self._kernels.take(rows, np.flatnonzero(is_read))
                    found.append(((image.places[is_read] - item.start + first).astype(np.int64), rows))
            first += item.num_new
        if not found:
            return batch
        positions = self._positions(plan) if weights.image_rows.sections else None
        return self._with_rows(batch, weights, found, positions)

    def _with_rows(
        self,
        batch: Batch,
        weights: ModelWeights,
        found: list[tuple[NDArray[np.int64], Array]],
        positions: NDArray[np.int32] | None,
    ) -> Batch:
        kernels, layout = self._kernels, weights.image_rows
        x = transformer.embedded(weights, batch, kernels)
        if weights.layer_inputs is not None and given_columns(weights.layer_inputs, layout):
            second = token_inputs(weights.layer_inputs, batch.token_ids, kernels)
            x = kernels.join_columns([(part, 0, part.shape[1]) for part in (x, second)])
            found = self._with_inputs(found, weights.layer_inputs, layout)
        rows = kernels.with_rows(x, found)
        if positions is not None:
            frequencies, scale = weights.inverse_frequencies[0], weights.rope_scales[0]
            turned = joint_rotation(layout, positions, frequencies, scale, kernels)
            half = frequencies.shape[-1]
            rows = kernels.join_columns([(rows, 0, rows.shape[1]), (turned.cos, 0, half), (turned.sin, 0, half)])
        return replace(batch, given=rows)

    def _with_inputs(
        self, found: list[tuple[NDArray[np.int64], Array]], own: LayerInputWeights, layout: RowLayout
    ) -> list[tuple[NDArray[np.int64], Array]]:
        """The rows with the second embedding of the token that stands for all of an image's."""
        kernels = self._kernels
        second = token_inputs(own, kernels.from_host(np.full(1, layout.input_token, np.int32)), kernels)
        return [
            (places, kernels.join_columns([(rows, 0, rows.shape[1]), (copies, 0, copies.shape[1])]))
            for places, rows in found
            for copies in [kernels.take(second, kernels.from_host(np.zeros(len(places), np.int64)))]
        ]

    def _positions(self, plan: StepPlan) -> NDArray[np.int32]:
        """i32[3, t]: the positions of all tokens by rope, those of images included."""
        items = (*plan.decodes, *plan.prefills)
        each = [rope_positions(item.sequence.request.images, item.start, item.start + item.num_new) for item in items]
        return np.concatenate(each, axis=1)

    def largest(self, batch: Batch, weights: ModelWeights, max_rows: int) -> Batch:
        """The batch with rows of the largest image, for a measurement of memory."""
        height, width = self.tower.vision.largest(max_rows)
        rows = self.passes.rows(np.zeros((height, width, 3), np.uint8))
        count = min(len(rows), batch.num_tokens)
        rows = self._kernels.take(rows, np.arange(count))
        positions = np.zeros((3, batch.num_tokens), np.int32) if weights.image_rows.sections else None
        return self._with_rows(batch, weights, [(np.arange(count), rows)], positions)
