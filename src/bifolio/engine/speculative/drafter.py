"""The interface of a source of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import NamedTuple

from bifolio.kernels.interface import Array
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.sequence import Sequence

FEW_TOKENS = 16  # passes over fewer tokens do not measure the time of one


class Offer(NamedTuple):
    """Draft tokens available for a sequence."""

    length: int  # at most this many
    kind: int  # drafts of one kind are accepted about equally often
    num_behind: int = 0  # tokens that the drafter must read before it can draft


class Drafter:
    """A source of draft tokens."""

    reads_states = False  # it drafts from hidden states of the target's passes
    catch_up = 0.0  # seconds in which it reads one token of a sequence that it is behind with

    def offers(self, sequences: list[Sequence], length: int) -> dict[int, Offer]:
        """The drafts available for each sequence (by id), at most `length` tokens."""
        raise NotImplementedError

    def fill(self, items: Sequences[ScheduledSequence], *, on_device: bool = False) -> list[tuple[int, ...]]:
        """The draft tokens of scheduled decodes, as many as are reserved.

        `on_device`: they are verified there, and those that a device has are `ON_DEVICE` until they are `known`.
        """
        raise NotImplementedError

    def known(self, item: ScheduledSequence) -> tuple[int, ...]:
        """The draft tokens of a decode that were on the device alone; its step is collected."""
        return tuple(item.drafts)

    @property
    def can_follow(self) -> bool:
        """Whether it can draft after a verification on the device; one that reads no hidden states can."""
        return True

    def follow(self, plan: StepPlan, length: int) -> None:
        """Draft up to `length` tokens after a verification that was just launched on the device."""

    def forget(self, sequence: Sequence) -> None:
        """Drop everything known of a sequence that leaves its slot."""

    def absorb(self, plan: StepPlan, states: Array | None, *, is_resting: bool) -> None:
        """Keep the hidden states that a launched pass of the target returns."""

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """A completion was forked from another."""

    def warm_up(self, longest: int) -> None:
        """Capture the passes of a drafter on a device now."""

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A pass of the drafter read these tokens."""
        if num_tokens > FEW_TOKENS:
            self.catch_up = seconds / num_tokens
