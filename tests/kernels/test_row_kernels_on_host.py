"""The kernels in CUDA C++ for one row, compiled for the host (`cuda_on_host.h`), against torch in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from host_modules import COMPILER, ON_HOST, close, normal

pytest.importorskip("triton")

from bifolio.cache.storage import CacheLayout, KVStorage
from bifolio.kernels.cuda import row_attention, row_delta, row_experts, row_product
from bifolio.kernels.interface import AttentionShape, Norm, Recurrence, Rotation, Routing
from bifolio.kernels.reference_attention import causal_attention
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton.row_layouts import LAYOUTS, pack
from exotic_weights import exotic_tensor

pytestmark = [pytest.mark.full, pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"), ON_HOST]
PROCESSORS = 3  # thread blocks of a product: several units each, and an uneven division
REFERENCE = TorchKernels("cpu", "f32")


# -- products ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "depth", "extra"),
    [
        (64, 96, "norm"), (56, 320, "gated"), (40, 2048, "residual"), (13, 136, "norm"), (16, 8, "norm"),
        pytest.param(22, 4104, "residual", marks=pytest.mark.slow),
        pytest.param(12, 2056, "gated", marks=pytest.mark.slow),
        pytest.param(24, 64, "bias", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_product(rows: int, depth: int, extra: str) -> None:
    """By tensor cores, or by lanes if the depth is no multiple of 32 or above 2048; the last columns are ragged."""
    check_product(rows, depth, extra)


@pytest.mark.parametrize(("rows", "depth", "extra"), [(64, 96, "norm"), (24, 2048, "gated"), (13, 144, "residual")])
def test_a_product_with_weights_in_fp8(rows: int, depth: int, extra: str) -> None:
    check_product(rows, depth, extra, is_fp8=True)


@pytest.mark.parametrize("name", [format.name for format in LAYOUTS if format.name != "MXFP4"])
@pytest.mark.parametrize(("rows", "depth", "extra"), [(24, 512, "norm"), (12, 4352, "gated"), (13, 256, "residual")])
def test_a_product_with_quantised_weights(name: str, rows: int, depth: int, extra: str) -> None:
    """x is rounded to 16 bits for every 16 columns."""
    gated = extra == "gated"
    source = exotic_tensor(name, rows * (2 if gated else 1), depth)
    weight = pack((source,), "cpu")
    stream = normal(2, 1, depth, dtype=torch.float32)
    norm = None if extra == "residual" else Norm(normal(3, depth), None, 1e-5)
    x = stream.to(torch.bfloat16) if extra == "residual" else stream
    residual = normal(5, 1, rows, dtype=torch.float32) if extra == "residual" else None
    out = row_product.row_product(
        x, weight.rows, norm=norm, bias=None, residual=residual, activation=0 if gated else -1,
        out_dtype=torch.float32, num_processors=PROCESSORS, codes=weight.constants(),
    )  # fmt: skip
    expected = (x.float() if norm is None else REFERENCE.norm(x, norm)) @ torch.from_numpy(source.dequantize()).T
    if gated:
        expected = torch.nn.functional.silu(expected[:, :rows]) * expected[:, rows:]
    close(out, expected if residual is None else expected + residual, 1e-4)


@pytest.mark.parametrize(("rows", "depth", "ring"), [(176, 128, 10_000), (140, 264, 4_500)])
def test_a_ring_that_is_filled_again_and_again(
    rows: int, depth: int, ring: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLICE_BYTES", "RING_BYTES", "TENSOR_RING_BYTES"):
        monkeypatch.setattr(row_product, name, ring)
    row_product.plan_of.cache_clear()
    try:
        plan = row_product.plan_of(rows, depth, gated=False, num_processors=PROCESSORS)
        assert plan is not None
        assert plan.units // plan.grid >= 2 * plan.stages
        check_product(rows, depth, "norm")
    finally:
        row_product.plan_of.cache_clear()


@pytest.mark.parametrize(("depth", "dtype"), [(136, torch.float32), (136, torch.bfloat16), (96, torch.float32)])
def test_a_stream_and_a_residual_in_bf16(depth: int, dtype: torch.dtype) -> None:
    """As those of draft heads; tensor cores, for a depth of 96, take a stream in f32."""
    weight, x, norm = (
        normal(1, 40, depth, scale=depth**-0.5),
        normal(2, 1, depth, dtype=dtype),
        Norm(normal(3, depth), None, 1e-5),
    )
    residual = normal(5, 1, 40)
    options: dict[str, Any] = {"norm": norm, "residual": residual, "num_processors": PROCESSORS}
    assert row_product.can_multiply(x, weight, gated=False, **options)
    out = row_product.row_product(x, weight, bias=None, activation=-1, out_dtype=torch.float32, **options)
    close(out, REFERENCE.norm(x.float(), norm) @ weight.float().T + residual.float(), 2e-5)


def check_product(rows: int, depth: int, extra: str, *, is_fp8: bool = False) -> None:
    gated = extra == "gated"
    weight, stream = (
        normal(1, rows * (2 if gated else 1), depth, scale=depth**-0.5),
        normal(2, 1, depth, dtype=torch.float32),
    )
    scales = None
    if is_fp8:
        weight, scales = (weight * 64).to(torch.float8_e4m3fn), normal(6, weight.shape[0], dtype=torch.float32).abs()
    norm = None if extra == "residual" else Norm(normal(3, depth), None, 1e-5)
    x = stream.to(torch.bfloat16) if extra == "residual" else stream
    bias = normal(4, weight.shape[0], dtype=torch.float32) if extra in ("bias", "gated") else None
    residual = normal(5, 1, rows, dtype=torch.float32) if extra == "residual" else None
    out = row_product.row_product(
        x, weight, norm=norm, bias=bias, residual=residual, activation=0 if gated else -1,
        out_dtype=torch.float32, num_processors=PROCESSORS, row_scales=scales,
    )  # fmt: skip
    dense = weight.float() if scales is None else weight.float() * scales[:, None]
    expected = (x.float() if norm is None else REFERENCE.norm(x, norm)) @ dense.T
    expected = expected if bias is None else expected + bias
    if gated:
        expected = torch.nn.functional.silu(expected[:, :rows]) * expected[:, rows:]
    close(out, expected if residual is None else expected + residual, 2e-5)


@pytest.mark.parametrize(
    ("count", "top_k", "width", "depth", "normed"),
    [
        (7, 3, 64, 256, True),
        (12, 11, 16, 64, False),
        pytest.param(5, 5, 24, 96, False, marks=pytest.mark.slow),
        pytest.param(4, 1, 40, 136, True, marks=pytest.mark.slow),
    ],
)
def test_experts(count: int, top_k: int, width: int, depth: int, normed: bool) -> None:
    up, down = (
        normal(1, count * 2 * width, depth, scale=depth**-0.5),
        normal(2, count * depth, width, scale=width**-0.5),
    )
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(3))[:top_k]
    shares = torch.rand(top_k, generator=torch.Generator().manual_seed(4))
    stream, residual = (normal(seed, 1, depth, dtype=torch.float32) for seed in (5, 6))
    norm = Norm(normal(7, depth, dtype=torch.float32), None, 1e-5) if normed else None
    x, out = stream if normed else stream.to(torch.bfloat16), torch.empty(1, depth)
    options: dict[str, Any] = {"norm": norm, "residual": residual, "num_processors": PROCESSORS}
    routing = Routing(chosen.to(torch.int32)[None], shares[None])
    assert row_experts.can_mix(x, up, down, top_k, **options)
    row_experts.mix_row(x, routing, up, down, out, activation=0, **options)
    truth = x.float() if norm is None else REFERENCE.norm(x, norm)
    ups, downs = up.float().view(count, 2, width, depth), down.float().view(count, depth, width)
    expected = residual.clone()
    for share, expert in zip(shares, chosen, strict=True):
        hidden = torch.nn.functional.silu(truth @ ups[expert, 0].T) * (truth @ ups[expert, 1].T)
        expected += share * hidden @ downs[expert].T
    close(out - residual, expected - residual, 5e-3)  # hidden values are bf16


# -- attention ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "lengths", "normed", "is_raw"),
    [
        (4, 2, 64, 64, [1, 37], False, True), (8, 1, 64, 48, [300], True, True), (4, 2, 128, 128, [130], False, False),
        (2, 1, 64, 16, [3], False, True),
        pytest.param(3, 1, 128, 128, [900, 2], False, True, marks=pytest.mark.slow),
        pytest.param(2, 2, 256, 64, [70], True, True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_attention(
    heads: int, kv_heads: int, dim: int, rotary: int, lengths: list[int], normed: bool, is_raw: bool
) -> None:
    size, count = 16, len(lengths)
    norms = [Norm(normal(seed, dim), None, 1e-6) if normed else None for seed in (1, 2)]
    shape = AttentionShape(0, heads, kv_heads, dim, dim**-0.5, query_norm=norms[0], key_norm=norms[1])
    blocks = [-(-length // size) for length in lengths]
    storage = KVStorage(CacheLayout(1, sum(blocks) + 2, size, kv_heads, dim, "bf16"), device="cpu", backend="torch")
    order = 1 + np.random.default_rng(0).permutation(sum(blocks) + 1).astype(np.int32)
    tables = torch.zeros(count, max(blocks), dtype=torch.int32)
    keys, values = storage.keys[0], storage.values[0]
    keys.fill_(float("nan")), values.fill_(float("nan"))
    angles = normal(3, count, rotary // 2, scale=3.0, dtype=torch.float32)
    rotation = Rotation(angles.cos(), angles.sin())
    qkv = normal(4, count, (heads + 2 * kv_heads) * dim)
    turned = REFERENCE.rope_and_write(qkv.float(), shape, rotation, _batch(count), None)
    expected, newest, used = [], [], 0
    for number, (length, num_blocks) in enumerate(zip(lengths, blocks, strict=True)):
        tables[number, :num_blocks] = torch.from_numpy(order[used : used + num_blocks])
        used += num_blocks
        places = torch.arange(length)
        places = tables[number, places // size].long() * size + places % size
        own_keys, own_values = normal(5 + number, length, kv_heads, dim), normal(50 + number, length, kv_heads, dim)
        own_keys[-1], own_values[-1] = turned.key[number].to(torch.bfloat16), turned.value[number].to(torch.bfloat16)
        written = places if not is_raw else places[:-1]
        keys[written // size, :, written % size] = own_keys[: len(written)]
        values[written // size, :, written % size] = own_values[: len(written)]
        newest.append((int(places[-1]), own_keys[-1], own_values[-1]))
        query = turned.query[number : number + 1]
        expected.append(causal_attention(query, own_keys.float(), own_values.float(), shape.scale, None))
    given = row_attention.RawHeads(qkv, rotation) if is_raw else turned.query.to(torch.bfloat16)
    assert not is_raw or row_attention.can_fuse(shape, rotation, storage)
    integers = torch.tensor(lengths, dtype=torch.int32)
    rows = torch.arange(count, dtype=torch.int32)
    out = row_attention.row_attention(given, shape, storage, tables, rows, integers)
    close(out, torch.cat(expected).reshape(count, -1), 8e-3)
    for place, key, value in newest:
        close(keys[place // size, :, place % size], key.float(), 5e-3)
        torch.testing.assert_close(values[place // size, :, place % size], value)


def _batch(count: int) -> Any:
    from bifolio.kernels.interface import Batch

    index = torch.zeros(count, dtype=torch.int64)
    return Batch(index, index, index, (), None)


def test_a_context_of_no_token_gives_zeros() -> None:
    """A graph is recorded on padding."""
    shape = AttentionShape(0, 2, 1, 64, 0.125)
    storage = KVStorage(CacheLayout(1, 2, 16, 1, 64, "bf16"), device="cpu", backend="torch")
    rotation = Rotation(torch.ones(1, 32), torch.zeros(1, 32))
    integers = torch.zeros(1, dtype=torch.int32)
    heads = row_attention.RawHeads(normal(1, 1, 4 * 64), rotation)
    before = storage.keys[0].clone()
    out = row_attention.row_attention(heads, replace(shape), storage, integers[None], integers, integers)
    assert (out == 0).all()
    torch.testing.assert_close(storage.keys[0], before)


# -- recurrent layers --------------------------------------------------------------------------------------------------
def delta_net(heads: int, groups: int, key_size: int, value_size: int) -> Recurrence:
    channels = 2 * groups * key_size + heads * value_size
    wide = torch.float32
    return Recurrence(
        "delta", 0, 4, channels, heads, groups, key_size, value_size, normal(1, channels, 4, dtype=wide),
        decay=-torch.rand(heads, generator=torch.Generator().manual_seed(2)), bias=normal(3, heads, dtype=wide),
        norm=Norm(normal(4, value_size, dtype=wide), None, 1e-6),
    )  # fmt: skip


def stepped(r: Recurrence, x: torch.Tensor, window: torch.Tensor, state: torch.Tensor) -> Any:
    """(Output, window, state) after a token, by the definition of `Recurrence`."""
    x, silu = x.float(), torch.nn.functional.silu
    keys, inner = r.groups * r.key_size, r.heads * r.value_size
    sizes = [r.channels, inner, r.heads, r.heads]
    inputs, z, beta, a = x.split(sizes)
    window = torch.cat([window, inputs[None]])
    mixed = (window * r.conv_weight.T).sum(0)
    mixed = silu(mixed if r.conv_bias is None else mixed + r.conv_bias)
    q, k, v = mixed.split([keys, keys, inner])
    group = torch.arange(r.heads) % r.groups if r.tiled else torch.arange(r.heads) // (r.heads // r.groups)
    q, k = (each.view(r.groups, r.key_size)[group] for each in (q, k))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    state = state * (r.decay * torch.nn.functional.softplus(a + r.bias)).exp()[:, None, None]
    change = r.rate_scale * beta.sigmoid()[:, None] * (v.view(r.heads, -1) - torch.einsum("hk,hkv->hv", k, state))
    state = state + k[:, :, None] * change[:, None, :]
    y = torch.einsum("hk,hkv->hv", q * r.key_size**-0.5, state)
    y = y * (y.square().mean(-1, keepdim=True) + r.norm.eps).rsqrt() * r.norm.weight
    return (y * silu(z.view(r.heads, -1))).flatten(), window[1:], state


@pytest.mark.parametrize(
    ("heads", "groups", "key_size", "value_size", "changes"),
    [
        (4, 2, 128, 128, {}),  # Qwen3-Next, Qwen3.5
        (2, 2, 32, 64, {"conv_bias": normal(9, 256, dtype=torch.float32)}),
        (6, 2, 64, 32, {"tiled": True, "rate_scale": 2.0}),
        pytest.param(4, 1, 128, 128, {}, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_a_delta_net(
    heads: int, groups: int, key_size: int, value_size: int, changes: dict[str, Any]
) -> None:
    r = replace(delta_net(heads, groups, key_size, value_size), **changes)
    windows = normal(5, 5, 3, r.channels, dtype=torch.float32)
    states = normal(6, 5, heads, key_size, value_size, dtype=torch.float32)
    reads, writes = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    x = normal(7, 2, r.in_features + 8)[:, : r.in_features]  # rows with a gap
    expected = [stepped(r, x[i], windows[reads[i]], states[reads[i]]) for i in range(2)]
    before = windows.clone(), states.clone()
    assert row_delta.can_step(r, x)
    out = row_delta.row_delta(x, r, reads, writes, windows, states)
    for number, (y, window, state) in enumerate(expected):
        target = int(writes[number])
        close(out[number], y, 5e-3)
        close(states[target], state, 1e-5)
        torch.testing.assert_close(windows[target], window)
    for untouched in (0, 1, 2):
        torch.testing.assert_close(windows[untouched], before[0][untouched], rtol=0, atol=0)
        torch.testing.assert_close(states[untouched], before[1][untouched], rtol=0, atol=0)


def test_padding_changes_no_state() -> None:
    r = delta_net(2, 2, 32, 64)
    windows, states = torch.zeros(2, 3, r.channels), torch.zeros(2, 2, 32, 64)
    none = torch.zeros(1, dtype=torch.int32)
    out = row_delta.row_delta(normal(7, 1, r.in_features), r, none, none, windows, states)
    assert torch.isfinite(out.float()).all()
    assert not windows.any()
    assert not states.any()
