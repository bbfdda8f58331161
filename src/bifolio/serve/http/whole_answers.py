"""Answers that are sent as a whole: the pieces of a request put together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bifolio.logprob_records import TokenLogprob
from bifolio.serve.http.generation import Piece, Run, Scores


@dataclass(slots=True)
class Answer:
    """One choice, put together from its pieces."""

    texts: list[str] = field(default_factory=list)  # of the pieces; a sum would be copied with each of them
    token_ids: list[int] = field(default_factory=list)
    logprobs: Scores = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    cumulative_logprob: float | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason
        self.score = piece.score
        self.cumulative_logprob = piece.cumulative_logprob

    def beam(self) -> dict[str, float | None]:
        return {"score": self.score, "cumulative_logprob": self.cumulative_logprob}


@dataclass(slots=True)
class Whole:
    """All choices of a job, and the prompts' own logprobs."""

    answers: list[Answer]
    prompt_logprobs: list[list[TokenLogprob | None] | None]
    weight_version: int = 0
    num_weight_changes: int = 0

    def choices(self) -> Iterator[tuple[int, Answer]]:
        """(Index, answer) of each choice; a beam search may find fewer texts than the client asked for."""
        return ((index, answer) for index, answer in enumerate(self.answers) if answer.finish_reason is not None)


async def collect(run: Run) -> Whole:
    """Wait for the end."""
    job = run.job
    whole = Whole([Answer() for _ in range(len(job.prompts) * job.num_choices)], [None] * len(job.prompts))
    while batch := await run.next():
        for news in batch:
            if news.prompt_logprobs is not None:
                whole.prompt_logprobs[news.number] = news.prompt_logprobs
            for piece in news.pieces:
                whole.answers[news.number * job.num_choices + piece.index].add(piece)
    if run.ended is not None:
        whole.weight_version, whole.num_weight_changes = run.ended.weight_version, run.ended.num_weight_changes
    if job.params.drop_output:
        for answer in whole.answers:
            answer.texts, answer.token_ids, answer.logprobs = [], [], []
            answer.finish_reason, answer.stop_reason = "length", None
    return whole
