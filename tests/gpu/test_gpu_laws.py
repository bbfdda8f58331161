"""The six laws of prefill on a GPU: within rounding in f32, and bit for bit in deterministic mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import prefill_laws as laws
import pytest
from prefill_laws import LENGTH, MIXTURES, Subject


@pytest.fixture(scope="module", params=["f32", "bf16, deterministic"])
def subject(request: pytest.FixtureRequest, device: str, compiled: None, gpu_kernels: Callable[..., Any]) -> Subject:
    if request.param == "f32":
        return Subject(gpu_kernels("f32"), 1e-4, 1e-4)
    if device == "cpu":
        pytest.skip("torch's kernels are not deterministic")
    return Subject(gpu_kernels("bf16", deterministic=True), 0.0, 0.0)


@pytest.mark.parametrize("chunk_size", [4, LENGTH])
def test_a_token_sees_tokens_up_to_its_own_position(subject: Subject, chunk_size: int) -> None:
    laws.check_causal_visibility(subject, chunk_size)


@pytest.mark.parametrize("chunk_size", [3, 512])
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_prompt_leaves_exactly_its_length_in_every_layer(subject: Subject, chunk_size: int, block_size: int) -> None:
    laws.check_entries(subject, chunk_size, block_size)


@pytest.mark.parametrize(("chunk_size", "token_budget", "order"), MIXTURES)
def test_packing_batching_and_chunking_change_nothing(
    subject: Subject, chunk_size: int, token_budget: int, order: tuple[int, ...]
) -> None:
    laws.check_independence(subject, chunk_size, token_budget, order)


def test_padding_changes_nothing(subject: Subject) -> None:
    laws.check_padding(subject)


@pytest.mark.parametrize("chunk_size", [5, 512])
def test_uninitialised_entries_are_never_read(subject: Subject, chunk_size: int) -> None:
    laws.check_no_uninitialised_reads(subject, chunk_size)


def test_decode_before_the_prompt_is_complete_is_an_error(subject: Subject) -> None:
    laws.check_hard_boundary(subject)


def test_the_engine_draws_nothing_before_the_prompt_is_complete(subject: Subject) -> None:
    laws.check_nothing_is_drawn_early(subject)


def test_prefill_is_deterministic(subject: Subject) -> None:
    laws.check_determinism(subject)
