"""From sequences of the engine to the pieces of an update."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any

from bifolio.api import messages as m
from bifolio.api.outputs import returned_sequences
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request


@dataclass(slots=True)
class Live:
    """A running request, and how much of each completion was sent."""

    request: Request
    sent_tokens: list[int]
    ended: list[bool]
    is_chosen_late: bool = False  # which completions are returned, and in which order, is decided at the end
    final_only: bool = False
    sent_first: bool = False
    owner: str = ""  # name of its tenant
    is_over: bool = False  # the last update was sent
    wants_receipt: bool = False

    def pieces(self, is_finished: bool) -> list[m.NewTokens]:
        """The new tokens of each completion, which count as sent."""
        if self.is_chosen_late:
            return final_pieces(self.request) if is_finished else []
        pieces = []
        for number, sequence in enumerate(self.request.sequences):
            sent, tokens, reason = self.sent_tokens[number], sequence.output_token_ids, sequence.finish_reason
            if self.ended[number] or (len(tokens) == sent and reason is None):
                continue
            piece = m.NewTokens(sequence.index, packed(tokens[sent:]))
            if self.request.wants_logprobs:
                piece.scores = sequence.logprobs.packed(sent)
            if reason is not None:
                piece.finish_reason, piece.stop_reason = reason.value, sequence.stop_reason
                self.ended[number] = True
            pieces.append(piece)
            self.sent_tokens[number] = len(tokens)
        return pieces


def packed(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()


def is_chosen_late(request: Request) -> bool:
    """Whether the completions that are returned, and their order, are decided at the end."""
    return request.params.num_sequences > request.params.n or request.search is not None


def without_text(params: SamplingParams) -> SamplingParams:
    """The parameters of a request whose text the front end reads; those of one that is chosen at the end stay."""
    if params.num_sequences > params.n:
        return params
    return replace(params, stop=(), include_stop_str_in_output=False, detokenize=False)


def final_pieces(request: Request) -> list[m.NewTokens]:
    return [
        m.NewTokens(
            index,
            packed(sequence.output_token_ids),
            sequence.logprobs.packed() if request.params.logprobs is not None else None,
            None if sequence.finish_reason is None else sequence.finish_reason.value,
            sequence.stop_reason,
            sequence.text,
            sequence.cumulative_logprob,
            sequence.score,
        )
        for index, sequence in enumerate(returned_sequences(request))
    ]


def ended(request: Request, receipt: dict[str, Any] | None = None) -> m.Ended:
    metrics = request.metrics
    return m.Ended(
        metrics.queue_time,
        metrics.prefill_time,
        metrics.decode_time,
        metrics.num_cached_tokens,
        metrics.num_preemptions,
        request.error,
        request.fault,
        receipt,
        metrics.weight_version,
        metrics.num_weight_changes,
        metrics.num_forced_tokens,
    )
