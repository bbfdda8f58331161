"""The six laws of prefill: every kernel set of the CPU obeys them, and their checkers notice bugs that break them.

The second kind of test breaks a law on purpose, on the reference. The interpreter's run and the GPU's check the same
laws on the Triton kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import prefill_laws as laws
import pytest
from prefill_laws import LENGTH, MIXTURES, Subject

from bifolio.cache.storage import KVStorage
from bifolio.engine import executor
from bifolio.engine.executor import DecodeExecutor, ModelRunner, PrefillExecutor, append_batch
from bifolio.kernels import reference, reference_attention
from bifolio.schedule.phases import PhaseManager
from helpers import cpu_kernel_names, make_kernels

TOLERANCES = {"native": (0.0, 0.0), "reference": (0.0, 1e-5), "torch": (1e-6, 1e-5)}  # repeated, rearranged


@cache
def subject_named(name: str) -> Subject:
    return Subject(make_kernels(name), *TOLERANCES[name])


@pytest.fixture(params=cpu_kernel_names())
def subject(request: pytest.FixtureRequest) -> Subject:
    return subject_named(request.param)


def expect_broken(check: Any, *arguments: Any) -> None:
    with pytest.raises(AssertionError, match="law"):
        check(subject_named("reference"), *arguments)


# -- 1. causal visibility ---------------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize("chunk_size", [1, 4, LENGTH])
def test_a_token_sees_tokens_up_to_its_own_position(subject: Subject, chunk_size: int) -> None:
    laws.check_causal_visibility(subject, chunk_size)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_mask_off_by_one_breaks_the_first_law(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    def broken(num_queries: int, length: int, *rest: object) -> np.ndarray:
        mask = np.tri(num_queries, length, length - num_queries + shift, dtype=bool)
        mask[:, 0] = True
        return mask

    monkeypatch.setattr(reference_attention, "causal_mask", broken)
    expect_broken(laws.check_causal_visibility, LENGTH)
    with pytest.raises(AssertionError, match="does not end at the query"):
        laws.check_attention_weights(reference.ReferenceKernels(), LENGTH - 3)


# -- 2. exactly L entries, no new token -------------------------------------------------------------------------------
@pytest.mark.parametrize("chunk_size", [1, 3, LENGTH, 512])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_prompt_leaves_exactly_its_length_in_every_layer(subject: Subject, chunk_size: int, block_size: int) -> None:
    laws.check_entries(subject, chunk_size, block_size)


@pytest.mark.parametrize("tokens_written", [LENGTH - 1, LENGTH + 1])
def test_one_entry_too_few_or_too_many_breaks_the_second_law(
    monkeypatch: pytest.MonkeyPatch, tokens_written: int
) -> None:
    honest = KVStorage.write

    def broken(self: KVStorage, layer: int, slots: Any, keys: Any, values: Any) -> None:
        if tokens_written < len(slots):
            honest(self, layer, slots[:-1], keys[:-1], values[:-1])
        else:
            honest(
                self, layer, np.append(slots, slots[-1] + 1), *(np.append(x, x[-1:], axis=0) for x in (keys, values))
            )

    monkeypatch.setattr(KVStorage, "write", broken)
    expect_broken(laws.check_entries, 512)


def test_a_generated_token_in_the_cache_breaks_the_second_law(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PrefillExecutor.execute

    def broken(self: PrefillExecutor, tokens: Any, kv_cache: Any) -> Any:
        result = honest(self, tokens, kv_cache)
        self.append([kv_cache], [[int(result.logits.argmax())]])
        return result

    monkeypatch.setattr(PrefillExecutor, "execute", broken)
    expect_broken(laws.check_entries, 512)


# -- 3. padding, packing, batching, chunking --------------------------------------------------------------------------
@pytest.mark.parametrize(("chunk_size", "token_budget", "order"), MIXTURES)
def test_packing_batching_and_chunking_change_nothing(
    subject: Subject, chunk_size: int, token_budget: int, order: tuple[int, ...]
) -> None:
    laws.check_independence(subject, chunk_size, token_budget, order)


def test_padding_changes_nothing(subject: Subject) -> None:
    laws.check_padding(subject)


@pytest.mark.parametrize("bug", ["neighbours", "forgotten chunk"])
def test_looking_at_neighbours_or_forgetting_a_chunk_breaks_the_third_law(
    monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    honest = reference.ReferenceKernels.attend

    def neighbours(self: Any, heads: Any, shape: Any, segments: Any, storage: Any) -> Any:
        """One sequence out of a packed segment of several."""
        total = heads.query.shape[0]
        return reference_attention.causal_attention(heads.query, heads.key, heads.value, shape.scale, None)[:total]

    def forgotten(self: Any, heads: Any, shape: Any, segments: Any, storage: Any) -> Any:
        """Every chunk taken for the beginning of its prompt."""
        return honest(self, heads, shape, tuple(replace(segment, fresh=True) for segment in segments), storage)

    monkeypatch.setattr(reference.ReferenceKernels, "attend", neighbours if bug == "neighbours" else forgotten)
    expect_broken(laws.check_independence, 3, 512, [0, 1, 2, 3])
    if bug == "forgotten chunk":
        expect_broken(laws.check_padding)


# -- 4. uninitialised entries are never read --------------------------------------------------------------------------
@pytest.mark.parametrize("chunk_size", [1, 5, 512])
def test_uninitialised_entries_are_never_read(subject: Subject, chunk_size: int) -> None:
    laws.check_no_uninitialised_reads(subject, chunk_size)


def test_gathering_one_token_too_many_breaks_the_fourth_law(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVStorage.gather

    def broken(self: KVStorage, layer: int, block_ids: Any, length: int) -> Any:
        return honest(self, layer, block_ids, min(length + 1, len(block_ids) * self.block_size))

    monkeypatch.setattr(KVStorage, "gather", broken)
    expect_broken(laws.check_no_uninitialised_reads, 5)


def test_a_pass_that_reads_before_it_writes_breaks_the_fourth_law(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = append_batch

    def broken(*arguments: Any) -> Any:
        batch = honest(*arguments)
        return replace(batch, cache_index=np.zeros_like(batch.cache_index))  # K and V go to the padding block

    monkeypatch.setattr(executor, "append_batch", broken)
    expect_broken(laws.check_no_uninitialised_reads, 5)


# -- 5. decode before prefill is complete is an error -----------------------------------------------------------------
def test_decode_before_the_prompt_is_complete_is_an_error(subject: Subject) -> None:
    laws.check_hard_boundary(subject)


def test_the_engine_draws_nothing_before_the_prompt_is_complete(subject: Subject) -> None:
    laws.check_nothing_is_drawn_early(subject)


@pytest.mark.parametrize("door", ["manager", "executor"])
def test_an_open_door_breaks_the_fifth_law(monkeypatch: pytest.MonkeyPatch, door: str) -> None:
    if door == "manager":
        monkeypatch.setattr(PhaseManager, "transition_to_decode", lambda self, sequence_id: None)
    else:
        monkeypatch.setattr(DecodeExecutor, "step", lambda self, kv_cache, token: 0)
    expect_broken(laws.check_hard_boundary)


# -- 6. prefill is deterministic --------------------------------------------------------------------------------------
def test_prefill_is_deterministic(subject: Subject) -> None:
    laws.check_determinism(subject)


def test_noise_in_the_cache_breaks_the_sixth_law(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, rng = ModelRunner.run, np.random.default_rng(0)

    def broken(self: ModelRunner, batch: Any) -> Any:
        return honest(self, batch) + rng.standard_normal() * np.float32(1e-6)

    monkeypatch.setattr(ModelRunner, "run", broken)
    expect_broken(laws.check_determinism)
