"""Orchestrators and phase manager: blocks of both phases, transitions, batches, and the attention layer over them."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.errors import OutOfBlocksError, PhaseError, UnknownSequenceError
from bifolio.kernels.interface import AttentionPhase, AttentionShape, Batch, LayerAttention
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.reference_attention import causal_attention
from bifolio.model.transformer import PagedAttentionLayer
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.phases import PhaseManager
from bifolio.sequence import FinishReason, Request, Sequence, SequencePhase
from helpers import cpu_kernel_names, kv_storage, make_kernels, make_runner, random_prompt, tiny_loaded

SHAPE = AttentionShape(layer=0, num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def orchestrators(num_blocks: int = 16) -> tuple[PrefillOrchestrator, DecodeOrchestrator, KVCacheBlockManager]:
    blocks = KVCacheBlockManager(num_blocks, 4)
    return PrefillOrchestrator(blocks), DecodeOrchestrator(blocks), blocks


# -- blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "expected"), [(1, 1), (3, 1), (4, 1), (5, 2), (16, 4)])
def test_prefill_block_allocation_covers_the_prompt(length: int, expected: int) -> None:
    prefill, _, blocks = orchestrators()
    assert len(prefill.prefill_allocate_blocks(7, length)) == expected
    assert blocks.num_tokens_of(7) == length
    assert blocks.num_used_blocks == expected


def test_prefill_block_allocation_is_all_or_nothing() -> None:
    prefill, _, blocks = orchestrators(num_blocks=5)
    with pytest.raises(OutOfBlocksError, match=r"needs 5 blocks, 4 are free"):
        prefill.prefill_allocate_blocks(1, 17)
    assert (blocks.num_used_blocks, blocks.sequence_ids()) == (0, [])
    prefill.prefill_allocate_blocks(1, 16)
    with pytest.raises(OutOfBlocksError):
        prefill.prefill_allocate_blocks(2, 1)
    blocks.check_invariants()


def test_prefill_comes_once_and_with_a_token() -> None:
    prefill, _, _ = orchestrators()
    prefill.prefill_allocate_blocks(1, 3)
    with pytest.raises(PhaseError, match="already holds 3 tokens"):
        prefill.prefill_allocate_blocks(1, 3)
    with pytest.raises(PhaseError, match="at least one token"):
        prefill.prefill_allocate_blocks(2, 0)


def test_decode_block_allocation_takes_a_block_only_when_the_last_is_full() -> None:
    prefill, decode, blocks = orchestrators()
    prefill.prefill_allocate_blocks(1, 3)
    assert decode.allocate_decode_block(1, 3) is None  # the fourth token fits
    new = decode.allocate_decode_block(1, 4)
    assert new == blocks.block_ids_of(1)[-1]
    assert (len(blocks.block_ids_of(1)), blocks.num_tokens_of(1)) == (2, 5)


def test_decode_block_allocation_copies_a_shared_tail() -> None:
    prefill, decode, blocks = orchestrators()
    (tail,) = prefill.prefill_allocate_blocks(1, 3)
    blocks.fork(1, 2)
    own = decode.allocate_decode_block(2, 3)
    assert own != tail
    assert blocks.take_moves() == [(tail, own)]
    assert decode.allocate_decode_block(1, 3) is None  # the last sharer keeps the original


def test_decode_block_allocation_refuses_what_cannot_be() -> None:
    prefill, decode, blocks = orchestrators(num_blocks=2)
    with pytest.raises(UnknownSequenceError):
        decode.allocate_decode_block(9, 0)
    prefill.prefill_allocate_blocks(1, 4)
    with pytest.raises(PhaseError, match="holds 4 tokens, not 7"):
        decode.allocate_decode_block(1, 7)
    with pytest.raises(OutOfBlocksError):
        decode.allocate_decode_block(1, 4)
    assert blocks.num_tokens_of(1) == 4


# -- phases -------------------------------------------------------------------------------------------------------


def tracked() -> tuple[PhaseManager, Sequence]:
    prefill, decode, _ = orchestrators()
    manager = PhaseManager(prefill, decode)
    request = Request("r", 0, [1, 2, 3], SamplingParams(), 0)
    sequence = Sequence(5, request, 0, [1, 2, 3], 3, 0)
    manager.track(sequence)
    return manager, sequence


def test_phase_transitions_follow_progress() -> None:
    manager, sequence = tracked()
    assert manager.is_prefilling(5)
    with pytest.raises(PhaseError, match="3 tokens of its prompt are not computed"):
        manager.transition_to_decode(5)
    sequence.num_computed = 2
    assert manager.get_phase(5) is SequencePhase.PREFILL
    sequence.num_computed = 3
    manager.transition_to_decode(5)
    sequence.append_token(9)
    assert manager.is_decoding(5)
    manager.set_phase(5, SequencePhase.DECODE)
    with pytest.raises(PhaseError, match="by its progress it is in decode"):
        manager.set_phase(5, SequencePhase.PREFILL)
    sequence.num_computed = 0  # preempted: prefill again, by itself
    assert manager.is_prefilling(5)
    sequence.finish_reason = FinishReason.STOP
    assert manager.get_phase(5) is SequencePhase.COMPLETE
    with pytest.raises(PhaseError, match="has ended"):
        manager.transition_to_decode(5)


def test_unknown_sequences_are_an_error_not_prefill() -> None:
    manager, _ = tracked()
    for question in (manager.get_phase, manager.is_prefilling, manager.is_decoding, manager.transition_to_decode):
        with pytest.raises(UnknownSequenceError, match="no sequence 6"):
            question(6)
    manager.remove_sequence(5)
    manager.remove_sequence(5)
    with pytest.raises(UnknownSequenceError):
        manager.get_phase(5)


# -- attention of both phases ---------------------------------------------------------------------------------------


def filled(
    lengths: dict[int, int],
) -> tuple[PrefillOrchestrator, DecodeOrchestrator, LayerAttention, dict[int, tuple[np.ndarray, np.ndarray]]]:
    """Sequences whose keys and values are in the cache, among blocks of NaN."""
    prefill, decode, _ = orchestrators(num_blocks=40)
    storage = kv_storage(1, 40, 4, 2, 8, poison=True)
    content = {}
    for sequence_id, length in lengths.items():
        prefill.prefill_allocate_blocks(sequence_id, length)
        keys, values = normal(length, 2, 8, seed=sequence_id), normal(length, 2, 8, seed=100 + sequence_id)
        storage.write(0, prefill.blocks.table(sequence_id).cache_index(0, length), keys, values)
        content[sequence_id] = (keys, values)
    return prefill, decode, LayerAttention(ReferenceKernels(), SHAPE, storage), content


def expected(query: np.ndarray, content: tuple[np.ndarray, np.ndarray], end: int) -> np.ndarray:
    keys, values = content
    return causal_attention(query, keys[:end], values[:end], SHAPE.scale, None)


def test_batch_prefill_gives_each_sequence_what_it_gets_alone() -> None:
    prefill, _, kernel, content = filled({1: 9, 2: 1, 3: 17})
    ranges = {3: (10, 17), 1: (0, 9), 2: (0, 1)}  # a later chunk sees the whole context before it
    queries = {i: normal(end - start, 4, 8, seed=i) for i, (start, end) in ranges.items()}
    together = prefill.batch_prefill(queries, ranges, kernel)
    for i, (start, end) in ranges.items():
        alone = prefill.compute_prefill_attention(queries[i], i, start, end, kernel)
        np.testing.assert_allclose(together[i], alone, atol=1e-6)
        np.testing.assert_allclose(alone, expected(queries[i], content[i], end), atol=1e-6)


def test_batch_decode_gives_each_sequence_what_it_gets_alone() -> None:
    _, decode, kernel, content = filled({1: 9, 2: 1, 3: 17})
    queries = {i: normal(1, 4, 8, seed=i) for i in (2, 3, 1)}
    lengths = {1: 8, 2: 0, 3: 16}  # tokens before the newest one
    together = decode.batch_decode(queries, lengths, kernel)
    for i, length in lengths.items():
        alone = decode.compute_decode_attention(queries[i], i, length, kernel)
        np.testing.assert_allclose(together[i], alone, atol=1e-6)
        np.testing.assert_allclose(alone, expected(queries[i], content[i], length + 1), atol=1e-6)


def test_attention_beyond_the_reserved_slots_is_an_error() -> None:
    prefill, decode, kernel, _ = filled({1: 5})
    with pytest.raises(PhaseError, match="room for 5 tokens, not for 6"):
        decode.compute_decode_attention(normal(1, 4, 8), 1, 5, kernel)
    with pytest.raises(PhaseError, match=r"2 queries do not fill tokens \[0, 3\)"):
        prefill.compute_prefill_attention(normal(2, 4, 8), 1, 0, 3, kernel)
    with pytest.raises(UnknownSequenceError):
        decode.compute_decode_attention(normal(1, 4, 8), 2, 0, kernel)


def test_an_empty_batch_gives_nothing() -> None:
    prefill, decode, kernel, _ = filled({1: 5})
    assert prefill.batch_prefill({}, {}, kernel) == {}
    assert decode.batch_decode({}, {}, kernel) == {}


@pytest.mark.parametrize("name", cpu_kernel_names())
def test_orchestrators_run_on_every_kernel_set(name: str) -> None:
    prefill, decode, _ = orchestrators()
    kernels = make_kernels(name)
    backend = "torch" if kernels.array_backend == "torch" else "numpy"
    storage = kv_storage(1, 16, 4, 2, 8, backend=backend, poison=True)
    prefill.prefill_allocate_blocks(1, 6)
    keys, values = normal(6, 2, 8), normal(6, 2, 8, seed=1)
    storage.write(0, *(kernels.from_host(x) for x in (prefill.blocks.table(1).cache_index(0, 6), keys, values)))
    kernel = LayerAttention(kernels, SHAPE, storage)
    queries = normal(3, 4, 8, seed=2)
    whole = kernels.to_host(prefill.compute_prefill_attention(kernels.from_host(queries), 1, 3, 6, kernel))
    np.testing.assert_allclose(whole, expected(queries, (keys, values), 6), atol=1e-5)
    last = kernels.to_host(decode.compute_decode_attention(kernels.from_host(queries[2:]), 1, 5, kernel))
    np.testing.assert_allclose(last, whole[2:], atol=1e-5)


# -- with the attention layer ---------------------------------------------------------------------------------------


def layer_batch(blocks: KVCacheBlockManager, sequence_id: int, start: int, end: int, phase: AttentionPhase) -> Batch:
    orchestrator = PrefillOrchestrator if phase is AttentionPhase.PREFILL else DecodeOrchestrator
    first, count = np.array([start], np.int32), np.array([end - start], np.int32)
    segment = orchestrator.lay_out(first, count, blocks.tables_array([sequence_id]))
    positions = np.arange(start, end, dtype=np.int32)
    index = blocks.table(sequence_id).cache_index(start, end)
    return Batch(np.zeros(end - start, np.int32), positions, index, (segment,), None, end - 1)


def test_the_attention_layer_over_orchestrated_blocks_is_the_same_in_both_phases() -> None:
    """A prompt in one prefill; the same tokens as a short prefill and decodes: one layer, one result, no allocation."""
    runner, blocks = make_runner(tiny_loaded(), poison=True)
    kernels, weights = runner.kernels, runner.weights
    prefill, decode = PrefillOrchestrator(blocks), DecodeOrchestrator(blocks)
    tokens = np.array(random_prompt(10, vocab_size=61), np.int32)
    layer = PagedAttentionLayer(weights.layers[0])

    def run(sequence_id: int, start: int, end: int, phase: AttentionPhase) -> np.ndarray:
        batch = layer_batch(blocks, sequence_id, start, end, phase)
        x = kernels.embed(weights.embedding, tokens[start:end], 1.0)
        rotation = kernels.rotation(weights.inverse_frequencies[0], 1.0, batch.positions)
        used = blocks.num_used_blocks
        output = np.asarray(layer(x, batch, kernels, runner.storage, (rotation,)))
        assert blocks.num_used_blocks == used
        return output

    prefill.prefill_allocate_blocks(1, 10)
    whole = run(1, 0, 10, AttentionPhase.PREFILL)
    prefill.prefill_allocate_blocks(2, 4)
    parts = [run(2, 0, 4, AttentionPhase.PREFILL)]
    for length in range(4, 10):
        decode.allocate_decode_block(2, length)
        parts.append(run(2, length, length + 1, AttentionPhase.DECODE))
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)
