"""A state machine that drives the cache with real storage, and compares it with plain dictionaries.

The model of the cache is one list of tokens per sequence. A key is a function of the salt and of all
tokens up to its position, as in a real network; so a block found by content, shared, copied, truncated or recycled
wrongly reads back wrongly. Free blocks are poisoned with NaN, and copies run one by one in random order.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from modelled_cache import HEAD_DIM, NUM_HEADS, NUM_LAYERS, Modelled, contents

from bifolio.cache import (
    BeamSearchBlockSharing,
    BlockShareManager,
    KVCacheBlockManager,
    KvCacheEntry,
    SpeculativeDecodingSharing,
)
from bifolio.errors import CacheError, OutOfBlocksError
from helpers import kv_storage

MAX_SEQUENCES = 8
MAX_TOKENS = 24
TOKENS = (1, 2)  # few, so that prefixes meet

# The seeded-bug run can switch the manager's own check off, to see what reading back finds alone.
CHECKS_INVARIANTS = os.environ.get("BIFOLIO_MACHINE_INVARIANTS", "1") == "1"

seeds = st.integers(0, 2**32 - 1)


class CacheMachine(RuleBasedStateMachine):
    @initialize(block_size=st.sampled_from([4, 3, 5, 1]), num_blocks=st.integers(6, 30), seed=seeds)
    def start(self, block_size: int, num_blocks: int, seed: int) -> None:
        self.manager = KVCacheBlockManager(num_blocks, block_size)
        self.storage = kv_storage(NUM_LAYERS, num_blocks, block_size, NUM_HEADS, HEAD_DIM, poison=True)
        self.manager.on_free = self.storage.poison_blocks
        self.sharing = BlockShareManager(self.manager)
        self.active: dict[int, Modelled] = {}
        self.waiting: dict[int, Modelled] = {}  # preempted: hold no row
        self.committed: dict[tuple[bytes, tuple[int, ...]], None] = {}  # prefixes that may be found by content
        self.device_rows: dict[int, list[int]] = {}  # kept up to date by differences alone
        self.next_id = 0

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(seed=seeds)
    def admit(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(min(rng.randint(1, 3), MAX_SEQUENCES - len(self.active))):
            self._open(self._new_id(), self._prompt(rng))
        self._go_on(rng)

    @rule(seed=seeds)
    def readmit(self, seed: int) -> None:
        if self.waiting and len(self.active) < MAX_SEQUENCES:
            sequence_id = random.Random(seed).choice(sorted(self.waiting))
            self._open(sequence_id, self.waiting.pop(sequence_id))

    @rule(seed=seeds)
    def step(self, seed: int) -> None:
        self._step(random.Random(seed), with_events=False)

    @rule(seed=seeds)
    def eventful_step(self, seed: int) -> None:
        self._step(random.Random(seed), with_events=True)

    @rule(seed=seeds)
    def fork(self, seed: int) -> None:
        rng = random.Random(seed)
        parent_id, child_id = self._pick(rng), self._new_id()
        if len(self.active) < MAX_SEQUENCES:
            self.manager.fork(parent_id, child_id)
            self._fork_model(rng, parent_id, child_id)
        self._go_on(rng)

    @rule(seed=seeds)
    def truncate(self, seed: int) -> None:
        rng = random.Random(seed)
        sequence_id = self._pick(rng)
        self._cut(rng, sequence_id, rng.randint(0, self.active[sequence_id].written))
        self._go_on(rng)

    @rule(seed=seeds)
    def write_other_tokens(self, seed: int) -> None:
        """Cut a sequence, write over its blocks, and open its former tokens again: those blocks must not be found."""
        rng = random.Random(seed)
        sequence_id = self._pick(rng)
        model = self.active[sequence_id]
        if not model.written or len(self.active) >= MAX_SEQUENCES:
            return
        former = Modelled([*model.tokens[: model.written], 1], model.salt)
        self._cut(rng, sequence_id, rng.randrange(model.written))
        self._step(rng, with_events=False)
        self._open(self._new_id(), former)
        self._go_on(rng)

    @rule(seed=seeds)
    def finish(self, seed: int) -> None:
        rng = random.Random(seed)
        self._release(self._pick(rng))
        self._go_on(rng)

    @rule(seed=seeds)
    def preempt(self, seed: int) -> None:
        rng = random.Random(seed)
        self._preempt(self._pick(rng))
        self._go_on(rng)

    @rule(seed=seeds)
    def append_through_entry(self, seed: int) -> None:
        rng = random.Random(seed)
        sequence_id = self._pick(rng)
        model = self.active[sequence_id]
        data = contents(model.salt, model.tokens[: model.written + 1])[:, -1]
        entry = KvCacheEntry(self.storage, sequence_id, self.manager)
        if self.manager.blocks_needed([(sequence_id, 1)]) > self.manager.num_free_blocks:
            with pytest.raises(OutOfBlocksError):
                entry.append(data, -data)
            return
        entry.append(data, -data)
        model.written += 1
        self._commit_and_sample(rng, sequence_id)

    @rule(seed=seeds)
    def draft_and_verify(self, seed: int) -> None:
        rng = random.Random(seed)
        sequence_id = self._pick(rng)
        model = self.active[sequence_id]
        drafts = [rng.choice(TOKENS) for _ in range(rng.randint(1, 5))]
        if self.manager.blocks_needed([(sequence_id, len(drafts))]) > self.manager.num_free_blocks:
            return
        speculation = SpeculativeDecodingSharing(self.sharing, len(drafts))
        speculation.allocate_speculative_blocks(sequence_id, model.written)
        self._run_copies(rng)
        drafted = model.tokens[: model.written] + drafts
        self._write(sequence_id, drafted, model.salt, model.written, len(drafted))
        accepted = rng.randint(0, len(drafts))
        kept, freed = speculation.verify_speculation(sequence_id, accepted)
        assert not set(kept) & set(freed)
        model.written += accepted
        model.tokens = drafted[: model.written]
        self._commit_and_sample(rng, sequence_id)

    @rule(seed=seeds)
    def search_with_beams(self, seed: int) -> None:
        rng = random.Random(seed)
        base_id = self._pick(rng)
        if len(self.active) + 2 > MAX_SEQUENCES:
            return
        base = self.active[base_id]
        prefix = rng.randint(0, base.written)
        search = BeamSearchBlockSharing(self.sharing, 2)
        for beam_id in search.initialize_beams(base_id, prefix):
            self.active[beam_id] = Modelled([*base.tokens[:prefix], 1], base.salt, prefix, base.publishes)
            self.device_rows[beam_id] = []
        winner, loser = rng.sample([beam_id for beam_id in self.active if search.get_beam_info(beam_id)], 2)
        diverging = self.active[winner]
        point = rng.randint(0, prefix)
        diverging.tokens, diverging.written = [*base.tokens[:point], 2], point
        try:
            search.on_beam_divergence(winner, point)
        except OutOfBlocksError:
            assert self.manager.num_free_blocks == 0
        else:
            self._run_copies(rng)
            self._write(winner, diverging.tokens, base.salt, point, point + 1)
            diverging.written += 1
            self._commit_and_sample(rng, winner)
        search.cleanup_beams([loser])
        del self.active[loser], self.device_rows[loser]
        self._go_on(rng)

    @rule(seed=seeds)
    def drop_cached(self, seed: int) -> None:
        rng = random.Random(seed)
        if rng.random() < 0.1:
            self.manager.drop_cached()
            self.committed.clear()
            for model in self.active.values():
                model.publishes = False
        self._go_on(rng)

    # -- what must hold after every rule -----------------------------------------------------------------------------

    @invariant()
    def is_consistent(self) -> None:
        if CHECKS_INVARIANTS:
            self.manager.check_invariants()

    @invariant()
    def reads_back(self) -> None:
        for sequence_id, model in self.active.items():
            assert self.manager.num_tokens_of(sequence_id) == model.written < len(model.tokens)
            expected = contents(model.salt, model.tokens[: model.written])
            block_ids = self.manager.block_ids_of(sequence_id)
            for layer in range(NUM_LAYERS):
                keys, values = self.storage.gather(layer, block_ids, model.written)
                assert np.array_equal(keys, expected[layer]), (sequence_id, layer, keys, expected[layer])
                assert np.array_equal(values, -expected[layer]), (sequence_id, layer, values, -expected[layer])

    @invariant()
    def device_rows_follow(self) -> None:
        for sequence_id in self.active:
            first, block_ids = next(
                (changed[1:] for changed in self.manager.take_changes([sequence_id])),
                (len(self.manager.block_ids_of(sequence_id)), []),
            )
            row = self.device_rows.setdefault(sequence_id, [])
            assert first <= len(row)
            row[first:] = block_ids
            assert row == self.manager.block_ids_of(sequence_id)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for sequence_id in list(self.active):
            self._release(sequence_id)
        self.is_consistent()
        assert self.manager.num_free_blocks == self.manager.num_blocks - 1
        assert self.manager.sequence_ids() == []

    def _go_on(self, rng: random.Random) -> None:
        """Check, then let the sequences run on: what a rule has done wrong shows when blocks are written."""
        self.is_consistent()
        self.reads_back()
        self.device_rows_follow()
        for _ in range(rng.randint(0, 2)):
            self._step(rng, with_events=rng.random() < 0.3)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def _pick(self, rng: random.Random) -> int:
        return rng.choice(self._population(rng))

    def _population(self, rng: random.Random) -> list[int]:
        """The active sequences; never none, so that every rule can always do something."""
        while len(self.active) < 2:
            if self.waiting:
                sequence_id = min(self.waiting)
                self._open(sequence_id, self.waiting.pop(sequence_id))
            else:
                self._open(self._new_id(), self._prompt(rng))
        return sorted(self.active)

    def _prompt(self, rng: random.Random) -> Modelled:
        """A new prompt; often one that goes on from a prefix that was seen before, sometimes under another salt."""
        salt, prefix = b"", ()
        if self.committed and rng.random() < 0.7:
            salt, prefix = rng.choice(list(self.committed))
        if rng.random() < 0.2:
            salt = rng.choice([b"", b"tenant"])
        return Modelled([*prefix, *rng.choices(TOKENS, k=rng.randint(1, 6))], salt)

    def _open(self, sequence_id: int, model: Modelled) -> None:
        expected = self.manager.cached_prefix_length(model.tokens, salt=model.salt)
        model.written = self.manager.open_table(sequence_id, model.tokens, salt=model.salt)
        model.publishes = True
        assert model.written == expected < len(model.tokens)
        for end in range(self.manager.block_size, model.written + 1, self.manager.block_size):
            assert (model.salt, tuple(model.tokens[:end])) in self.committed, "found what nobody committed"
        self.active[sequence_id] = model
        self.device_rows[sequence_id] = []

    def _release(self, sequence_id: int) -> Modelled:
        before = self.manager.num_free_blocks
        freed = self.manager.release(sequence_id)
        assert len(set(freed)) == len(freed) == self.manager.num_free_blocks - before
        assert all(self.manager.ref_count(block_id) == 0 for block_id in freed)
        del self.device_rows[sequence_id]
        return self.active.pop(sequence_id)

    def _preempt(self, sequence_id: int) -> None:
        model = self._release(sequence_id)
        model.written = 0
        self.waiting[sequence_id] = model

    def _cut(self, rng: random.Random, sequence_id: int, keep: int) -> None:
        before = self.manager.num_free_blocks
        freed = self.manager.truncate(sequence_id, keep)
        assert len(set(freed)) == len(freed) == self.manager.num_free_blocks - before
        model = self.active[sequence_id]
        model.tokens, model.written = [*model.tokens[:keep], rng.choice(TOKENS)], keep

    def _fork_model(self, rng: random.Random, parent_id: int, child_id: int) -> None:
        parent = self.active[parent_id]
        tokens = [*parent.tokens[: parent.written], rng.choice(TOKENS)]
        self.active[child_id] = Modelled(tokens, parent.salt, parent.written, parent.publishes)
        self.device_rows[child_id] = []

    def _step(self, rng: random.Random, with_events: bool) -> None:
        """Plan, maybe disturb the plan, then copies, writes, commits: what an engine does."""
        population = self._population(rng)
        chosen = rng.sample(population, rng.randint(1, len(population)))
        batch = {s: rng.randint(1, len(self.active[s].tokens) - self.active[s].written) for s in chosen}
        while self.manager.blocks_needed(batch.items()) > self.manager.num_free_blocks:
            before = self._snapshot()
            assert set(batch.values()) != {1} or not self.manager.try_append_each(batch)
            assert not self.manager.try_append_many(batch.items())
            assert self._snapshot() == before, "a refused append left traces"
            youngest = max(self.active)
            self._preempt(youngest)
            batch.pop(youngest, None)
        needed, free = self.manager.blocks_needed(batch.items()), self.manager.num_free_blocks
        order = rng.sample(sorted(batch.items()), len(batch))
        if set(batch.values()) == {1}:
            assert self.manager.try_append_each(sequence_id for sequence_id, _ in order)
        elif rng.random() < 0.5:
            assert self.manager.try_append_many(order)
        else:
            for sequence_id, num_tokens in order:
                self.manager.append(sequence_id, num_tokens)
        assert free - self.manager.num_free_blocks == needed, "blocks_needed is not exact"
        self.is_consistent()
        for _ in range(rng.randint(1, 4) if with_events else 0):
            self._disturb(rng, batch)
            self.is_consistent()
        self._run_copies(rng)
        for sequence_id, num_tokens in batch.items():
            model = self.active[sequence_id]
            self._write(sequence_id, model.tokens, model.salt, model.written, model.written + num_tokens)
            model.written += num_tokens
        for sequence_id in batch:
            self._commit_and_sample(rng, sequence_id)

    def _disturb(self, rng: random.Random, batch: dict[int, int]) -> None:
        """Between a plan and its run: a sequence leaves, is rolled back, joins, or is forked."""
        if not self.active:
            return
        sequence_id = rng.choice(sorted(self.active))
        event = rng.choice(["leave", "roll back", "join", "fork"])
        if event == "leave":
            self._preempt(sequence_id)
            batch.pop(sequence_id, None)
        elif event == "roll back" and sequence_id in batch:
            self.manager.truncate(sequence_id, self.active[sequence_id].written)
            del batch[sequence_id]
        elif event == "join" and sequence_id not in batch:
            if self.manager.try_append(sequence_id, 1):
                batch[sequence_id] = 1
        elif event == "fork":
            self._fork_inside_step(rng, sequence_id, batch)

    def _fork_inside_step(self, rng: random.Random, parent_id: int, batch: dict[int, int]) -> None:
        destinations = set(self.manager._pool.moves)
        if destinations & set(self.manager.block_ids_of(parent_id)):
            before = self._snapshot()
            with pytest.raises(CacheError):
                self.manager.fork(parent_id, self._new_id())
            assert self._snapshot() == before
        elif parent_id not in batch and len(self.active) < MAX_SEQUENCES:
            child_id = self._new_id()
            self.manager.fork(parent_id, child_id)
            self._fork_model(rng, parent_id, child_id)

    def _run_copies(self, rng: random.Random) -> None:
        copies = self.manager.take_moves()
        for copy in rng.sample(copies, len(copies)):
            self.storage.move_blocks([copy])

    def _write(self, sequence_id: int, tokens: list[int], salt: bytes, start: int, end: int) -> None:
        slots = self.manager.table(sequence_id).cache_index(start, end)
        data = contents(salt, tokens[:end])[:, start:]
        for layer in range(NUM_LAYERS):
            self.storage.write(layer, slots, data[layer], -data[layer])

    def _commit_and_sample(self, rng: random.Random, sequence_id: int) -> None:
        model = self.active[sequence_id]
        if len(model.tokens) == model.written:
            model.tokens.append(rng.choice(TOKENS))
        if rng.random() < 0.8:
            self.manager.commit(sequence_id, model.tokens, model.written)
            if model.publishes:
                size = self.manager.block_size
                for end in range(size, model.written + 1, size):
                    self.committed[model.salt, tuple(model.tokens[:end])] = None
        if model.written >= MAX_TOKENS:
            self._cut(rng, sequence_id, rng.randint(0, 4))

    def _snapshot(self) -> tuple[object, ...]:
        rows = {s: (self.manager.block_ids_of(s), self.manager.num_tokens_of(s)) for s in self.manager.sequence_ids()}
        return rows, self.manager.num_free_blocks, self.manager.reference_counts(), self.manager.num_cached_blocks
