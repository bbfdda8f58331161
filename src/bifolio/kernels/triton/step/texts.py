"""Steps of an encoder: a pass for a few numbers of tokens, so that a step is one launch.

    tokens  |<--- text 0 --->|<- text 1 ->|<----- text 2 ----->|<- padding ->|

Launched kernel by kernel, a step takes the host longer than the device. A captured step reads token ids, positions, and
the tiles of queries of whole texts (`prefill`); unused tiles have no queries and end at once. Nothing is read from the
cache or written to it. Steps of very many texts or tokens are launched kernel by kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from bifolio.kernels.interface import (
    Array,
    AttentionSegment,
    Batch,
    Network,
    SplitNetwork,
    Storage,
    TimedOperation,
)
from bifolio.kernels.torch_arrays import upload
from bifolio.kernels.triton.graphs.graph_cache import CapturedPass, GraphCache
from bifolio.kernels.triton.graphs.sizes import INTERPRETED, TEXTS, padded
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.query_tiles import QueryTiles, tiles_of
from bifolio.kernels.triton.step.decodes import GraphKernels

LENGTHS = (16, 64, 1 << 20)  # longest texts of the classes that have tiles of different sizes


class TextKey(NamedTuple):
    """A step of texts."""

    size: int  # tokens
    longest: int  # one of LENGTHS


class TextPass(CapturedPass):
    """The step of one number of tokens; the text after the last one is empty."""

    def __init__(self, steps: TextSteps, key: TextKey) -> None:
        self._steps, self.key, self.sizes, device = steps, key, steps.sizes, steps.kernels.device
        segment, attention, dtype = steps.segment(key), steps.kernels.attention, steps.kernels.dtype
        rows_of_tiles = sorted({attention.rows_of_tile(shape, segment, dtype, None) for shape in steps.network.shapes})
        parts = [self.sizes.max_prompts + 2, self.sizes.max_prompts + 1]
        for rows in rows_of_tiles:
            parts += [self.sizes.most_tiles(key.size, rows)] * 2
        self.words = torch.zeros(sum(parts), dtype=torch.int32, device=device)  # the contents of `tiles`
        starts, lengths, *tiles = torch.split(self.words, parts)
        self.tiles = {  # by their rows
            rows: QueryTiles(sequence, first, starts, lengths, lengths)
            for rows, sequence, first in zip(rows_of_tiles, tiles[::2], tiles[1::2], strict=True)
        }
        self.token_ids, self.positions = torch.zeros((2, key.size), dtype=torch.int32, device=device)  # i32[t]

    def words_of(self, segment: AttentionSegment) -> np.ndarray:
        """i32: the contents of `words` for these texts."""
        lengths, size, most = np.diff(np.asarray(segment.query_starts)), len(self.token_ids), self.sizes.max_prompts
        starts = np.full(most + 2, segment.token_end, dtype=np.int64)
        starts[: len(lengths)] = segment.query_starts[:-1]
        contexts = np.zeros(most + 1, dtype=np.int64)
        contexts[: len(lengths)] = lengths
        parts = [starts, contexts]
        for rows in self.tiles:
            parts += tiles_of(lengths, rows, self.sizes.most_tiles(size, rows), most)
        return np.concatenate(parts).astype(np.int32)

    def run(self) -> None:
        self._steps.run_step(self)


class TextSteps:
    """Implements `StepProgram` for networks whose tokens attend in both directions."""

    def __init__(self, kernels: GraphKernels, network: Network, split: SplitNetwork) -> None:
        self.kernels, self.network, self._split = kernels, network, split
        self._cache = GraphCache(kernels.device)
        self.sizes = TEXTS if self._cache.on_gpu else INTERPRETED
        self._hidden: torch.Tensor | None = None  # [tokens of the largest step, d]

    def run(self, batch: Batch, storage: Storage) -> Array:
        """[t, d]: the network's result for all tokens; valid until the next run."""
        (segment,) = batch.segments
        key = self._key(batch.num_tokens, segment)
        if key is None:
            return self.network.forward(self.kernels, batch, storage)
        step = self._step(key)
        step.token_ids[: batch.num_tokens].copy_(batch.token_ids)
        step.positions[: batch.num_tokens].copy_(batch.positions)
        step.words.copy_(upload(step.words_of(segment), self.kernels.device))
        step.launch()
        assert self._hidden is not None
        hidden = self._hidden[: batch.num_tokens]
        return hidden if self._cache.on_gpu else hidden.clone()  # a GPU reads it before the next run

    def warm_up(self, num_tokens: int, longest: int) -> None:
        """Capture all steps now, the largest first, instead of when each is first needed."""
        sizes = self.sizes.tokens
        for size in reversed(sizes[: bisect_left(sizes, min(num_tokens, sizes[-1])) + 1]):
            for most in LENGTHS[: bisect_left(LENGTHS, longest) + 1]:
                if size <= most * self.sizes.max_prompts:
                    self._step(TextKey(size, most))

    def profile(self, batch: Batch, storage: Storage) -> tuple[Array, list[TimedOperation]]:
        """A captured step is one operation to the host: no times."""
        return self.run(batch, storage), []

    def _key(self, num_tokens: int, segment: AttentionSegment) -> TextKey | None:
        """None: no captured step fits the texts."""
        sizes = self.sizes.tokens
        if num_tokens > sizes[-1] or segment.num_sequences > self.sizes.max_prompts:
            return None
        return TextKey(padded(sizes, num_tokens), padded(LENGTHS, segment.max_query_len))

    def _step(self, key: TextKey) -> TextPass:
        return self._cache.find(key, lambda: TextPass(self, key))

    def segment(self, key: TextKey) -> AttentionSegment:
        return replace(self._split.prompt_segment(key.size), max_query_len=key.longest)

    def run_step(self, step: TextPass) -> None:
        segment = self.segment(step.key)
        self.kernels.attention.stage_texts(segment, step.tiles)
        batch = Batch(step.token_ids, step.positions, None, (segment,), None)
        hidden = tensor(self.network.forward(self.kernels, batch, None))
        if self._hidden is None:
            self._hidden = hidden.new_empty((self.sizes.tokens[-1], hidden.shape[1]))
        self._hidden[: step.key.size].copy_(hidden)
