"""The six laws of prefill on the Triton kernels, in the interpreter: one small case of each."""

from __future__ import annotations

import prefill_laws as laws
import pytest
from prefill_laws import Subject

from bifolio.kernels.triton import TritonKernels

SETS = {
    "f32": (TritonKernels("cpu", "f32"), 1e-5, 1e-4),
    "f16, deterministic": (TritonKernels("cpu", "f16", deterministic=True), 0.0, 0.0),
}


@pytest.fixture(params=SETS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(*SETS[request.param])


def test_a_token_sees_tokens_up_to_its_own_position(subject: Subject) -> None:
    laws.check_causal_visibility(subject, 9, positions=(0, 6, 13))


def test_a_prompt_leaves_exactly_its_length_in_every_layer(subject: Subject) -> None:
    laws.check_entries(subject, chunk_size=9)


def test_packing_batching_and_chunking_change_nothing(subject: Subject) -> None:
    laws.check_independence(subject, chunk_size=4, token_budget=9, order=(3, 1, 0))


def test_padding_changes_nothing(subject: Subject) -> None:
    laws.check_padding(subject)


def test_uninitialised_entries_are_never_read(subject: Subject) -> None:
    laws.check_no_uninitialised_reads(subject, chunk_size=5, lengths=(5, 8), num_new=2)


def test_decode_before_the_prompt_is_complete_is_an_error(subject: Subject) -> None:
    laws.check_hard_boundary(subject)


def test_the_engine_draws_nothing_before_the_prompt_is_complete(subject: Subject) -> None:
    laws.check_nothing_is_drawn_early(subject)


def test_prefill_is_deterministic(subject: Subject) -> None:
    laws.check_determinism(subject)
