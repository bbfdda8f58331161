"""The recurrent states of block tables: which state a pass reads, which it writes, and which become checkpoints.

A pass reads the state before its first token and writes one after its last. A state that another table, a checkpoint or
a resting table needs is never written: the pass writes a new one, so a fork costs no copy. Besides, a pass writes
checkpoints, at which later requests can begin:

    |<----------------- prompt ----------------->|<---------- output ---------->|
    |        s        s   b    s        s      e |             r'      r        |
    s  every multiple of the spacing
    b  the last block in common with an earlier prompt, if a second one leaves it there
    e  the last full block of the prompt with a token after it
    r  the last full block of the output; the one before it (r') is forgotten, unless it is on the spacing

A table is opened on the last checkpoint of its cached prefix. `truncate` to a position without a state cuts the table
at the last checkpoint before it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from bifolio.cache.states import EMPTY_STATE, LOST, Checkpoint, SequenceState, StatePool, StateStats
from bifolio.errors import CacheError

if TYPE_CHECKING:
    from bifolio.cache.block_table import BlockTable


class StateRequest(NamedTuple):
    """Tokens [start, start + num_new) of a sequence, about to run."""

    sequence_id: int
    start: int
    num_new: int
    num_drafts: int = 0  # of the new tokens, the last ones
    num_known: int = 0  # tokens of the prompt that the pass belongs to; 0: a decode


class StatePass(NamedTuple):
    """The states of one sequence in a pass."""

    read: int  # before the first token
    writes: tuple[tuple[int, int], ...]  # (index among the new tokens, state written after it), in order


class TableStates:
    """The states of all tables, for `KVCacheBlockManager`; `spacing` is a multiple of the block size, or 0: none."""

    def __init__(self, num_states: int, block_size: int, spacing: int) -> None:
        if spacing < 0 or spacing % block_size:
            raise CacheError(f"checkpoints every {spacing} tokens do not end blocks of {block_size} tokens")
        self.pool = StatePool(num_states)
        self.block_size = block_size
        self.spacing = spacing
        self._num_restored = 0
        self._in_place = [StatePass(state, ((0, state),)) for state in range(num_states)]  # passes of one token

    def stats(self) -> StateStats:
        pool = self.pool
        held = sum(count > 0 for count in pool.ref_counts)
        return StateStats(pool.num_states - 1, held, len(pool.checkpoints), pool.num_evicted, self._num_restored)

    # -- verbs of a table ----------------------------------------------------------------------------------------------

    def usable(self, chain: list[bytes]) -> int:
        """Leading blocks of a chain up to its last checkpoint."""
        checkpoints = self.pool.checkpoints
        return next((count for count in range(len(chain), 0, -1) if chain[count - 1] in checkpoints), 0)

    def open(self, chain: list[bytes]) -> SequenceState:
        """The state at the last checkpoint of a chain of cached blocks."""
        owner, count = SequenceState(), self.usable(chain)
        if count:
            self._num_restored += 1
            self._restore(owner, chain)
        if count < len(chain):
            owner.branch = len(chain) * self.block_size
        return owner

    def fork(self, parent: SequenceState) -> SequenceState:
        """The parent's state, shared; the child of a resting table rests as well."""
        if parent.drafts:
            raise CacheError("a sequence with unverified drafts cannot be forked: verify them first")
        child = SequenceState(parent.current, parent.position)
        if parent.is_resting:
            child.is_resting = True
            if child.current > EMPTY_STATE:
                self.pool.resting[child.current].append(child)
        elif child.current > EMPTY_STATE:
            self.pool.retain(child.current)
        return child

    def release(self, owner: SequenceState) -> None:
        """Drop all states of a table."""
        for _, state in owner.drafts:
            self.pool.drop(state)
        owner.drafts = []
        self._keep_rolling(owner)
        self._drop_pending(owner)
        self._replace(owner, LOST)

    def cut(self, owner: SequenceState, chain: list[bytes], num_tokens: int) -> int:
        """Keep the first `num_tokens` tokens, or fewer where no state exists for them; return their number."""
        self._settle_drafts(owner, num_tokens)
        for checkpoint in [c for c in owner.pending if c.position > num_tokens]:
            owner.pending.remove(checkpoint)
            self.pool.drop(checkpoint.state)
        if num_tokens >= owner.position and owner.current != LOST:
            return num_tokens
        return self._restore(owner, chain[: num_tokens // self.block_size])

    def _settle_drafts(self, owner: SequenceState, num_tokens: int) -> None:
        """Continue from the last draft within `num_tokens`; drafts that end blocks become checkpoints."""
        for position, state in owner.drafts:
            if position <= num_tokens:
                if position % self.block_size == 0:
                    self._note(owner, Checkpoint(position, state, True))
                self._replace(owner, state)
                owner.position = position
            self.pool.drop(state)
        owner.drafts = []

    def rest(self, owner: SequenceState) -> None:
        """Let the state be evicted while the table waits; unverified drafts are dropped."""
        if not owner.is_resting:
            self._settle_drafts(owner, 0)
            self._keep_rolling(owner)
            self.pool.rest(owner)

    def wake(self, owner: SequenceState, chain: list[bytes], num_tokens: int) -> int:
        """Hold the state of a resting table again; return the tokens that it has a state for."""
        if owner.is_resting:
            self.pool.wake(owner)
        if owner.current != LOST:
            return num_tokens
        return self._restore(owner, chain[: num_tokens // self.block_size])

    def publish(self, owner: SequenceState, chain: list[bytes], known: Container[bytes]) -> None:
        """Give pending checkpoints whose blocks are committed their digests, as far as the blocks are `known`."""
        waiting, owner.pending = owner.pending, []
        for checkpoint in waiting:
            index = checkpoint.position // self.block_size
            if index > len(chain):
                owner.pending.append(checkpoint)
                continue
            digest = chain[index - 1]
            if digest in known:
                self._name(owner, checkpoint, digest)
            self.pool.drop(checkpoint.state)

    def _name(self, owner: SequenceState, checkpoint: Checkpoint, digest: bytes) -> None:
        is_new = self.pool.name(checkpoint.state, digest)
        if not checkpoint.is_rolling or (self.spacing and checkpoint.position % self.spacing == 0):
            self.pool.rolling.discard(digest)
            if self.pool.keeper is not None:
                self.pool.keeper.state_stored(digest)
        elif is_new:
            self.pool.rolling.add(digest)
        if checkpoint.is_rolling:
            if owner.rolling != digest and owner.rolling in self.pool.rolling:
                self.pool.forget(owner.rolling)
            owner.rolling = digest

    def adopt(self, owner: SequenceState, chain: list[bytes], known: Container[bytes]) -> int | None:
        """A new state of the table as the checkpoint of its last block; None if it has one, or none is available."""
        digest = chain[-1]
        if digest not in known or digest in self.pool.checkpoints:
            return None
        state = self.pool.try_take()
        if state is not None:
            self.pool.name(state, digest)
            self._replace(owner, state)
            owner.position = len(chain) * self.block_size
            self.pool.drop(state)  # of `try_take`
        return state

    # -- passes --------------------------------------------------------------------------------------------------------

    def use(self, tables: Mapping[int, BlockTable], requests: Iterable[StateRequest]) -> list[StatePass]:
        """Choose the states of a pass, for all of its sequences at once.

        States that the pass reads stay held until all states that it writes are chosen. Live states come first, then
        checkpoints, as far as states are available.
        """
        wanted = list(requests)
        if len({request.sequence_id for request in wanted}) != len(wanted):
            raise CacheError("a pass runs each sequence once: join its requests")
        owners = [self._owner(tables, request) for request in wanted]
        passes = [self._pass_in_place(owner, request) for owner, request in zip(owners, wanted, strict=True)]
        others = [number for number, found in enumerate(passes) if found is None]
        chosen = self._choose(tables, [owners[number] for number in others], [wanted[number] for number in others])
        for owner, found in zip(owners, passes, strict=True):
            if found is not None:
                owner.position += 1
        for number, state_pass in zip(others, chosen, strict=True):
            passes[number] = state_pass
        return [found for found in passes if found is not None]

    def _pass_in_place(self, owner: SequenceState, request: StateRequest) -> StatePass | None:
        """The pass of one token inside a block that overwrites the sequence's own state; None: any other pass."""
        is_plain = request.num_new == 1 and not request.num_drafts and not request.num_known
        if not is_plain or not (request.start + 1) % self.block_size or not self.pool.is_exclusive(owner.current):
            return None
        return self._in_place[owner.current]

    def _choose(
        self, tables: Mapping[int, BlockTable], owners: list[SequenceState], wanted: list[StateRequest]
    ) -> list[StatePass]:
        reads = [owner.current for owner in owners]
        self._make_available(tables, owners, wanted)
        writes = [self._write_live(owner, request) for owner, request in zip(owners, wanted, strict=True)]
        for number, request in enumerate(wanted):
            table = tables[request.sequence_id]
            if table.publishes:
                self._write_checkpoints(owners[number], request, writes[number])
        for owner, read in zip(owners, reads, strict=True):
            if owner.drafts or owner.current != read:
                self.pool.drop(read)
            if owner.drafts:
                owner.current = LOST  # until the drafts are verified
        return [StatePass(read, tuple(sorted(found.items()))) for read, found in zip(reads, writes, strict=True)]

    def _owner(self, tables: Mapping[int, BlockTable], request: StateRequest) -> SequenceState:
        if set(map(type, request)) != {int} or not 0 <= request.num_drafts < request.num_new:
            raise CacheError(f"a pass has whole numbers of tokens, one at least, and fewer drafts: not {request}")
        table = tables.get(request.sequence_id)
        owner = None if table is None else table.state
        if table is None or owner is None or owner.is_resting or owner.drafts or owner.current == LOST:
            raise CacheError(f"sequence {request.sequence_id} has no recurrent state to continue: resume it first")
        if owner.position != request.start or request.start + request.num_new > table.num_tokens:
            raise CacheError(
                f"sequence {request.sequence_id} has the state after {owner.position} tokens: a pass cannot start at "
                f"{request.start}"
            )
        return owner

    def _make_available(
        self, tables: Mapping[int, BlockTable], owners: list[SequenceState], requests: list[StateRequest]
    ) -> None:
        """Give up checkpoints of blocks that are not committed yet, if the live states need them.

        Raises before any live state changes; the pool is planned for all running sequences.
        """
        needed = sum(
            request.num_drafts + 1 if request.num_drafts else not self.pool.is_exclusive(owner.current)
            for owner, request in zip(owners, requests, strict=True)
        )
        if needed > self.pool.num_available:
            for table in tables.values():
                self._drop_pending(table.state)
        if needed > self.pool.num_available:
            raise CacheError(
                f"a pass needs {needed} more recurrent states and {self.pool.num_available} of "
                f"{self.pool.num_states - 1} are available: give the cache more states"
            )

    def _write_live(self, owner: SequenceState, request: StateRequest) -> dict[int, int]:
        """The state after the last token, or one after the last known token and after each draft."""
        first = request.num_new - 1 - request.num_drafts
        if request.num_drafts:
            found = {index: self.pool.take() for index in range(first, request.num_new)}
            owner.drafts = [(request.start + index + 1, state) for index, state in found.items()]
        else:
            found = {first: owner.current if self.pool.is_exclusive(owner.current) else self.pool.take()}
            owner.current = found[first]
        owner.position = request.start + first + 1
        return found

    def _write_checkpoints(self, owner: SequenceState, request: StateRequest, writes: dict[int, int]) -> None:
        """Add writes of checkpoints; the most useful ones first."""
        size, end = self.block_size, request.start + request.num_new - request.num_drafts
        positions = []
        if request.num_known:
            positions += [(request.num_known - 1) // size * size, owner.branch]
        if self.spacing:
            positions += range(end // self.spacing * self.spacing, request.start, -self.spacing)
        for position in dict.fromkeys(positions):
            if not request.start < position <= end:
                continue
            index = position - request.start - 1
            state = writes.get(index)
            if state is None:
                state = self.pool.try_take()
                if state is None:
                    return
                writes[index] = state
            else:
                self.pool.retain(state)
            owner.pending.append(Checkpoint(position, state, False))
        if request.num_drafts or end % size or end in positions or (request.num_known and end != request.num_known):
            return
        self._note(owner, Checkpoint(end, owner.current, True))

    # -- internal ------------------------------------------------------------------------------------------------------

    def _keep_rolling(self, owner: SequenceState) -> None:
        """The last rolling checkpoint of a sequence that ends or waits is where its next turn begins."""
        if self.pool.keeper is not None and owner.rolling in self.pool.rolling:
            self.pool.keeper.state_stored(owner.rolling)

    def _drop_pending(self, owner: SequenceState | None) -> None:
        for checkpoint in () if owner is None else owner.pending:
            self.pool.drop(checkpoint.state)
        if owner is not None:
            owner.pending = []

    def _note(self, owner: SequenceState, checkpoint: Checkpoint) -> None:
        self.pool.retain(checkpoint.state)
        owner.pending.append(checkpoint)

    def _restore(self, owner: SequenceState, chain: list[bytes]) -> int:
        """Continue from the last checkpoint of the chain; return its position."""
        count = self.usable(chain)
        self._replace(owner, self.pool.checkpoints[chain[count - 1]] if count else EMPTY_STATE)
        owner.position = count * self.block_size
        return owner.position

    def _replace(self, owner: SequenceState, state: int) -> None:
        """Set the current state; the table holds it, or rests on it as before."""
        was_resting = owner.is_resting
        if state > EMPTY_STATE:
            self.pool.retain(state)
        if was_resting:
            self.pool.leave(owner)
        elif owner.current > EMPTY_STATE:
            self.pool.drop(owner.current)
        owner.current = state
        if was_resting:
            self.pool.rest(owner)
