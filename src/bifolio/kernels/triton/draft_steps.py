"""Drafts of a head as two CUDA graphs: one pass over hidden states of the target, then the whole chain of drafts.

    pass    tokens and states of each sequence, up to the newest       -> hidden state of its last token
    chain   draw a draft token, run the head on it and on its own hidden state, draw the next, ...

Sequences are rows of a state of their own (`DeviceState`): block tables that begin with the head's context, and copies
of the sampling parameters of their slots. The host waits once for all drafts of a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bifolio.kernels.interface import Batch, DraftNetwork, SplitNetwork, Storage
from bifolio.kernels.triton.cuda_graphs import TURNS, GraphKernels, GraphRecorder
from bifolio.kernels.triton.device_state import DeviceState, begin_step, recorded_event
from bifolio.kernels.triton.draft_draws import copy_sampling
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.prompt_graphs import PromptGraphs, Sizes
from bifolio.kernels.triton.sampling import Mode, Results, choose_tokens

ON_GPU = Sizes((4, 8, 16, 32, 64, 128, 256), 32)
INTERPRETED = Sizes((8, 24), 4)
ROWS = (1, 2, 4, 8, 16, 32)  # sequences of a chain: fewer are padded to the next of these numbers


@dataclass(slots=True)
class Chain:
    """The graph of one number of rows and of drafts, and its static inputs."""

    rows: torch.Tensor  # i32[r]  -1: padding
    hidden: torch.Tensor  # [r, d]  of the token before the first draft
    layout: tuple[torch.Tensor, ...]  # token ids, positions, index, contexts, table rows of a pass
    turns: list[torch.Tensor]  # i32[1] of each draft
    results: list[Results]  # of each draft
    pieces: dict[int, Any] = field(default_factory=dict)
    graph: Any = None
    next_turn: int = 0


@dataclass(slots=True)
class PendingDrafts:
    """Drafts in flight."""

    results: list[Results]
    turn: int
    count: int
    event: Any = None

    def wait(self) -> np.ndarray:
        """i32[n, length]; -1 where no token can be sampled."""
        if self.event is not None:
            self.event.synchronize()
        return np.stack([each.chosen[self.turn].numpy()[: self.count] for each in self.results], axis=1)


class DraftSteps:
    """Launches the passes of a head."""

    def __init__(
        self,
        kernels: GraphKernels,
        network: DraftNetwork,
        storage: Storage,
        source: DeviceState,
        vocab_size: int,
        mode_of: Callable[[np.ndarray], Mode],  # of draws for slots
    ) -> None:
        self._kernels, self._network, self._storage, self._source = kernels, network, storage, source
        self._vocab_size, self._mode_of = vocab_size, mode_of
        device, sizes = source.device, ON_GPU if source.on_gpu else INTERPRETED
        self._state = DeviceState(source.num_slots, source.max_blocks, device)
        self._entries = torch.zeros(source.num_slots, dtype=torch.int32, device=device)  # of each row's head
        self._recorder = GraphRecorder(device)
        split = SplitNetwork(
            network.from_target, network.logits, network.prompt_segment, given_width=network.given_width
        )
        self._passes = PromptGraphs(
            kernels, split, (network.shape,), network.decode_segment, storage, self._state, self._recorder, sizes
        )
        self._chains: dict[tuple[int, int, Mode], Chain] = {}
        ids = network.token_ids
        self._ids = None if ids is None else torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(device)

    def draft(
        self,
        batch: Batch,  # of the first pass, on the host; its hidden states are `given`
        tables: np.ndarray,  # i32[n, blocks]  of the rows; 0: no block
        slots: np.ndarray,  # i32[n]
        positions: np.ndarray,  # i64[n]  of the first draft tokens
        entries: np.ndarray,  # i64[n]  of the head, before the first pass of the chain
        length: int,
    ) -> PendingDrafts | None:
        """Draft `length` tokens for each row; None if there are too many rows or tokens."""
        count, mode = len(slots), self._mode_of(slots)
        if count > min(ROWS[-1], self._state.num_slots):
            return None
        for row, table in enumerate(tables):
            self._state.set_blocks(row, 0, table)
        hidden = self._passes.hidden_rows(batch, np.arange(count))
        if hidden is None:
            return None
        chain = self._chain(self._size(count), length, mode)
        words = np.full(len(chain.rows), -1)
        words[:count] = np.arange(count)
        sent = self._source.send_words(np.concatenate([words, entries, slots, positions - 1]).astype(np.int32))
        rows, starts, own, lengths = torch.split(sent, [len(words), count, count, count])
        copy_sampling(self._source, own, self._state, lengths)
        chain.rows.copy_(rows)
        self._entries[:count] = starts
        chain.hidden[:count] = hidden
        if chain.graph is None:
            self._run(chain, mode)
        else:
            chain.graph.replay()
        turn, chain.next_turn = chain.next_turn, (chain.next_turn + 1) % TURNS
        return PendingDrafts(chain.results, turn, count, None if chain.graph is None else recorded_event())

    def warm_up(self, longest: int) -> None:
        """Capture all steps of greedy drafts and of those drawn with filters now."""
        self._passes.capture_all()
        for size in reversed(ROWS):
            if size <= self._state.num_slots:
                for mode in (Mode(), Mode("filter")):
                    for length in range(longest, 0, -1):
                        self._chain(size, length, mode)

    def _size(self, count: int) -> int:
        return ROWS[bisect_left(ROWS, count)] if self._state.on_gpu else count

    def _chain(self, size: int, length: int, mode: Mode) -> Chain:
        key = size, length, mode
        if key not in self._chains:
            self._chains[key] = chain = self._new_chain(size, length, mode)
            if self._state.on_gpu:
                chain.graph = self._recorder.record(lambda: self._run(chain, mode))
                for turn in chain.turns:
                    turn.fill_(TURNS - 1)  # recording used one buffer
        return self._chains[key]

    def _new_chain(self, size: int, length: int, mode: Mode) -> Chain:
        device = self._state.device

        def integers(dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        layout = integers(), integers(), integers(torch.int64), integers(), integers()
        turns = [torch.full((1,), TURNS - 1, dtype=torch.int32, device=device) for _ in range(length)]
        results = [Results.new(TURNS, size, mode, pinned=self._state.on_gpu) for _ in range(length)]
        hidden = torch.zeros((size, self._network.hidden_size), dtype=torch.float32, device=device)
        return Chain(integers().fill_(-1), hidden, layout, turns, results)

    def _run(self, chain: Chain, mode: Mode) -> None:
        hidden: Any = chain.hidden
        for number, (turn, results) in enumerate(zip(chain.turns, chain.results, strict=True)):
            self._begin(chain, turn)
            if number:
                hidden = self._pass(chain, hidden)
                self._entries.add_(1)
            logits = self._whole(tensor(self._network.logits(self._kernels, hidden)))
            choose_tokens(logits, chain.rows, self._state, turn, results, mode)

    def _begin(self, chain: Chain, turn: torch.Tensor) -> None:
        """Lay out the newest draft token of every row, at its place in the head's context."""
        tokens, positions, index, contexts, table_rows = chain.layout
        begin_step(
            chain.rows, self._state.tables, self._entries, self._state.ropes, self._state.tokens, tokens, positions,
            index, contexts, table_rows, turn, self._storage.block_size, TURNS,
        )  # fmt: skip

    def _pass(self, chain: Chain, hidden: Any) -> torch.Tensor:
        """The head on its own hidden states: [r, d]"""
        tokens, positions, index, contexts, table_rows = chain.layout
        segment = replace(
            self._network.decode_segment(len(chain.rows)),
            block_tables=self._state.tables,
            context_lens=contexts,
            max_context_len=self._state.max_blocks * self._storage.block_size,
        )
        self._kernels.attention.stage_decode(segment, table_rows, chain.pieces, (self._network.shape,), self._storage)
        batch = Batch(tokens, positions, index, (segment,), None, given=hidden)
        return tensor(self._network.from_own(self._kernels, batch, self._storage))

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """f32[r, vocab of the target]: tokens that the head does not know are excluded."""
        if self._ids is None:
            return logits
        shape = logits.shape[0], self._vocab_size
        whole = torch.full(shape, float("-inf"), dtype=torch.float32, device=logits.device)
        return whole.index_copy_(1, self._ids, logits.float())
