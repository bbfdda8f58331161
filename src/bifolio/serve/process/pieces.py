"""From sequences of the engine to the pieces of an update."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from bifolio.api import messages as m
from bifolio.api.outputs import returned_sequences
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request


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
    )
