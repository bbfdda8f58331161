"""Decode steps captured up to the logits: for batches whose tokens are not chosen by the captured step itself.

Beams, penalties, filters and logprobs look at the logits; the pass before them is the same for all, and launching it
kernel by kernel would take longer than running it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bifolio.engine.executor import DecodeExecutor
from bifolio.engine.gpu.cuda_graphs import GraphRecorder, batch_sizes
from bifolio.kernels.interface import Array, AttentionPhase, AttentionSegment, Batch
from bifolio.model.transformer import forward


@dataclass(slots=True)
class _Graph:
    """One batch size: inputs that stay where they are, and what comes out."""

    token_ids: torch.Tensor  # i32[r]
    positions: torch.Tensor  # i32[r]
    places: torch.Tensor  # i64[r]
    contexts: torch.Tensor  # i32[r]  0: padding
    tables: torch.Tensor  # i32[r, max_blocks]
    table_rows: torch.Tensor  # i32[r]
    pieces: dict[int, Any] = field(default_factory=dict)
    logits: Any = None  # f32[r, vocab]
    graph: Any = None


@dataclass(frozen=True, slots=True)
class CapturedLogits(DecodeExecutor):
    """A `DecodeExecutor` that replays a captured pass where it can; the logits are valid until the next step."""

    recorder: GraphRecorder
    max_slots: int
    max_blocks: int
    graphs: dict[int, _Graph] = field(default_factory=dict)

    def run(self, batch: Batch) -> Array:
        if not self._fits(batch):
            return self.runner.run(batch)
        sizes = batch_sizes(self.max_slots)
        size = sizes[bisect_left(sizes, batch.num_tokens)]
        if size not in self.graphs:
            self.graphs[size] = self._record(size)
        graph = self.graphs[size]
        self._fill(graph, batch)
        graph.graph.replay()
        return graph.logits[: batch.num_tokens]

    def _fits(self, batch: Batch) -> bool:
        """One query each, and the logits of every row are wanted in order."""
        if len(batch.segments) != 1 or batch.logit_rows is None or batch.num_tokens > self.max_slots:
            return False
        segment = batch.segments[0]
        is_decode = segment.phase is AttentionPhase.DECODE and segment.max_query_len == 1
        return is_decode and segment.block_tables is not None and len(batch.logit_rows) == batch.num_tokens

    def _fill(self, graph: _Graph, batch: Batch) -> None:
        count, segment = batch.num_tokens, batch.segments[0]
        tables: Any = segment.block_tables
        places: Any = batch.slots
        lengths = np.zeros(len(graph.contexts), dtype=np.int32)
        lengths[:count] = segment.context_lens
        graph.token_ids[:count].copy_(batch.token_ids)
        graph.positions[:count].copy_(batch.positions)
        graph.places[:count].copy_(places)
        graph.places[count:].zero_()  # what padding writes goes to block 0
        graph.tables[:count, : tables.shape[1]].copy_(tables)
        graph.contexts.copy_(self.runner.kernels.from_host(lengths))

    def _record(self, size: int) -> _Graph:
        device = self.runner.kernels.device

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        graph = _Graph(
            integers(size),
            integers(size),
            integers(size, dtype=torch.int64),
            integers(size),
            integers(size, self.max_blocks),
            torch.arange(size, dtype=torch.int32, device=device),
        )
        graph.graph = self.recorder.record(lambda: self._pass(graph))
        return graph

    def _pass(self, graph: _Graph) -> None:
        runner = self.runner
        kernels: Any = runner.kernels
        size = len(graph.token_ids)
        segment = AttentionSegment(
            phase=AttentionPhase.DECODE,
            token_start=0,
            token_end=size,
            query_starts=np.arange(size + 1, dtype=np.int32),
            context_lens=graph.contexts,
            block_tables=graph.tables,
            fresh=False,
            max_query_len=1,
            max_context_len=self.max_blocks * runner.storage.block_size,
        )
        shapes = tuple({layer.shape.window: layer.shape for layer in runner.weights.layers}.values())
        kernels.stage_decode(segment, graph.table_rows, graph.pieces, shapes)
        batch = Batch(graph.token_ids, graph.positions, graph.places, (segment,), None)
        graph.logits = forward(runner.weights, batch, kernels, runner.storage)
