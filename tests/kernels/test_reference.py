"""The reference kernels against plain loops and torch: they define what every other kernel set must give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bifolio.kernels.host_math import erf
from bifolio.kernels.interface import (
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Batch,
    Heads,
    LayerAttention,
    Linear,
    Norm,
    Rotation,
)
from bifolio.kernels.reference import ReferenceKernels, rotate, sigmoid
from bifolio.kernels.reference_attention import causal_attention, causal_mask
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from helpers import kv_storage

KERNELS = ReferenceKernels()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def attention_by_hand(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float, window: int | None
) -> np.ndarray:
    """One query, one head at a time, in f64, reading only what the query may see."""
    num_queries, heads, dim = query.shape
    length, kv_heads, _ = key.shape
    output = np.zeros((num_queries, heads, dim))
    for i in range(num_queries):
        position = length - num_queries + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            seen = slice(first, position + 1)
            scores = key[seen, kv].astype(np.float64) @ query[i, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            output[i, head] = weights / weights.sum() @ value[seen, kv].astype(np.float64)
    return output.reshape(num_queries, heads * dim)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize(("num_queries", "length", "window"), [(1, 1, None), (1, 17, 5), (5, 17, None), (17, 17, 3)])
def test_causal_attention_by_hand(group: int, dim: int, num_queries: int, length: int, window: int | None) -> None:
    query, key, value = (
        normal(num_queries, 2 * group, dim),
        normal(length, 2, dim, seed=1),
        normal(length, 2, dim, seed=2),
    )
    scale = 1 / math.sqrt(dim)
    ours = causal_attention(query, key, value, scale, window)
    np.testing.assert_allclose(ours, attention_by_hand(query, key, value, scale, window), atol=2e-6)


def test_causal_attention_like_torch() -> None:
    query, key, value = normal(7, 4, 16), normal(7, 4, 16, seed=1), normal(7, 4, 16, seed=2)
    theirs = F.scaled_dot_product_attention(
        *(torch.from_numpy(x).transpose(0, 1)[None] for x in (query, key, value)), is_causal=True
    )
    ours = causal_attention(query, key, value, 0.25, None)
    np.testing.assert_allclose(ours, theirs[0].transpose(0, 1).reshape(7, 64).numpy(), atol=1e-6)


def test_causal_mask_draws_the_band() -> None:
    assert causal_mask(2, 4, None).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert causal_mask(2, 4, 2).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert causal_mask(1, 3, 1).tolist() == [[False, False, True]]


def test_scores_that_would_overflow_do_not() -> None:
    query, key, value = normal(3, 2, 16) * 1e4, normal(3, 2, 16, seed=1) * 1e4, normal(3, 2, 16, seed=2)
    output = causal_attention(query, key, value, 1.0, None)
    assert np.isfinite(output).all()


# -- paged ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("contexts", [[1], [15, 16, 17], [3, 40, 1]])
def test_attend_reads_exactly_the_paged_context(block_size: int, contexts: list[int]) -> None:
    """Blocks lie in a shuffled order among blocks of NaN; the result is that of contiguous keys."""
    shape = AttentionShape(0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=9)
    per_row = [-(-n // block_size) for n in contexts]
    order = np.random.default_rng(0).permutation(np.arange(1, sum(per_row) + 3))
    storage = kv_storage(1, len(order) + 1, block_size, 2, 16, poison=True)
    tables = np.zeros((len(contexts), max(per_row) + 1), np.int32)
    expected, queries = [], []
    for row, length in enumerate(contexts):
        blocks, order = order[: per_row[row]], order[per_row[row] :]
        tables[row, : len(blocks)] = blocks
        keys, values = normal(length, 2, 16, seed=row), normal(length, 2, 16, seed=50 + row)
        positions = np.arange(length)
        storage.write(0, blocks[positions // block_size] * block_size + positions % block_size, keys, values)
        query = normal(min(length, 3), 4, 16, seed=99 + row)
        queries.append(query)
        expected.append(attention_by_hand(query, keys, values, 0.25, 9))
    lengths = np.array([len(q) for q in queries], np.int32)
    segment = PrefillOrchestrator.lay_out(np.array(contexts, np.int32) - lengths, lengths, tables)
    layer = LayerAttention(KERNELS, shape, storage)
    output = layer.compute_paged_attention(np.concatenate(queries), segment)
    np.testing.assert_allclose(output, np.concatenate(expected), atol=2e-6)


def test_attend_several_segments_in_the_order_of_tokens() -> None:
    shape = AttentionShape(0, 2, 2, 16, 0.25)
    storage = kv_storage(1, 4, 8, 2, 16, poison=True)
    keys, values = normal(6, 2, 16), normal(6, 2, 16, seed=1)
    storage.write(0, np.arange(8, 14), keys, values)
    fresh = Heads(normal(5, 2, 16, seed=2), normal(5, 2, 16, seed=3), normal(5, 2, 16, seed=4))
    numbers = {n: np.array([n], np.int32) for n in (0, 1, 4, 5)}
    decode = DecodeOrchestrator.lay_out(numbers[5], numbers[1], np.array([[1]], np.int32))
    prefill = PrefillOrchestrator.lay_out(numbers[0], numbers[4], np.array([[2]], np.int32), 1)
    output = KERNELS.attend(fresh, shape, (decode, prefill), storage)
    np.testing.assert_allclose(output[:1], attention_by_hand(fresh.query[:1], keys, values, 0.25, None), atol=1e-6)
    own = attention_by_hand(fresh.query[1:], fresh.key[1:], fresh.value[1:], 0.25, None)
    np.testing.assert_allclose(output[1:], own, atol=1e-6)


def test_rope_and_write_puts_rotated_keys_and_plain_values_into_their_slots() -> None:
    shape = AttentionShape(0, 2, 1, 8, 1.0)
    storage = kv_storage(1, 3, 4, 1, 8)
    qkv, positions = normal(2, 32), np.array([5, 6], np.int32)
    rotation = KERNELS.rotation(np.array([1.0, 0.5, 0.25, 0.125], np.float32), 1.0, positions)
    segment = AttentionSegment(AttentionPhase.PREFILL, 0, 2, np.array([0, 2]), np.array([7]), None, False, 2, 7)
    batch = Batch(np.zeros(2, np.int32), positions, np.array([4, 9]), (segment,), None, 6)
    heads = KERNELS.rope_and_write(qkv, shape, rotation, batch, storage)
    np.testing.assert_array_equal(storage.keys[0][1, :, 0], heads.key[0])
    np.testing.assert_array_equal(storage.keys[0][2, :, 1], heads.key[1])
    np.testing.assert_array_equal(storage.values[0][2, 0, 1], qkv[1, 24:])
    np.testing.assert_allclose(heads.query[0, 1], rotate_by_hand(qkv[0, 8:16], rotation, 0), atol=1e-6)


# -- small operations ------------------------------------------------------------------------------------------------


def rotate_by_hand(head: np.ndarray, rotation: Rotation, token: int) -> np.ndarray:
    half = rotation.cos.shape[-1]
    output = head.astype(np.float64).copy()
    for i in range(half):
        turned = complex(head[i], head[i + half]) * complex(rotation.cos[token, i], rotation.sin[token, i])
        output[i], output[i + half] = turned.real, turned.imag
    return output


def test_rotate_leaves_the_rest_of_a_head_alone() -> None:
    x = normal(3, 2, 12)
    rotation = KERNELS.rotation(np.array([1.0, 0.1], np.float32), 1.0, np.array([0, 1, 70], np.int32))
    turned = rotate(x, rotation, interleaved=False)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(turned[0], x[0])  # position 0 is not turned
    np.testing.assert_allclose(turned[2, 1, :4], rotate_by_hand(x[2, 1], rotation, 2)[:4], atol=1e-6)


def test_interleaved_rotation_is_the_same_on_reordered_dimensions() -> None:
    x = normal(4, 2, 8)
    rotation = KERNELS.rotation(np.array([1.0, 0.3, 0.1, 0.01], np.float32), 1.0, np.arange(4, dtype=np.int32))
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # pairs (2i, 2i + 1) become (i, i + half)
    np.testing.assert_allclose(
        rotate(x, rotation, interleaved=True)[..., order], rotate(x[..., order], rotation, interleaved=False), atol=1e-6
    )


@pytest.mark.parametrize("centered", [False, True])
def test_norms_like_torch(centered: bool) -> None:
    x, weight, bias = normal(5, 48) * 3, 1 + normal(48, seed=1), normal(48, seed=2)
    ours = KERNELS.norm(x, Norm(weight, bias if centered else None, 1e-5, centered))
    tensors = [torch.from_numpy(v) for v in (x, weight, bias)]
    theirs = (
        F.layer_norm(tensors[0], (48,), *tensors[1:], 1e-5)
        if centered
        else F.rms_norm(*tensors[:1], (48,), tensors[1], 1e-5)
    )
    np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-6)
    delta = normal(5, 48, seed=3)
    residual, normed = KERNELS.add_norm(x, delta, Norm(weight, None, 1e-5))
    np.testing.assert_array_equal(residual, x + delta)
    np.testing.assert_array_equal(normed, KERNELS.norm(x + delta, Norm(weight, None, 1e-5)))


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("relu2", lambda x: F.relu(x) ** 2),
    ],
)
def test_activations_like_torch(name: str, theirs: object) -> None:
    x = np.linspace(-30, 30, 4001, dtype=np.float32)[None]
    np.testing.assert_allclose(KERNELS.act(x, name), theirs(torch.from_numpy(x)).numpy(), atol=2e-6)  # type: ignore[operator]
    pair = np.concatenate([x, x * 0.5 + 1], axis=-1)
    np.testing.assert_allclose(KERNELS.act_mul(pair, name), KERNELS.act(x, name) * (x * 0.5 + 1), rtol=1e-6)


def test_error_function_and_sigmoid_at_the_ends() -> None:
    x = np.array([-1e4, -6.0, -1e-8, 0.0, 0.5, 6.0, 1e4], np.float32)
    np.testing.assert_allclose(erf(np, x), torch.erf(torch.from_numpy(x)).numpy(), atol=2e-7)
    np.testing.assert_allclose(sigmoid(np, x), torch.sigmoid(torch.from_numpy(x)).numpy(), atol=1e-6)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_gates_open_equal_parts_of_a_row(count: int) -> None:
    x, logits = normal(5, 12), normal(5, count, seed=1)
    expected = x.copy()
    for row in range(5):
        for column in range(12):
            expected[row, column] /= 1 + math.exp(-logits[row, column // (12 // count)])
    np.testing.assert_allclose(KERNELS.gate(x, logits), expected, rtol=1e-5)


def test_linear_lays_parts_side_by_side_with_their_biases() -> None:
    x, first, second, bias = normal(3, 8), normal(5, 8, seed=1), normal(2, 8, seed=2), normal(2, seed=3)
    ours = KERNELS.linear(x, Linear((first, second), (None, bias)))
    np.testing.assert_allclose(ours, np.concatenate([x @ first.T, x @ second.T + bias], axis=-1), atol=1e-6)


def test_logits_are_capped_softly() -> None:
    x, head = normal(2, 8) * 10, normal(11, 8, seed=1)
    capped = KERNELS.logits(x, Linear((head,), (None,)), 5.0)
    np.testing.assert_allclose(capped, np.tanh(x @ head.T / 5) * 5, atol=1e-5)
    assert np.abs(capped).max() <= 5


@pytest.mark.full
def test_gradients_flow_through_attention_on_torch_tensors() -> None:
    query, key, value = (torch.from_numpy(normal(4, 2, 8, seed=s)).double().requires_grad_() for s in range(3))
    assert torch.autograd.gradcheck(lambda q, k, v: causal_attention(q, k, v, 0.3, 3), (query, key, value))
