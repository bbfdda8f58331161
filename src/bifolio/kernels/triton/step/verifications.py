# mypy: disallow-untyped-decorators=False
"""Verification of drafts in one launch: a pass over newest tokens and drafts, draws after each, acceptance.

    tokens    |  x  |  g1  |  g2  |  g3  |      of each sequence
    sampled   |  d1 |  d2  |  d3  |  d4  |      g1 = d1, g2 = d2, g3 ≠ d3: d1 d2 d3 are kept

Each token is a decode with a context of its own: keys and values of all tokens are written before attention reads them.
Drafts, lengths and newest tokens are in the slots on the device, which advance by the accepted tokens: the host sends
the slots, and learns the tokens later. `HeadSteps` reads the hidden states and the last accepted tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.errors import PhaseError
from bifolio.kernels.interface import Batch, Network, Storage
from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.graphs.graph_cache import GraphCache
from bifolio.kernels.triton.graphs.results import TURNS, DeviceTokens, TokenPass
from bifolio.kernels.triton.graphs.sizes import SEQUENCES, padded, sequence_sizes
from bifolio.kernels.triton.sampling import Mode, choose_tokens
from bifolio.kernels.triton.step.decodes import GraphKernels
from bifolio.kernels.triton.step.draws import copy_columns

MOST_DRAFTS = 32  # of a sequence
MOST_ROWS = 256  # tokens of a step


class VerifyKey(NamedTuple):
    """A verification."""

    size: int  # sequences
    width: int  # tokens of each: the newest and its drafts
    mode: Mode


class VerifyPass(TokenPass):
    """The verification of a key; its inputs are those of `VerifyInputs`."""

    def __init__(self, steps: Verifications, key: VerifyKey) -> None:
        super().__init__(key.size * key.width, key.mode, steps.state.device)
        self._steps, self.key = steps, key
        self.pieces: dict[int, Any] = {}

    def run(self) -> None:
        self._steps.run(self)


class VerifyInputs:
    """Static arrays of all verifications; a step uses their first rows."""

    def __init__(self, device: str, tap_width: int) -> None:
        def integers(dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(MOST_ROWS, dtype=dtype, device=device)

        self.words = torch.full((2 * MOST_ROWS,), -1, dtype=torch.int32, device=device)
        self.token_ids, self.positions, self.index = integers(), integers(), integers(torch.int64)
        self.contexts, self.table_rows = integers(), integers()
        self.places = integers()  # i32  position of each token in its sequence
        self.draws = integers()  # i32  row of each draw; -1: padding
        self.last = integers()  # i32[s]  row of the last accepted token of each sequence
        self.taps = torch.zeros((MOST_ROWS, tap_width), dtype=torch.float32, device=device) if tap_width else None

    def rows(self, count: int) -> torch.Tensor:
        """i32[count]: slot of each token; -1: padding."""
        return self.words[:count]

    def sent(self, count: int) -> torch.Tensor:
        """i32[count]: tokens that the host sends; -1: the slot's newest token or draft."""
        return self.words[count : 2 * count]


class Verifications:
    """Launches verifications on the state of the slots."""

    def __init__(
        self, kernels: GraphKernels, network: Network, storage: Storage, state: DeviceState, cache: GraphCache
    ) -> None:
        self._kernels, self._network, self._storage, self.state = kernels, network, storage, state
        self._cache = cache
        self._shapes = tuple({shape.reach: shape for shape in network.shapes}.values())
        self._sent = b""  # present contents of the words
        self.inputs = VerifyInputs(state.device, 0 if network.split is None else network.split.tap_width)
        self.sampled = DeviceState(MOST_ROWS, 0, state.device)  # a slot for each token
        shape = state.num_slots, MOST_DRAFTS
        self.drafts = torch.zeros(shape, dtype=torch.int32, device=state.device)  # i32[slots, MOST_DRAFTS]
        self.last: VerifyKey | None = None  # the last launch
        self._lengths: list[int] = []  # numbers of drafts that are captured at the start

    def fits(self, count: int, width: int) -> bool:
        """Whether a step has room for this number of sequences and of tokens of each."""
        width = next((length + 1 for length in self._lengths if length >= width - 1), width)
        return count <= self._most and self._size(count) * width <= MOST_ROWS and width <= MOST_DRAFTS + 1

    def launch(self, slots: np.ndarray, drafts: np.ndarray, mode: Mode) -> DeviceTokens:
        """Verify `drafts` (i32[n, width - 1]; -1: on the device, -2: none) of `slots`; tokens of all that exist.

        The slots' lengths and newest tokens advance on the device.
        """
        count, most = len(slots), drafts.shape[1]
        width = next((length for length in self._lengths if length >= most), most) + 1
        self.last = key = VerifyKey(self._size(count), width, mode)
        step = self._step(key)
        words = np.full((2, key.size, width), -1, dtype=np.int32)
        words[0, :count, 0] = slots
        words[0, :count, 1 : most + 1] = np.where(drafts < -1, -1, slots[:, None])
        words[1, :count, 1 : most + 1] = np.maximum(drafts, -1)
        self._send(words)
        step.launch()
        return step.tokens(key.size * width, np.flatnonzero(words[0].reshape(-1) >= 0))

    def states(self, number: int) -> torch.Tensor:
        """f32[1, width]: a copy of the hidden state of the first token of a sequence of the last launch."""
        if self.inputs.taps is None or self.last is None:
            raise PhaseError("no verification has returned hidden states: the network has no taps, or none has run")
        row = number * self.last.width
        return self.inputs.taps[row : row + 1].clone()

    def capture_all(self, lengths: list[int], modes: tuple[Mode, ...]) -> None:
        """Capture the steps of these numbers of drafts now, the largest first; others are padded to the next."""
        self._lengths = sorted(lengths)
        for length in sorted(lengths, reverse=True):
            for size in reversed(sequence_sizes(self._most)):
                if size * (length + 1) <= MOST_ROWS:
                    for mode in modes:
                        self._step(VerifyKey(size, length + 1, mode))

    @property
    def _most(self) -> int:
        return min(SEQUENCES[-1], self.state.num_slots)

    def _size(self, count: int) -> int:
        return padded(SEQUENCES, count) if self.state.on_gpu else count

    def _send(self, words: np.ndarray) -> None:
        """Send words and pending updates of the slots; unchanged words are not sent again."""
        wanted = words.tobytes()
        if self._sent == wanted:
            self.state.send()
        else:
            self.inputs.words[: words.size].copy_(self.state.send_words(words.reshape(-1)))
            self._sent = wanted

    def _step(self, key: VerifyKey) -> VerifyPass:
        return self._cache.find(key, lambda: self._new_pass(key))

    def _new_pass(self, key: VerifyKey) -> VerifyPass:
        """A step whose inputs are padding, since recording runs it."""
        self.inputs.words.fill_(-1)
        self._sent = b""
        return VerifyPass(self, key)

    def run(self, step: VerifyPass) -> None:
        inputs, state, key, count = self.inputs, self.state, step.key, step.key.size * step.key.width
        if key.mode.kind != "greedy":
            copy_columns(state, inputs.rows(count).clamp_min(0), self.sampled)
        self._begin(step)
        segment = replace(
            self._network.decode_segment(count),
            block_tables=state.tables,
            context_lens=inputs.contexts[:count],
            max_context_len=state.max_blocks * self._storage.block_size,
        )
        self._kernels.attention.stage_decode(
            segment, inputs.table_rows[:count], step.pieces, self._shapes, self._storage
        )
        taps = None if inputs.taps is None else inputs.taps[:count]
        batch = Batch(
            inputs.token_ids[:count], inputs.positions[:count], inputs.index[:count], (segment,), None, taps=taps
        )
        logits = self._network.forward(self._kernels, batch, self._storage)
        choose_tokens(logits, inputs.draws[:count], self.sampled, step.ring.turn, step.ring.results, key.mode)
        _accept_kernel[(key.size,)](
            inputs.rows(count), inputs.token_ids, self.sampled.tokens, state.lengths, state.tokens, inputs.last,
            key.width, WIDTH=triton.next_power_of_2(key.width), num_warps=1,
        )  # fmt: skip

    def _begin(self, step: VerifyPass) -> None:
        inputs, state, block, width = self.inputs, self.state, 64, step.key.width
        count = step.key.size * width
        _begin_kernel[(triton.cdiv(count, block),)](
            inputs.rows(count), inputs.sent(count), state.tables, state.lengths, state.ropes, state.tokens,
            self.drafts, inputs.token_ids, inputs.positions, inputs.index, inputs.contexts, inputs.table_rows,
            inputs.places, inputs.draws, self.sampled.lengths, step.ring.turn, count, width, state.tables.stride(0),
            TURNS=TURNS, MOST=MOST_DRAFTS, BLOCK_SIZE=self._storage.block_size, BLOCK=block, num_warps=1,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "width", "table_stride"],
    do_not_specialize_on_alignment=["rows", "sent", "tables", "lengths", "ropes", "newest", "drafts", "draw_lengths"],
)
def _begin_kernel(
    rows: tl.tensor,  # i32[r]  slot of each token; -1: padding
    sent: tl.tensor,  # i32[r]  token; -1: the slot's
    tables: tl.tensor,  # i32[slots, max_blocks]
    lengths: tl.tensor,  # i32[slots]
    ropes: tl.tensor,  # i32[slots]
    newest: tl.tensor,  # i32[slots]
    drafts: tl.tensor,  # i32[slots, MOST]
    token_ids: tl.tensor,  # i32[r]
    positions: tl.tensor,  # i32[r]
    index: tl.tensor,  # i64[r]
    contexts: tl.tensor,  # i32[r]
    table_rows: tl.tensor,  # i32[r]
    places: tl.tensor,  # i32[r]
    draws: tl.tensor,  # i32[r]
    draw_lengths: tl.tensor,  # i32[r]
    turn: tl.tensor,  # i32[1]
    num_rows: tl.tensor,
    width: tl.tensor,
    table_stride: tl.tensor,
    TURNS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    if tl.program_id(0) == 0:
        tl.store(turn, (tl.load(turn) + 1) % TURNS)
    slot = tl.load(rows + row, mask=exists, other=-1)
    real, number = slot >= 0, row % width
    position = tl.load(lengths + slot, mask=real, other=0) + tl.where(real, number, 0)
    token = tl.load(sent + row, mask=exists, other=0)
    own = tl.load(newest + slot, mask=real & (number == 0), other=0)
    draft = tl.load(drafts + slot.to(tl.int64) * MOST + number - 1, mask=real & (number > 0), other=0)
    token = tl.where(token < 0, tl.where(number == 0, own, draft), token)
    block = tl.load(tables + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=real, other=0)
    tl.store(token_ids + row, tl.maximum(token, 0), mask=exists)
    tl.store(positions + row, position + tl.load(ropes + slot, mask=real, other=0), mask=exists)
    tl.store(index + row, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=exists)
    tl.store(contexts + row, tl.where(real, position + 1, 0), mask=exists)
    tl.store(table_rows + row, tl.maximum(slot, 0), mask=exists)
    tl.store(places + row, position, mask=exists)
    tl.store(draws + row, tl.where(real, row, -1), mask=exists)
    tl.store(draw_lengths + row, position, mask=exists)


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["rows", "sampled", "lengths", "newest"],
)
def _accept_kernel(
    rows: tl.tensor,  # i32[s, width]  slots; -1: padding
    token_ids: tl.tensor,  # i32[s, width]
    sampled: tl.tensor,  # i32[s, width]
    lengths: tl.tensor,  # i32[slots]  become those after the accepted tokens
    newest: tl.tensor,  # i32[slots]
    last: tl.tensor,  # i32[s]  row of the last accepted token
    width: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    sequence, place = tl.program_id(0), tl.arange(0, WIDTH)
    first = sequence * width
    slot = tl.load(rows + first)
    follows = place + 1 < width
    is_draft = tl.load(rows + first + place + 1, mask=follows, other=-1) >= 0
    guess = tl.load(token_ids + first + place + 1, mask=is_draft, other=-1)
    drawn = tl.load(sampled + first + place, mask=is_draft, other=-2)
    accepted = tl.min(tl.where(guess != drawn, place, WIDTH), axis=0)
    tl.store(last + sequence, first + accepted)
    if slot >= 0:
        tl.store(newest + slot, tl.load(sampled + first + accepted))
        tl.store(lengths + slot, tl.load(lengths + slot) + accepted + 1)
