"""A request, its sequences, and the results of a step.

    tokens     |<------ prompt ------>|<------ output ------>|<- expected ->|
    progress   |<------------ computed ------------>|<- in flight ->|<-  ->|

A sequence stores its tokens, its progress and the reason of its end; its phase follows from these. Only its own methods
(`launch`, `advance`, `append_token`, `rewind`, `fork_from`, `finish`) change them. Tokens *in flight* belong to passes
that are launched and not collected; *expected* tokens are drawn by such passes, so that their number is known and their
values are not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bifolio.sampling_params import SamplingParams


class RequestPhase(Enum):
    """The phase of a sequence; computed, never stored."""

    PREFILL = "prefill"  # known tokens are still to be processed
    DECODE = "decode"  # one token at a time
    COMPLETE = "complete"


SequencePhase = RequestPhase


class FinishReason(Enum):
    """Why a sequence ended; the values are OpenAI's where it has them."""

    STOP = "stop"  # an end-of-text token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # this request alone failed; `Request.error` says why


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logprob of one token and of its strongest rivals."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(slots=True)
class RequestMetrics:
    """Moments of a request's life, in seconds of `time.perf_counter`; 0 while they have not come."""

    arrival: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float:
        return max(self.first_scheduled - self.arrival, 0.0)

    @property
    def prefill_time(self) -> float:
        return max(self.first_token - self.first_scheduled, 0.0)

    @property
    def decode_time(self) -> float:
        return max(self.finished - self.first_token, 0.0) if self.first_token else 0.0

    @property
    def time_to_first_token(self) -> float:
        return max(self.first_token - self.arrival, 0.0)


class SequenceGroup(Protocol):
    """Sequences of one request that advance together, such as the beams of a search."""

    members: list[Sequence]  # each has a slot while the group runs

    def is_live(self, sequence: Sequence) -> bool:
        """Whether it stands for a hypothesis now; the others keep their slots for later forks."""
        ...

    def is_ready(self) -> bool:
        """Whether all live members have computed all tokens but the last, so that the group can take its next step."""
        ...

    def live(self) -> list[Sequence]:
        """The members that stand for a hypothesis."""
        ...

    def may_open(self, sequence: Sequence) -> bool:
        """After a preemption tables are opened one by one, so that later ones find the blocks of earlier ones."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens; while it runs it holds a slot of the batch and a block table."""

    id: int  # key of its block table
    request: Request
    index: int  # which of the request's completions
    token_ids: list[int]  # prompt, then output
    num_prompt: int
    seed: int
    output_token_ids: list[int] = field(default_factory=list)  # the sampler reads this live
    num_computed: int = 0  # tokens whose K and V are in the cache, by passes that were collected
    num_in_flight: int = 0  # tokens after these whose passes are launched and not collected
    num_expected: int = 0  # tokens that those passes draw
    parent: Sequence | None = None  # waits to be forked from this one when its prompt is computed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that ended it
    text: str = ""  # finished text of the output
    cumulative_logprob: float = 0.0
    score: float | None = None  # of a hypothesis that beam search returned
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stopper: Any = None  # decides after every token whether the sequence ends
    group: SequenceGroup | None = None
    num_draft_computed: int = 0  # tokens whose K and V the draft model has in its cache
    num_drafted: int = 0  # guessed tokens, and those of them that were right
    num_accepted: int = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.token_ids)

    @property
    def num_scheduled(self) -> int:
        """Tokens whose K and V are in the cache or will be when the launched passes are done."""
        return self.num_computed + self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        """Tokens, known or expected, that no pass has computed or is computing."""
        return len(self.token_ids) + self.num_expected - self.num_computed - self.num_in_flight

    @property
    def num_generated(self) -> int:
        """Output tokens, known or expected."""
        return len(self.output_token_ids) + self.num_expected

    @property
    def phase(self) -> RequestPhase:
        if self.finish_reason is not None:
            return RequestPhase.COMPLETE
        if self.num_computed + self.num_in_flight < self.num_prompt or self.num_uncomputed > 1:
            return RequestPhase.PREFILL
        return RequestPhase.DECODE

    def tokens_until(self, end: int) -> list[int] | NDArray[np.int32]:
        """The first `end` tokens at least; as an array, which is cheaper to hand on, if the prompt has them all."""
        return self.request.prompt_array if end <= self.num_prompt else self.token_ids

    @property
    def is_dormant(self) -> bool:
        """Holds a slot but no blocks: it will be forked from another sequence."""
        return self.parent is not None or (self.group is not None and not self.group.is_live(self))

    @property
    def order(self) -> tuple[int, float, int]:
        """Rank in the queue: smaller goes first; the planner preempts from the other end."""
        request = self.request
        return (request.priority, request.turn, request.number)

    # -- progress: the only places that change it ----------------------------------------------------------------------

    def launch(self, num_tokens: int, draws: bool) -> None:
        """A pass over the next `num_tokens` is launched; it draws the token after them, or does not."""
        self.num_in_flight += num_tokens
        self.num_expected += draws

    def advance(self, num_tokens: int) -> None:
        """A launched pass over `num_tokens` is collected: their K and V are in the cache."""
        self.num_in_flight -= num_tokens
        self.num_computed += num_tokens

    def append_token(self, token_id: int) -> None:
        """Take over a drawn token."""
        if self.num_expected:
            self.num_expected -= 1
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)

    def rewind(self, num_computed: int) -> None:
        """Cut the progress to `num_computed` tokens; launched passes do not count any more."""
        self.num_computed = num_computed
        self.num_draft_computed = min(self.num_draft_computed, num_computed)
        self.num_in_flight = self.num_expected = 0

    def fork_from(self, parent: Sequence) -> None:
        """Take over the tokens and the progress of `parent`, whose blocks this sequence now shares."""
        self.parent = None
        self.token_ids = list(parent.token_ids)
        self.output_token_ids[:] = parent.output_token_ids  # in place: the sampler reads this very list
        self.num_computed, self.num_draft_computed = parent.num_computed, parent.num_draft_computed
        self.num_in_flight, self.num_expected = parent.num_in_flight, parent.num_expected

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id} of {self.request.request_id!r}, {self.phase.value}, "
            f"{self.num_computed}/{self.num_tokens} computed)"
        )


@dataclass(slots=True, eq=False)
class Request:
    """One call: a prompt, its parameters and the sequences that complete it."""

    request_id: str
    number: int  # order of arrival
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    prompt: str | None = None
    priority: int = 0  # smaller goes first
    turn: float = 0.0  # among requests of one priority: smaller goes first, then the earlier arrival
    salt: bytes = b""  # requests share cached prefixes only with others of the same salt
    max_tokens: int = 0  # of each completion, resolved against the model's context
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival=time.perf_counter()))
    error: str | None = None
    keep: bool = False  # hold the blocks after the end, so that the conversation can be branched
    search: Any = None  # the beam search, if it is one
    wants_logprobs: bool = field(init=False)  # of every drawn token
    prompt_array: NDArray[np.int32] = field(init=False, repr=False)  # the prompt in one piece, for hashing and copying

    def __post_init__(self) -> None:
        self.wants_logprobs = self.params.needs_logprobs
        self.prompt_array = np.array(self.prompt_token_ids, dtype=np.int32)

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)


@dataclass(slots=True)
class StepResult:
    """The outcome of one step for one sequence."""

    request_id: str
    token: int | None  # the token that was added, if any
    finished: bool
    finish_reason: FinishReason | None = None
    index: int = 0  # which completion of the request
    text: str = ""  # text that became final with this token
    logprob: TokenLogprob | None = None
    sequence: Sequence | None = field(default=None, repr=False, compare=False)
