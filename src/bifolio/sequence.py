"""A request, its sequences, and the results of a step.

    tokens     |<------ prompt ------>|<------ output ------>|<- expected ->|
    progress   |<------------ computed ------------>|<- in flight ->|<-  ->|

A sequence stores its tokens, its progress and its finish reason; its phase follows from these. Only its own methods
(`launch`, `advance`, `append_token`, `rewind`, `fork_from`, `finish`) change them. Tokens *in flight* belong to passes
that are launched but not collected. Such passes sample the *expected* tokens: their number is known, their values are
not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from bifolio.adapter_salt import digest_of_adapter, salt_of_adapter
from bifolio.errors import FaultKind
from bifolio.images import Mark, PromptImage
from bifolio.logprob_records import LogprobRecords, TokenLogprob
from bifolio.long_rope import salt_of_rope
from bifolio.sampling_params import SamplingParams
from bifolio.sessions import SessionHint

__all__ = [
    "BeamStep", "DraftStep", "FinishReason", "LogprobRecords", "Request", "RequestMetrics", "RequestOptions",
    "RequestPhase", "Sequence", "SequenceGroup", "SequencePhase", "StepResult", "TokenLogprob",
]  # fmt: skip


class RequestPhase(Enum):
    """The phase of a sequence; computed, never stored."""

    PREFILL = "prefill"  # known tokens are not yet computed
    DECODE = "decode"  # one token at a time
    COMPLETE = "complete"


SequencePhase = RequestPhase


class FinishReason(Enum):
    """The reason why a sequence ended; values follow the OpenAI API where it defines one."""

    STOP = "stop"  # an end-of-text token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the caller aborted the request
    ERROR = "error"  # this request alone failed; `Request.error` says why


class DraftStep(NamedTuple):
    """One verification of draft tokens."""

    completion: int  # index of the sequence within its request
    position: int  # of the first draft token among the output tokens
    drafts: tuple[int, ...]
    num_accepted: int


class BeamStep(NamedTuple):
    """One step of a beam search: the beams that it chose."""

    position: int  # of the new tokens among the output tokens
    beams: tuple[tuple[int, int, float, bool], ...]  # place of the parent in the step before, token, score, has ended


@dataclass(slots=True)
class RequestMetrics:
    """Timestamps of a request in seconds of `time.perf_counter` (0: not reached yet), and counters."""

    arrival: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    num_forced_tokens: int = 0  # of the output: appended without a step, because a grammar left no choice
    weight_version: int = 0  # of the weights that computed the last token
    num_weight_changes: int = 0  # while the request was in flight

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
        """Whether the sequence represents a current hypothesis; the others keep their slots for later forks."""
        ...

    def is_ready(self) -> bool:
        """Whether all live members have computed all tokens but the last, so that the group can take its next step."""
        ...

    def live(self) -> list[Sequence]:
        """The members that stand for a hypothesis."""
        ...

    def may_open(self, sequence: Sequence) -> bool:
        """Whether its block table may be opened; after a preemption one at a time, so that later members reuse blocks
        of earlier ones."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of tokens; while it runs it holds a slot of the batch and a block table."""

    id: int  # key of its block table
    request: Request
    index: int  # of the completion within the request
    token_ids: list[int]  # prompt, then output
    num_prompt: int
    seed: int
    output_token_ids: list[int] = field(default_factory=list)  # the sampler reads this list in place
    num_computed: int = 0  # tokens whose K and V are in the cache, from collected passes
    num_in_flight: int = 0  # following tokens, of passes that are launched but not collected
    num_expected: int = 0  # tokens that those passes sample
    num_void: int = 0  # of these, the ones that follow a discarded token
    parent: Sequence | None = None  # forked from this sequence once its prompt is computed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that ended it
    cumulative_logprob: float = 0.0
    score: float | None = None  # of a hypothesis that beam search returned
    logprobs: LogprobRecords = field(default_factory=LogprobRecords)
    stops: Any = None  # the stop conditions that need no text (`text.stopping.TokenStops`)
    reader: Any = None  # reads the text of the output (`text.reader.TextReader`); None: there is no text
    checks_text: bool = False  # the engine checks stop texts after every token
    group: SequenceGroup | None = None
    num_draft_computed: int = 0  # tokens whose K and V are in the draft model's cache
    num_drafted: int = 0  # draft tokens, and how many of them were accepted
    num_accepted: int = 0

    @property
    def text(self) -> str:
        """The final text of the new output, detokenised when it is read."""
        given = self.request.num_given
        if self.reader is None or len(self.output_token_ids) <= given:
            return ""
        return str(self.reader.whole(self.output_token_ids, given))

    @property
    def new_token_ids(self) -> list[int]:
        """The output behind the tokens that were given."""
        return self.output_token_ids[self.request.num_given :]

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
        if self.request.pooling is not None:  # there is nothing to decode
            return RequestPhase.PREFILL
        if self.num_computed + self.num_in_flight < self.num_prompt or self.num_uncomputed > 1:
            return RequestPhase.PREFILL
        return RequestPhase.DECODE

    def tokens_until(self, end: int) -> list[int] | NDArray[np.int32]:
        """At least the first `end` tokens; as an array, which is cheaper to copy, if all belong to the prompt."""
        return self.request.prompt_array if end <= self.num_prompt else self.token_ids

    @property
    def is_dormant(self) -> bool:
        """Whether the sequence holds a slot but no blocks, because it will be forked from another sequence."""
        return self.parent is not None or (self.group is not None and not self.group.is_live(self))

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key of the queue: smaller runs first; the planner preempts the largest."""
        request = self.request
        return (request.priority, request.turn, request.number)

    # -- progress: the only places that change it ----------------------------------------------------------------------

    def launch(self, num_tokens: int, draws: bool) -> None:
        """Record a launched pass over the next `num_tokens`; `draws`: the pass samples the token after them."""
        self.num_in_flight += num_tokens
        self.num_expected += draws

    def advance(self, num_tokens: int) -> None:
        """Record that a launched pass over `num_tokens` was collected: their K and V are in the cache."""
        self.num_in_flight -= num_tokens
        self.num_computed += num_tokens

    def append_token(self, token_id: int) -> None:
        """Append a sampled token."""
        if self.num_expected:
            self.num_expected -= 1
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)

    def decode(self, token_id: int) -> int:
        """`advance` by one token and `append_token`: a plain decode step. Returns the number of output tokens."""
        self.num_in_flight -= 1
        self.num_computed += 1
        if self.num_expected:
            self.num_expected -= 1
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)
        return len(self.output_token_ids)

    def discard_token(self) -> None:
        """Record that a sampled token is not used, and that those expected after it will not be."""
        self.num_expected -= 1
        self.num_void = self.num_expected

    def rewind(self, num_computed: int) -> None:
        """Reset the progress to `num_computed` tokens and discard launched passes."""
        self.num_computed = num_computed
        self.num_draft_computed = min(self.num_draft_computed, num_computed)
        self.num_in_flight = self.num_expected = self.num_void = 0

    def fork_from(self, parent: Sequence, num_in_flight: int | None = None) -> None:
        """Copy the tokens and the progress of `parent`, whose blocks this sequence now shares.

        `num_in_flight`: tokens of the last launched pass, which is collected for both; passes before it are collected
        for the parent alone, and this sequence counts their tokens as computed.
        """
        self.parent = None
        self.token_ids = list(parent.token_ids)
        self.output_token_ids[:] = parent.output_token_ids  # in place: the sampler holds this list
        self.num_computed, self.num_draft_computed = parent.num_computed, parent.num_draft_computed
        self.num_in_flight, self.num_expected = parent.num_in_flight, parent.num_expected
        if num_in_flight is not None:
            self.num_computed += self.num_in_flight - num_in_flight
            self.num_in_flight = num_in_flight

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id} of {self.request.request_id!r}, {self.phase.value}, "
            f"{self.num_computed}/{self.num_tokens} computed)"
        )


class RequestOptions(TypedDict, total=False):
    """The options of a request beside its parameters; `Request` has their meaning and defaults."""

    prompt: str | None
    priority: int
    turn: float
    owner: str
    salt: bytes
    second_start: int
    adapter: Any
    num_given: int
    score_from: int
    session: SessionHint | None
    images: tuple[PromptImage, ...]


@dataclass(slots=True, eq=False)
class Request:
    """One call: a prompt, its parameters and the sequences that complete it."""

    request_id: str
    number: int  # order of arrival
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    prompt: str | None = None
    priority: int = 0  # smaller runs first
    turn: float = 0.0  # among requests of one priority: smaller runs first, then the earlier arrival
    owner: str = ""  # the client: slots and prefill are shared between owners; "": takes no part in this
    images: tuple[PromptImage, ...] = ()  # of the prompt, in order
    salt: bytes = b""  # cached prefixes are shared between requests of the same salt only
    session: SessionHint | None = None  # the conversation that it belongs to
    num_given: int = 0  # output tokens that were known before: the last ones of the tokens that it was added with
    score_from: int = 0  # prompt logprobs are those of the tokens after this position
    rope: int | None = None  # 0 or LONG_ROPE: the frequencies of its positions; None: there is one set (`long_rope`)
    adapter: Any = None  # the low-rank adapter of its network (`engine.adapters.LoadedAdapter`); None: the base
    max_tokens: int = 0  # of each completion, resolved against the model's context
    sequences: list[Sequence] = field(default_factory=list)
    prompt_scores: LogprobRecords | None = None  # of the prompt's tokens from the second on, as far as computed
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival=time.perf_counter()))
    error: str | None = None
    fault: FaultKind | None = None  # of the error
    keep: bool = False  # keep the blocks after the end, so that the conversation can be continued from them
    search: Any = None  # the beam search, if the request is one
    pooling: Any = None  # how its result is pooled, if it asks for a vector or scores (`engine.pooling.PooledResult`)
    second_start: int = 0  # of a pair of texts: the first token of the second one; 0: there is one text
    steps: list[DraftStep | BeamStep] | None = None  # recorded if a client watches them
    wants_logprobs: bool = field(init=False)  # of every sampled token
    marks: tuple[Mark, ...] = field(init=False, repr=False)  # of the images, for the digests of blocks
    prompt_array: NDArray[np.int32] = field(init=False, repr=False)  # the prompt as an array, for hashing and copying

    def __post_init__(self) -> None:
        self.wants_logprobs = self.params.needs_logprobs
        self.marks = tuple(image.mark for image in self.images)
        self.prompt_array = np.array(self.prompt_token_ids, dtype=np.int32)

    def set_error(self, fault: FaultKind, message: str) -> None:
        """Record why the request ends; the batcher finishes its sequences."""
        self.fault, self.error = fault, message

    @property
    def cache_salt(self) -> bytes:
        """The salt of the digests of its blocks: two adapters, or the two sets of LongRoPE, never share keys."""
        return salt_of_adapter(digest_of_adapter(self.adapter), salt_of_rope(self.rope, self.salt))

    def marks_until(self, end: int) -> tuple[Mark, ...]:
        """The marks of the first `end` tokens."""
        return tuple(mark for mark in self.marks if mark.start < end) if self.marks else ()

    @property
    def most_cached(self) -> int | None:
        """Tokens that may come from the prefix cache, where results of the others are read; None: all."""
        if self.pooling is not None:
            return 0 if self.pooling.reads_all else None
        return self.score_from if self.params.prompt_logprobs is not None else None

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Of each prompt token behind `score_from`, if they were asked for; the first token has none."""
        return None if self.prompt_scores is None else [None, *self.prompt_scores]


@dataclass(slots=True)
class StepResult:
    """The outcome of one step for one sequence. Text and logprob are computed when they are read."""

    request_id: str
    token: int | None  # the appended token, if any
    finished: bool
    finish_reason: FinishReason | None = None
    index: int = 0  # of the completion within the request
    number: int = 0  # of the token among the output tokens, from 1 on; 0: no token
    sequence: Sequence | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The text that became final with this token; the whole text of a beam."""
        sequence = self.sequence
        if sequence is None or sequence.reader is None:
            return ""
        if sequence.group is not None:
            return sequence.text if self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) else ""
        text: str = sequence.reader.text_of(sequence.output_token_ids, self.number) if self.number else ""
        return text

    @property
    def logprob(self) -> TokenLogprob | None:
        """Of the token, if it was asked for."""
        sequence = self.sequence
        if sequence is None or not self.number or not sequence.request.wants_logprobs:
            return None
        return sequence.logprobs[self.number - 1]


def team(sequence: Sequence) -> list[Sequence]:
    """The sequences admitted and preempted together with this one: beams of one search, or later forks of it."""
    if sequence.group is not None:
        return sequence.group.members
    return [sequence, *(child for child in sequence.request.sequences if child.parent is sequence)]
