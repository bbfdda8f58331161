"""A draft head's progress in each sequence: `Track`, and the drafts that a device has ahead of the host: `Ahead`."""

from __future__ import annotations

from dataclasses import dataclass, field

from bifolio.kernels.interface import Array, PendingDrafts

STATE_BYTES = 256 << 20  # of the states that wait for the head, in all slots
LEAST_STATES = 64  # of one sequence, whatever their size


@dataclass(slots=True)
class Ahead:
    """Drafts on the device, which follow a verification there.

    |<-- entries -->|<------- count ------->|      tokens of the verification
                    start         end              known when it is collected: the drafts follow the token at `end`
    """

    pending: PendingDrafts
    row: int  # of the sequence
    length: int  # draft tokens
    number: int  # of the launch
    slot: int
    start: int
    count: int
    end: int = -1  # -1: not collected


@dataclass(slots=True)
class Track:
    """The head's progress in one sequence: its context, and states without entries."""

    context_start: int  # position of the first entry that drafts read
    start: int  # position of the first state
    count: int = 0  # of states
    states: list[Array] = field(default_factory=list)  # [k, width] each, one after the other
    ahead: Ahead | None = None

    @property
    def end(self) -> int:
        return self.start + self.count

    def copy(self) -> Track:
        return Track(self.context_start, self.start, self.count, list(self.states))

    def add(self, states: Array) -> None:
        self.states.append(states)
        self.count += int(states.shape[0])

    def take(self, count: int) -> list[Array]:
        """Remove the first `count` states."""
        taken, left = [], count
        while left:
            first = self.states[0]
            size = int(first.shape[0])
            if size > left:
                self.states[0] = first[left:]
                first, size = first[:left], left
            else:
                del self.states[0]
            taken.append(first)
            left -= size
        self.start += count
        self.count -= count
        return taken

    def cut(self, end: int) -> None:
        """Drop the states of positions from `end` on."""
        while self.end > end and self.states:
            size, over = int(self.states[-1].shape[0]), self.end - end
            if size <= over:
                del self.states[-1]
            else:
                self.states[-1] = self.states[-1][: size - over]
            self.count -= min(size, over)
