"""The state ids of recurrent layers: references, checkpoints by digest, and eviction.

A state id names one sequence's state in all recurrent layers. State 0 is empty: every sequence starts from it, and it
is never written, counted or freed. Every other id is in exactly one of these states:

    held        a table reads or will read it, or a pass in flight writes it               ref_counts > 0
    evictable   no table holds it, but it is a checkpoint, or the state of a resting table;
                evicted in LRU order when a state is needed
    free        without content

A checkpoint belongs to the digest of the block that ends at its position: it is found with the block, and forgotten
with it. The state of a *resting* table (a kept conversation, a request that waits) can be evicted, too: the table then
continues from a checkpoint.

Not thread-safe: the block manager holds its lock during every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple

from bifolio.cache.keeper import BlockKeeper
from bifolio.cache.retention import victim
from bifolio.errors import CacheError, ConfigError

EMPTY_STATE = 0
LOST = -1  # in place of an id: the state was evicted


class Checkpoint(NamedTuple):
    """A state that gets the digest of its block once the block is committed."""

    position: int  # tokens before it
    state: int
    is_rolling: bool  # replaced by the sequence's next one, unless it is on the spacing


@dataclass(slots=True, eq=False)
class SequenceState:
    """The states of one table.

    |<------- position ------->|<- drafts ->|    `current` is the state after the first `position` tokens
    """

    current: int = EMPTY_STATE
    position: int = 0
    drafts: list[tuple[int, int]] = field(default_factory=list)  # (position, state) of each unverified token
    pending: list[Checkpoint] = field(default_factory=list)  # written by passes, their blocks are not committed yet
    rolling: bytes | None = None  # digest of the last rolling checkpoint
    branch: int = 0  # position where the sequence leaves a cached prefix whose state is not known; 0: none
    is_resting: bool = False  # the state may be evicted


@dataclass(frozen=True, slots=True)
class StateStats:
    """Counts of states at one moment; the empty state is left out."""

    num_states: int = 0
    num_held_states: int = 0  # by running sequences
    num_checkpoints: int = 0
    num_evicted_states: int = 0  # since the start
    num_checkpoint_hits: int = 0  # tables opened on a checkpoint, since the start


class StatePool:
    """Counts and free lists of states 1 to num_states - 1."""

    def __init__(self, num_states: int) -> None:
        if num_states < 2:
            raise ConfigError(f"num_states is {num_states}; state 0 is empty, so at least 2 are needed")
        self.num_states = num_states
        self.ref_counts = [0] * num_states
        self.digests: list[bytes | None] = [None] * num_states
        self.checkpoints: dict[bytes, int] = {}  # digest -> the only state with it
        self.free = list(range(num_states - 1, EMPTY_STATE, -1))  # taken from the end
        self.evictable: OrderedDict[int, None] = OrderedDict()  # the first is evicted first
        self.resting: dict[int, list[SequenceState]] = {}  # of each state
        self.rolling: set[bytes] = set()  # checkpoints that the next one of their sequence replaces
        self.on_take: Callable[[int], None] | None = None  # a debug mode fills the state with NaN
        self.keeper: BlockKeeper | None = None  # the tiers below the cache
        self.protected: Container[bytes] = ()  # digests that are evicted last
        self.num_evicted = 0

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.evictable)

    def try_take(self) -> int | None:
        """A state with one reference and no content; None when all are held."""
        if self.free:
            state = self.free.pop()
        elif self.evictable:
            state = victim(self.evictable, self.digests, self.protected)
            self._evict(state)
        else:
            return None
        self.ref_counts[state] = 1
        if self.on_take is not None:
            self.on_take(state)
        return state

    def take(self) -> int:
        """`try_take` for a state that must exist: the pool is planned for all running sequences."""
        state = self.try_take()
        if state is None:
            raise CacheError(f"all {self.num_states - 1} recurrent states are in use: the pool is too small")
        return state

    def retain(self, state: int) -> None:
        """Add a reference to a state that is held or evictable."""
        if state == EMPTY_STATE:
            return
        if not self.ref_counts[state]:
            del self.evictable[state]
        self.ref_counts[state] += 1

    def drop(self, state: int) -> None:
        """Remove a reference."""
        if state == EMPTY_STATE:
            return
        self.ref_counts[state] -= 1
        if not self.ref_counts[state]:
            self._set_idle(state)

    def is_exclusive(self, state: int) -> bool:
        """Whether one table alone holds the state, and its content may change."""
        return (
            state != EMPTY_STATE
            and self.ref_counts[state] == 1
            and self.digests[state] is None
            and state not in self.resting
        )

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def name(self, state: int, digest: bytes) -> bool:
        """Make a held state the checkpoint of a digest, unless there is one."""
        is_new = digest not in self.checkpoints and self.digests[state] is None
        if is_new:
            self.digests[state] = digest
            self.checkpoints[digest] = state
        return is_new

    def forget(self, digest: bytes) -> None:
        """Remove the checkpoint of a digest, if there is one."""
        state = self.checkpoints.pop(digest, None)
        if state is not None:
            if self.keeper is not None:
                self.keeper.state_leaves(digest, state)
            self.digests[state] = None
            self.rolling.discard(digest)
            if not self.ref_counts[state] and state not in self.resting:
                del self.evictable[state]
                self.free.append(state)

    def forget_all(self) -> None:
        for digest in list(self.checkpoints):
            self.forget(digest)

    # -- resting tables ------------------------------------------------------------------------------------------------

    def rest(self, owner: SequenceState) -> None:
        """Let the state of a table be evicted."""
        owner.is_resting = True
        if owner.current > EMPTY_STATE:
            self.resting.setdefault(owner.current, []).append(owner)
            self.drop(owner.current)

    def wake(self, owner: SequenceState) -> None:
        """Hold the state of a resting table again, if it was not evicted."""
        owner.is_resting = False
        if owner.current > EMPTY_STATE:
            self.retain(owner.current)
            self._remove_resting(owner, owner.current)

    def leave(self, owner: SequenceState) -> None:
        """Remove a resting table from its state."""
        owner.is_resting = False
        state, owner.current = owner.current, LOST
        if state > EMPTY_STATE:
            self._remove_resting(owner, state)
            if not self.ref_counts[state] and self.digests[state] is None and state not in self.resting:
                del self.evictable[state]
                self.free.append(state)

    def _remove_resting(self, owner: SequenceState, state: int) -> None:
        owners = self.resting[state]
        owners.remove(owner)
        if not owners:
            del self.resting[state]

    # -- internal ------------------------------------------------------------------------------------------------------

    def _set_idle(self, state: int) -> None:
        if self.digests[state] is None and state not in self.resting:
            self.free.append(state)
        else:
            self.evictable[state] = None

    def _evict(self, state: int) -> None:
        self.num_evicted += 1
        digest = self.digests[state]
        if digest is not None:
            if self.keeper is not None:
                self.keeper.state_leaves(digest, state)
            del self.checkpoints[digest]
            self.digests[state] = None
            self.rolling.discard(digest)
        for owner in self.resting.pop(state, ()):
            owner.current = LOST
