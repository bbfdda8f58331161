"""Steps of an encoder as CUDA graphs: captured for a few numbers of tokens, so that a step is one launch.

    tokens  |<--- text 0 --->|<- text 1 ->|<----- text 2 ----->|<- padding ->|

Launched kernel by kernel, a step takes the host longer than the device. A graph reads token ids, positions, and the
tiles of queries of whole texts (`prefill`); unused tiles have no queries and end at once. Nothing is read from the
cache or written to it. Steps of very many texts or tokens are launched kernel by kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from bifolio.kernels.triton.cuda_graphs import GraphKernels, GraphRecorder
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.prompt_graphs import Sizes
from bifolio.kernels.triton.query_tiles import QueryTiles, tiles_of

# Steps by fours of a power of two: little padding.
ON_GPU = Sizes((16, 32, 64, 128, *(share << bits for bits in range(6, 12) for share in (4, 5, 6, 7)), 16384), 256)
INTERPRETED = Sizes((8, 24), 3)  # Triton's interpreter takes long for unused tiles
LENGTHS = (16, 64, 1 << 20)  # longest texts of the classes that have tiles of different sizes


class Key(NamedTuple):
    """A captured step."""

    size: int  # tokens
    longest: int  # one of LENGTHS


@dataclass(slots=True)
class TextStep:
    """The graph of one number of tokens and its static inputs."""

    token_ids: torch.Tensor  # i32[t]
    positions: torch.Tensor  # i32[t]
    words: torch.Tensor  # i32: the contents of `tiles`
    tiles: dict[int, QueryTiles]  # by their rows
    sizes: Sizes
    graph: Any = None

    @classmethod
    def new(cls, sizes: Sizes, size: int, rows_of_tiles: list[int], device: str) -> TextStep:
        """A step with `size` tokens; the text after the last one is empty."""
        parts = [sizes.max_prompts + 2, sizes.max_prompts + 1]
        for rows in rows_of_tiles:
            parts += [sizes.most_tiles(size, rows)] * 2
        words = torch.zeros(sum(parts), dtype=torch.int32, device=device)
        starts, lengths, *tiles = torch.split(words, parts)
        cut = {
            rows: QueryTiles(sequence, first, starts, lengths, lengths)
            for rows, sequence, first in zip(rows_of_tiles, tiles[::2], tiles[1::2], strict=True)
        }
        token_ids, positions = torch.zeros((2, size), dtype=torch.int32, device=device)
        return cls(token_ids, positions, words, cut, sizes)

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


class TextGraphs:
    """Implements `StepProgram` for networks whose tokens attend in both directions."""

    def __init__(self, kernels: GraphKernels, network: Network, split: SplitNetwork) -> None:
        self._kernels, self._network, self._split = kernels, network, split
        self._on_gpu = kernels.device.startswith("cuda")
        self._sizes = ON_GPU if self._on_gpu else INTERPRETED
        self._recorder = GraphRecorder(kernels.device)
        self._steps: dict[Key, TextStep] = {}
        self._hidden: torch.Tensor | None = None  # [tokens of the largest step, d]

    def run(self, batch: Batch, storage: Storage) -> Array:
        """[t, d]: the network's result for all tokens; valid until the next run."""
        (segment,) = batch.segments
        key = self._key(batch.num_tokens, segment)
        if key is None:
            return self._network.forward(self._kernels, batch, storage)
        step = self._step(key)
        step.token_ids[: batch.num_tokens].copy_(batch.token_ids)
        step.positions[: batch.num_tokens].copy_(batch.positions)
        step.words.copy_(upload(step.words_of(segment), self._kernels.device))
        if step.graph is None:
            self._run(step, key)
        else:
            step.graph.replay()
        assert self._hidden is not None
        hidden = self._hidden[: batch.num_tokens]
        return hidden if self._on_gpu else hidden.clone()  # a GPU reads it before the next run, a host maybe later

    def warm_up(self, num_tokens: int, longest: int) -> None:
        """Capture all steps now, the largest first, instead of when each is first needed."""
        sizes = self._sizes.tokens
        for size in reversed(sizes[: bisect_left(sizes, min(num_tokens, sizes[-1])) + 1]):
            for most in LENGTHS[: bisect_left(LENGTHS, longest) + 1]:
                if size <= most * self._sizes.max_prompts:
                    self._step(Key(size, most))

    def profile(self, batch: Batch, storage: Storage) -> tuple[Array, list[TimedOperation]]:
        """A graph is one operation to the host: no times."""
        return self.run(batch, storage), []

    def _key(self, num_tokens: int, segment: AttentionSegment) -> Key | None:
        """None: no graph fits the texts."""
        sizes = self._sizes.tokens
        if num_tokens > sizes[-1] or segment.num_sequences > self._sizes.max_prompts:
            return None
        size = sizes[bisect_left(sizes, num_tokens)]
        return Key(size, next(most for most in LENGTHS if segment.max_query_len <= most))

    def _step(self, key: Key) -> TextStep:
        if key not in self._steps:
            segment, attention = self._segment(key), self._kernels.attention
            shapes = self._network.shapes
            rows = {attention.rows_of_tile(shape, segment, self._kernels.dtype, None) for shape in shapes}
            step = TextStep.new(self._sizes, key.size, sorted(rows), self._kernels.device)
            if self._on_gpu:
                step.graph = self._recorder.record(lambda: self._run(step, key))
            self._steps[key] = step
        return self._steps[key]

    def _segment(self, key: Key) -> AttentionSegment:
        return replace(self._split.prompt_segment(key.size), max_query_len=key.longest)

    def _run(self, step: TextStep, key: Key) -> None:
        segment = self._segment(key)
        self._kernels.attention.stage_texts(segment, step.tiles)
        batch = Batch(step.token_ids, step.positions, None, (segment,), None)
        hidden = tensor(self._network.forward(self._kernels, batch, None))
        if self._hidden is None:
            self._hidden = hidden.new_empty((self._sizes.tokens[-1], hidden.shape[1]))
        self._hidden[: key.size].copy_(hidden)
