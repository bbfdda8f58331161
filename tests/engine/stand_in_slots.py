"""A stand-in for a device that keeps the slots: steps are launched ahead and drawn there, all of it in numpy.

It knows nothing but the data that the engine sends, and it is as unforgiving as a device: logits are overwritten by the
next launch, and a mask serves for one draw.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.cache.table_states import StatePass
from bifolio.engine.host_batch import ON_DEVICE, HostBatch, Run
from bifolio.engine.speculative.speculator import num_accepted
from bifolio.kernels.interface import (
    Adapter,
    AdapterUse,
    Batch,
    DraftNetwork,
    Network,
    SlotSizes,
    Storage,
    TokenScores,
)
from bifolio.kernels.logit_edits import LogitEdits
from bifolio.kernels.reference import ReferenceKernels
from bifolio.sampling.sampler import NOTHING, Sampler, SamplingTable
from bifolio.sampling.weights import shift, to_weights
from bifolio.sampling_params import SamplingParams

NUM_TOP = 4  # likely tokens that the device reports


@dataclass
class Drawn:
    """Tokens of a step; the engine may read them at any time later."""

    tokens: np.ndarray
    found: TokenScores

    def wait(self) -> np.ndarray:
        return self.tokens.copy()

    def scores(self) -> TokenScores:
        return self.found


@dataclass
class SentMask:
    """Implements `TokenMask`: the row of a slot as it was sent."""

    row: np.ndarray

    def allowed(self, pending: Any) -> np.ndarray:
        return self.row

    def restart(self) -> None: ...


@dataclass
class Verified:
    """A slot of a verification."""

    start: int  # position of its newest token
    drawn: list[int]
    accepted: int
    states: np.ndarray  # f32[t, width]


@dataclass
class Drafted:
    """Draft tokens; the engine may read them later."""

    tokens: np.ndarray

    def wait(self) -> np.ndarray:
        return self.tokens.copy()


class StandInDrafts:
    """Implements `DraftSlots`."""

    def __init__(self, slots: StandInSlots, kernels: ReferenceKernels, network: DraftNetwork, storage: Storage) -> None:
        self._slots, self._kernels, self._network, self._storage = slots, kernels, network, storage
        self._starts: dict[int, int] = {}  # position of the first entry of each slot's context

    def draft(
        self, batch: Batch, tables: np.ndarray, slots: np.ndarray, positions: np.ndarray, entries: np.ndarray,
        length: int,
    ) -> Drafted:  # fmt: skip
        self._slots.calls["draft"] += 1
        for slot, start in zip(slots.tolist(), (positions - 1 - entries).tolist(), strict=True):
            self._starts[slot] = start
        hidden = self._network.from_target(self._kernels, batch, self._storage)
        return self._chain(np.asarray(hidden)[batch.logit_rows], tables, slots, positions, entries, length)

    def read(self, batch: Batch, tables: np.ndarray, slots: np.ndarray) -> bool:
        self._slots.calls["read"] += 1
        self._network.from_target(self._kernels, batch, self._storage)
        return True

    def follow(self, slots: np.ndarray, tables: np.ndarray, length: int) -> Drafted:
        self._slots.calls["follow"] += 1
        verified, tables = self._slots.verified, np.pad(tables, ((0, 0), (0, self._slots.max_blocks - tables.shape[1])))
        starts = [max(each.start - self._starts.get(slot, 0), 0) for slot, each in zip(slots, verified, strict=True)]
        runs = [Run(row, start, each.drawn) for row, (start, each) in enumerate(zip(starts, verified, strict=True))]
        batch = HostBatch.from_runs(runs, [], tables, self._storage.block_size).to(self._kernels)
        given = np.concatenate([each.states for each in verified]) * self._network.state_scale
        hidden = np.asarray(self._network.from_target(self._kernels, replace(batch, given=given), self._storage))
        firsts = np.cumsum([0] + [len(each.drawn) for each in verified[:-1]])
        accepted = np.array([each.accepted for each in verified])
        positions = np.array([each.start for each in verified]) + accepted + 2
        entries = np.array(starts) + accepted + 1
        return self._chain(hidden[firsts + accepted], tables, slots, positions, entries, length)

    def _chain(
        self, hidden: np.ndarray, tables: np.ndarray, slots: np.ndarray, positions: np.ndarray, entries: np.ndarray,
        length: int,
    ) -> Drafted:  # fmt: skip
        tokens: list[np.ndarray] = []
        for number in range(length):
            if number:
                runs = [Run(row, int(entries[row]) + number - 1, (int(tokens[-1][row]),)) for row in range(len(slots))]
                batch = HostBatch.from_runs(runs, [], tables, self._storage.block_size).to(self._kernels)
                given = replace(batch, given=hidden)
                hidden = np.asarray(self._network.from_own(self._kernels, given, self._storage))
            tokens.append(self._slots.sample_drafts(self._whole(hidden), slots, positions + number).clip(0))
        for row, slot in enumerate(slots.tolist()):
            self._slots.drafts[slot] = [int(each[row]) for each in tokens]
        return Drafted(np.stack(tokens, axis=1))

    def _whole(self, hidden: np.ndarray) -> np.ndarray:
        logits = np.asarray(self._network.logits(self._kernels, hidden))
        if self._network.token_ids is None:
            return logits
        whole = np.full((len(logits), self._slots.vocab_size), -np.inf, np.float32)
        whole[:, self._network.token_ids] = logits
        return whole

    def warm_up(self, longest: int) -> None: ...


class StandInSlots:
    """Implements `DeviceSlots`."""

    def __init__(self, kernels: ReferenceKernels, network: Network, storage: Storage, sizes: SlotSizes) -> None:
        self._kernels, self._network, self._storage = kernels, network, storage
        self._sampler = Sampler(sizes.vocab_size, SamplingTable(sizes.num_slots, sizes.vocab_size))
        self._tables = np.zeros((sizes.num_slots, sizes.max_blocks), np.int32)
        self._lengths = np.zeros(sizes.num_slots, np.int64)
        self._tokens = np.zeros(sizes.num_slots, np.int32)
        self._masks = np.zeros((sizes.num_slots, -(-sizes.vocab_size // 32)), np.int32)
        self._outputs: list[list[int]] = [[] for _ in range(sizes.num_slots)]
        self._options: list[tuple[SamplingParams, int, bool]] = [(SamplingParams(), 0, False)] * sizes.num_slots
        self._edits: list[LogitEdits | None] = [None] * sizes.num_slots
        self._adapters: dict[int, Adapter | None] = {}
        self._ropes: dict[int, int] = {}  # added to the positions of a slot's tokens
        self._states: dict[int, StatePass] = {}  # of the next decode step of each slot; empty: no recurrent layers
        self._sent: tuple[np.ndarray, np.ndarray] | None = None  # slots, rows of masks
        self._logits: np.ndarray | None = None  # of the last launch
        self.vocab_size, self.max_blocks = sizes.vocab_size, sizes.max_blocks
        self.drafts: dict[int, list[int]] = {}  # of a head, by slot
        self.verified: list[Verified] = []  # by the slots of the last verification
        self.calls: Counter[str] = Counter()

    # -- slots ---------------------------------------------------------------------------------------------------------
    def draws(self, params: SamplingParams, edits: LogitEdits) -> bool:
        return (params.logprobs or 0) <= NUM_TOP

    def set_params(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        edits: LogitEdits | None,
        rope: int = 0,
        adapter: Adapter | None = None,
    ) -> None:
        self._adapters[slot] = adapter
        self._options[slot] = replace(params, min_tokens=0), seed, edits is not None and edits.has_mask
        self._edits[slot], self._ropes[slot] = edits, rope
        self._set(slot, np.zeros(0, np.int32), [])

    def set_history(self, slot: int, prompt: np.ndarray, output: Any) -> None:
        self._set(slot, prompt, list(output))

    def _set(self, slot: int, prompt: np.ndarray, output: list[int]) -> None:
        params, seed, has_mask = self._options[slot]
        self._outputs[slot] = output
        mask = SentMask(self._masks[slot]) if has_mask else None
        self._sampler.table.set(slot, params, seed, prompt, output, mask=mask)

    def set_mask(self, slot: int, is_used: bool) -> None:
        params, seed, _ = self._options[slot]
        self._options[slot] = params, seed, is_used
        self._set(slot, np.zeros(0, np.int32), [])  # a mask is the only edit: no token is counted

    def mask_rows(self, slots: np.ndarray) -> np.ndarray:
        self.calls["mask_rows"] += 1
        rows = np.full((len(slots), self._masks.shape[1]), 0x55555555, np.int32)
        self._sent = slots.copy(), rows
        return rows

    def set_blocks(self, slot: int, first: int, block_ids: Any) -> None:
        self._tables[slot, first : first + len(block_ids)] = block_ids

    def set_progress(self, slots: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> None:
        self._lengths[slots] = lengths
        self._tokens[slots] = np.where(tokens < 0, self._tokens[slots], tokens)

    def set_states(self, slots: np.ndarray, reads: np.ndarray, writes: np.ndarray) -> None:
        for slot, read, write in zip(slots.tolist(), reads.tolist(), writes.tolist(), strict=True):
            self._states[slot] = StatePass(read, () if write < 0 else ((0, write),))

    # -- steps ---------------------------------------------------------------------------------------------------------
    def fill_tokens(self, token_ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        self.calls["fill_tokens"] += 1
        filled = token_ids.copy()
        filled[: len(slots)] = np.where(token_ids[: len(slots)] < 0, self._tokens[slots], token_ids[: len(slots)])
        return np.maximum(filled, 0)

    def draw(self, logits: np.ndarray, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> Drawn:
        self.calls["draw"] += 1
        return self._draw(logits[rows], slots, positions)

    def decode(self, slots: np.ndarray, tables: np.ndarray, lengths: np.ndarray) -> Drawn:
        self.calls["decode"] += 1
        np.testing.assert_array_equal(lengths, self._lengths[slots])
        return self._draw(self._forward(slots), slots, self._lengths[slots] + 1)

    def decode_logits(self, slots: np.ndarray, tables: Any = None, lengths: Any = None) -> np.ndarray:
        self.calls["decode_logits"] += 1
        return self._forward(slots)

    def prompt_logits(self, batch: Any, slots: np.ndarray) -> None:
        """No step is captured."""

    def prompt_states(self, count: int) -> np.ndarray:
        raise AssertionError("no step is captured")

    def draw_drafts(self, logits: np.ndarray, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> Drawn:
        self.calls["draw_drafts"] += 1
        tokens = self._sampler.sample(logits[rows], slots, positions).token_ids
        return Drawn(tokens, _scores(logits[rows], tokens))

    def can_verify(self, slots: np.ndarray, length: int) -> bool:
        return not self._storage.layout.num_states and not any(self._adapters.get(int(slot)) for slot in slots)

    def verify(self, slots: np.ndarray, drafts: np.ndarray) -> Drawn:
        """The accepted tokens change nothing but the slots' own state: the engine learns them from the tokens alone."""
        self.calls["verify"] += 1
        runs, texts = [], []
        for slot, row in zip(slots.tolist(), drafts.tolist(), strict=True):
            own = self.drafts.get(slot, [])
            text = [
                own[place] if token == ON_DEVICE else token for place, token in enumerate(row) if token >= ON_DEVICE
            ]
            texts.append([max(int(self._tokens[slot]), 0), *text])
            runs.append(Run(slot, int(self._lengths[slot]), texts[-1], self._ropes.get(slot, 0)))
        batch = HostBatch.from_runs(runs, [], self._tables, self._storage.block_size).to(self._kernels)
        width = 0 if self._network.split is None else self._network.split.tap_width
        states = np.full((batch.num_tokens, width), np.nan, np.float32)
        logits = self._network.forward(self._kernels, replace(batch, taps=states if width else None), self._storage)
        owners = np.repeat(slots, [len(text) for text in texts])
        positions = np.concatenate([run.start + 1 + np.arange(len(run.tokens)) for run in runs])
        tokens = self._sampler.sample(np.array(logits), owners, positions).token_ids
        self.verified = []
        first = 0
        for slot, text in zip(slots.tolist(), texts, strict=True):
            drawn = tokens[first : first + len(text)].tolist()
            accepted = num_accepted(text[1:], drawn)
            self.verified.append(Verified(int(self._lengths[slot]), drawn, accepted, states[first : first + len(text)]))
            self._tokens[slot] = drawn[accepted]
            self._lengths[slot] += accepted + 1
            first += len(text)
        return Drawn(tokens, _scores(np.array(logits), tokens))

    def verified_states(self, row: int) -> np.ndarray:
        return self.verified[row].states[:1].copy()

    def draft_slots(self, network: DraftNetwork, storage: Storage) -> StandInDrafts:
        return StandInDrafts(self, self._kernels, network, storage)

    def sample_drafts(self, logits: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        tokens: np.ndarray = self._sampler.sample(logits, slots, positions).token_ids
        return tokens

    def warm_up(self) -> None: ...

    def prepare_adapter(self, adapter: Adapter) -> Adapter:
        return self._kernels.prepare_adapter(adapter)

    def stage_adapters(self, use: AdapterUse) -> AdapterUse:
        return use

    def warm_up_adapters(self) -> None: ...

    def _forward(self, slots: np.ndarray) -> np.ndarray:
        if self._logits is not None:
            self._logits[:] = np.nan
        tokens = np.maximum(self._tokens[slots], 0)
        runs = [
            Run(int(s), int(self._lengths[s]), (int(t),), self._ropes.get(int(s), 0), self._adapters.get(int(s)))
            for s, t in zip(slots, tokens, strict=True)
        ]
        states = [self._states.pop(int(slot)) for slot in slots] if self._states else None
        batch = HostBatch.from_runs(runs, [], self._tables, self._storage.block_size, states=states)
        self._logits = np.array(self._network.forward(self._kernels, batch.to(self._kernels), self._storage))
        return self._logits

    def _draw(self, logits: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> Drawn:
        if self._sent is not None:
            self._masks[self._sent[0]] = self._sent[1]
            self._sent = None
        tokens = self._sampler.sample(self._without_ends(logits, slots, positions), slots, positions).token_ids
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if token != NOTHING:
                self._outputs[slot].append(token)
        self._tokens[slots], self._lengths[slots] = tokens, positions
        self._masks[slots] = 0  # a mask serves for one draw
        return Drawn(tokens, _scores(logits, tokens))

    def _without_ends(self, logits: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The logits without the ends of texts that are too short; the positions of tokens are all it knows."""
        work = logits.copy()
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            edits = self._edits[slot]
            if edits is not None and position < edits.min_length:
                work[row, edits.end_ids] = -np.inf
        return work


def _scores(logits: np.ndarray, tokens: np.ndarray) -> TokenScores:
    shifted = shift(logits)
    own = np.take_along_axis(shifted, np.maximum(tokens, 0)[:, None].astype(np.int64), axis=-1)
    top = np.argsort(-shifted, axis=-1, kind="stable")[:, :NUM_TOP]
    ranks = np.count_nonzero(shifted > own, axis=-1) + 1
    return TokenScores(
        to_weights(shifted).sum(axis=-1), own[:, 0], ranks.astype(np.int32), top.astype(np.int32),
        np.take_along_axis(shifted, top, axis=-1),
    )  # fmt: skip


class StandInKernels(ReferenceKernels):
    """The reference kernels, with slots on such a device."""

    launches_ahead = True

    def recur(self, x: np.ndarray, recurrence: Any, batch: Batch, storage: Storage | None) -> np.ndarray:
        """A device finds no state for a pass over a cache that names none."""
        assert storage is None or batch.states is not None
        return super().recur(x, recurrence, batch, storage)

    def device_slots(self, network: Network, storage: Storage, sizes: SlotSizes) -> StandInSlots:
        return StandInSlots(self, network, storage, sizes)


class StandInMemory:
    """Implements `DeviceMemory`: a device of 1 GiB whose steps take 1 MiB."""

    def free_bytes(self) -> int:
        return 1 << 30

    def start_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        return 1 << 20


class MeasuredStandIn(StandInKernels):
    """A stand-in with a memory of its own: weights are moved there, and its cache is sized by a measured step."""

    def memory(self) -> StandInMemory:
        return StandInMemory()
