"""Prompts of recurrent layers in chunks, in the interpreter: against the reference, which scans token by token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from recurrence_cases import new_recurrence, normal, state_batch, state_storage, states_of

from bifolio.kernels.interface import Recurrence, StateUse
from bifolio.kernels.recurrence import states_of as states_of_batch
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.triton import TritonKernels, chunked_scan
from bifolio.kernels.triton.scan_plan import CHUNK, LONG, StagedStates, divide
from bifolio.sampling_params import SamplingParams
from helpers import drain, make_engine, output_ids, random_prompt
from hybrid_models import VOCABULARY, tiny_hybrid

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("delta", {"heads": 2, "groups": 1}),
    "delta, tiled, two tiles of values": (
        "delta", {"heads": 4, "groups": 2, "tiled": True, "key_size": 16, "value_size": 40},
    ),
    "keyed": ("keyed", {"heads": 2}),
    "delta of larger rates": ("delta", {"heads": 2, "groups": 2, "rate_scale": 2.0}),
    "keyed, bounded": ("keyed", {"heads": 2, "decay_bound": 5.0, "rate_scale": 1.5}),
    "keyed, two tiles of values": ("keyed", {"heads": 3, "key_size": 20, "value_size": 40}),
    "mamba": ("mamba", {"heads": 4, "groups": 2, "dt_limits": (0.05, 1.0)}),
    "lightning": ("lightning", {"heads": 4, "groups": 4}),
    "rwkv": ("rwkv", {"heads": 2}),
    "rwkv, two tiles of values": ("rwkv", {"heads": 3, "key_size": 20, "value_size": 40, "mixes_values": False}),
    "mamba without skip": ("mamba", {"heads": 2, "groups": 1, "key_size": 20, "value_size": 16, "skip": None}),
}  # fmt: skip
STARTS = [0, 1, 66, 70, 199]  # a decode, a prompt of 65 tokens, drafts, a prompt of 129
READS = [1, 2, 3, 0]
WRITES = {0: 1, 65: 2, 66: 6, 67: 7, 69: 8, 99: 9, 163: 10, 198: 11}  # 99 and 163: checkpoints inside a prompt


def run(
    kernels: Any,
    recurrence: Recurrence,
    rows: np.ndarray,
    starts: list[int] = STARTS,
    reads: list[int] = READS,
    stored: dict[int, int] = WRITES,
) -> tuple[np.ndarray, ...]:
    """The outputs of one pass, and all states after it."""
    storage, rng = state_storage(kernels, recurrence, 12), np.random.default_rng(2)
    for array in (storage.convolutions[1], storage.recurrent[1]):
        array[1:5] = kernels.from_host(normal(rng, *array[1:5].shape, scale=0.3))
    writes = [stored.get(token, -1) for token in range(len(rows))]
    batch = state_batch(kernels, starts, reads, writes)
    out = kernels.recur(kernels.from_host(rows), kernels.prepare_recurrence(recurrence), batch, storage)
    return kernels.to_host(out), *states_of(kernels, storage, recurrence, range(12))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("programs", [chunked_scan.FEWEST_PROGRAMS, 1])
@pytest.mark.parametrize("name", KINDS)
def test_chunks_give_the_results_of_the_reference(name: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of odd lengths beside a decode and drafts, continued states, checkpoints inside a chunk."""
    monkeypatch.setattr(chunked_scan, "FEWEST_PROGRAMS", programs)  # 1: a program has all values of a head
    kind, changes = KINDS[name]
    kernels, recurrence = TritonKernels("cpu", "f32"), new_recurrence(np.random.default_rng(5), kind, **changes)
    rows = normal(np.random.default_rng(6), STARTS[-1], recurrence.in_features)
    found = run(kernels, recurrence, rows)
    assert kernels._states is not None
    assert kernels._states.chunks is not None
    assert kernels._states.chunks.lengths.tolist() == [64, 1, 30, 64, 35]
    for ours, theirs in zip(found, run(ReferenceKernels(), recurrence, rows), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max(initial=0))


@pytest.mark.parametrize("name", ["delta", "keyed", "lightning", "mamba", "rwkv"])
def test_decodes_beside_prompts_have_one_token(name: str) -> None:
    """Decodes between two prompts: their places in the pass are not their numbers."""
    kind, changes = KINDS[name]
    kernels, recurrence = TritonKernels("cpu", "f32"), new_recurrence(np.random.default_rng(5), kind, **changes)
    layout: tuple[list[int], list[int], dict[int, int]] = (
        [0, 65, 66, 67, 132],
        [0, 1, 2, 0],
        {64: 6, 65: 1, 66: 7, 131: 8},
    )
    rows = normal(np.random.default_rng(6), layout[0][-1], recurrence.in_features)
    found = run(kernels, recurrence, rows, *layout)
    assert kernels._states is not None
    assert kernels._states.chunks is not None
    assert kernels._states.spans.one_token
    for ours, theirs in zip(found, run(ReferenceKernels(), recurrence, rows, *layout), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max(initial=0))


@pytest.mark.parametrize(("kind", "steps"), [("delta", 2), ("keyed", 24)])
def test_equal_tokens_without_decay_are_solved_exactly(kind: str, steps: int) -> None:
    """Keys that are all equal: powers of the triangular matrix would grow beyond any precision."""
    bias = np.full(steps, -30.0, np.float32)
    recurrence = new_recurrence(np.random.default_rng(5), kind, heads=2, groups=1, bias=bias)
    rows = np.repeat(normal(np.random.default_rng(6), 1, recurrence.in_features), STARTS[-1], axis=0)
    results = [run(kernels, recurrence, rows) for kernels in (TritonKernels("cpu", "f32"), ReferenceKernels())]
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_keys_that_decay_fast_do_not_overflow() -> None:
    """Logarithms of decay of several thousands within a chunk, beside keys that hardly decay."""
    bias = np.tile(np.array([80.0, -30.0], np.float32), 12)
    recurrence = new_recurrence(np.random.default_rng(5), "keyed", heads=2, bias=bias)
    rows = normal(np.random.default_rng(6), STARTS[-1], recurrence.in_features)
    results = [run(kernels, recurrence, rows) for kernels in (TritonKernels("cpu", "f32"), ReferenceKernels())]
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("is_equal", [False, True])
def test_states_of_rwkv_that_decay_fast_and_hardly(is_equal: bool) -> None:
    """The fastest decay of half of the keys, hardly any of the others, and keys that are all equal."""
    recurrence = new_recurrence(np.random.default_rng(5), "rwkv", heads=2, key_size=32, value_size=16)
    rows = normal(np.random.default_rng(6), STARTS[-1], recurrence.in_features)
    rows = np.repeat(rows[:1], len(rows), axis=0) if is_equal else rows
    rows[:, 64:128] = np.tile(np.array([80.0, -30.0], np.float32), 32)
    results = [run(kernels, recurrence, rows) for kernels in (TritonKernels("cpu", "f32"), ReferenceKernels())]
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_deterministic_mode_scans_token_by_token() -> None:
    recurrence = new_recurrence(np.random.default_rng(5), "mamba", heads=1, groups=1, key_size=4, value_size=4)
    kernels = TritonKernels("cpu", "f32", deterministic=True)
    own, storage = kernels.prepare_recurrence(recurrence), state_storage(kernels, recurrence, 2)
    rows = kernels.from_host(normal(np.random.default_rng(6), LONG, recurrence.in_features))
    kernels.recur(rows, own, state_batch(kernels, [0, LONG], [0], [-1] * LONG), storage)
    assert kernels._states is not None
    assert kernels._states.chunks is None


def test_chunks_partition_long_sequences_and_end_at_stored_states() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        lengths = rng.choice([1, 5, LONG - 1, LONG, LONG + 1, 300, 1000], size=int(rng.integers(1, 8)))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        writes = np.where(rng.random(starts[-1]) < rng.choice([0.0, 0.01, 0.2]), 7, -1)
        found = divide(starts, np.arange(len(lengths)) + 3, writes)
        if found is None:
            assert (lengths < LONG).all() or (writes >= 0).sum() > LONG // 16
            continue
        whole, (chunks, sizes), (first, last, reads) = found
        spans = [(a, b, read) for a, b, read in zip(*whole, strict=True)]
        for a, b, read in zip(first, last, reads, strict=True):
            ends = chunks[a:b] + sizes[a:b]
            assert np.array_equal(ends[:-1], chunks[a + 1 : b])
            assert sizes[a:b].max() <= CHUNK
            stored = np.flatnonzero(writes[chunks[a] : ends[-1]] >= 0) + chunks[a] + 1
            assert set(stored.tolist()) <= set(ends.tolist())
            spans.append((chunks[a], ends[-1], read))
        expected = zip(starts[:-1], starts[1:], np.arange(len(lengths)) + 3, strict=True)
        assert sorted(map(tuple, np.array(spans).tolist())) == [tuple(map(int, span)) for span in expected]


def test_a_pass_without_long_sequences_has_no_chunks() -> None:
    use = StateUse(np.array([0, 60, 120], np.int32), np.array([1, 2], np.int32), np.full(120, -1, np.int32))
    staged = StagedStates.of(use, "cpu", chunked=True)
    assert staged.chunks is None
    assert staged.spans.ends.tolist() == [60, 120]


@pytest.mark.parametrize("kind", ["delta", "keyed", "mamba", "rwkv"])
def test_an_engine_scans_prompts_in_chunks_and_continues_checkpoints(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 100 tokens, then one that leaves it at a checkpoint inside its chunks."""
    counts: list[int] = []
    staged = StagedStates.of

    def counted(use: StateUse, device: str, *, chunked: bool = False) -> StagedStates:
        found = staged(use, device, chunked=chunked)
        counts.append(0 if found.chunks is None else len(found.chunks.starts))
        return found

    monkeypatch.setattr(StagedStates, "of", counted)
    prompt = random_prompt(100, seed=2, vocab_size=VOCABULARY)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    answers = []
    for kernels in (TritonKernels("cpu", "f32"), ReferenceKernels()):
        options = {"block_size": 16, "checkpoint_tokens": 32, "token_budget": 128, "chunk_size": 128}
        engine = make_engine(tiny_hybrid(kind), kernels=kernels, max_num_seqs=2, **options)
        first = engine.add_request("first", prompt, params)
        drain(engine)
        second = engine.add_request("second", [*prompt[:40], 5, 6], params)
        drain(engine)
        assert second.metrics.num_cached_tokens == 32
        answers.append([output_ids(first), output_ids(second)])
    assert answers[0] == answers[1]
    assert 4 in counts  # ends of the checkpoints at 32, 64 and 96 tokens, and the end of the prompt


def test_sequences_without_a_cache_are_divided_too() -> None:
    """The states of such a batch are laid out by the host."""
    from case_table import segment_over

    from bifolio.kernels.interface import AttentionPhase, Batch

    recurrence = new_recurrence(np.random.default_rng(5), "mamba", heads=2, groups=1)
    rows = normal(np.random.default_rng(6), 75, recurrence.in_features)
    results = []
    for kernels in (TritonKernels("cpu", "f32"), ReferenceKernels()):
        segments = (segment_over(kernels, AttentionPhase.PREFILL, [5, 70], [5, 70], None),)
        tokens = kernels.from_host(np.zeros(75, np.int32))
        batch = Batch(tokens, tokens, None, segments, None)
        assert states_of_batch(batch).starts.tolist() == [0, 5, 75]
        own = kernels.prepare_recurrence(recurrence)
        results.append(kernels.to_host(kernels.recur(kernels.from_host(rows), own, batch, None)))
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=2e-6 * np.abs(results[1]).max())
