"""Checks of the kernels in CUDA C++ for one row: products with all that is fused, short contexts, delta nets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from check_bench import Bench, Check, describe, expected_attention, fill, new_context, relative_error, segment_of

from bifolio.kernels.cuda import nvrtc, row_delta
from bifolio.kernels.cuda.row_attention import RawHeads
from bifolio.kernels.cuda.row_experts import can_mix
from bifolio.kernels.cuda.row_product import can_multiply
from bifolio.kernels.interface import (
    AttentionPhase,
    AttentionShape,
    Batch,
    Experts,
    Linear,
    Norm,
    Recurrence,
    Rotation,
    Routing,
)
from bifolio.kernels.triton import recurrence
from bifolio.kernels.triton.lazy_fusion import tensor

PRODUCTS = [  # outputs, depth; by tensor cores up to a depth of 2048
    (4096, 1024), (1024, 2048), (1024, 3072), (2048, 8192), (4096, 14336), (896, 4864), (513, 2048), (8, 1024),
    (1152, 896), (576, 576), (40, 4104), (151936, 1024),
]  # fmt: skip
ATTENTIONS = [  # query heads, key heads, dimensions, of them rotated, block size, normed
    (16, 8, 128, 128, 64, True), (32, 8, 64, 64, 64, False), (32, 8, 128, 128, 16, False), (32, 4, 128, 64, 32, True),
    (3, 1, 64, 64, 16, False), (8, 8, 64, 48, 16, False), (16, 4, 256, 256, 64, True), (24, 8, 128, 128, 16, False),
    (16, 2, 256, 64, 64, True),
]  # fmt: skip
EXPERTS = [  # experts, chosen, hidden values, depth
    (40, 11, 512, 2048), (12, 8, 768, 2048), (9, 4, 64, 576), (5, 5, 40, 4104), (3, 1, 1536, 4096),
]  # fmt: skip
DELTA_NETS = [  # heads, groups, key and value size, tiled
    (32, 16, 128, 128, False), (16, 16, 128, 128, False), (32, 8, 128, 128, True), (6, 2, 64, 32, True),
]  # fmt: skip
LENGTHS = ([1], [2, 1], [7], [200, 1], [385], [641, 300], [1500])


def row_checks() -> Iterator[Check]:
    for outputs, depth in PRODUCTS:
        for extra in ("norm", "gated", "residual", "bias"):
            name = f"one row {outputs}x{depth} {extra}"
            yield Check(name, partial(product_error, outputs=outputs, depth=depth, extra=extra), True, True)
    for count, top_k, width, depth in EXPERTS:
        for normed in (False, True):
            error = partial(expert_error, count=count, top_k=top_k, width=width, depth=depth, normed=normed)
            yield Check(f"experts of one row {count}:{top_k} {width}x{depth}{' normed' * normed}", error, True, True)
    for heads, groups, keys, values, tiled in DELTA_NETS:
        for sequences in (1, 2):
            sizes = {"heads": heads, "groups": groups, "key_size": keys, "value_size": values, "tiled": tiled}
            name = f"delta net {heads}:{groups} {keys}x{values}, {sequences} sequences{' tiled' * tiled}"
            yield Check(name, partial(delta_error, sequences=sequences, **sizes), True, True)
    for heads, kv_heads, dim, rotary, block_size, normed in ATTENTIONS:
        shape = AttentionShape(0, heads, kv_heads, dim, dim**-0.5)
        for lengths in LENGTHS:
            name = f"near decode {describe(shape)} rotary {rotary} block {block_size} lengths {lengths}"
            error = partial(
                near_error, shape=shape, rotary=rotary, lengths=lengths, block_size=block_size, normed=normed
            )
            yield Check(name + " normed" * normed, error, True, True)


def product_error(bench: Bench, *, outputs: int, depth: int, extra: str) -> float:
    """The stream is f32, as in a model; a product that is added to it stays f32."""
    kernels, reference = bench.kernels, bench.reference
    parts = tuple(bench.normal(outputs, depth, scale=depth**-0.5) for _ in range(2 if extra == "gated" else 1))
    biases = tuple(bench.normal(outputs) if extra in ("bias", "gated") else None for _ in parts)
    ours, theirs = (each.prepare_linear(Linear(parts, biases)) for each in (kernels, reference))
    norm = kernels.prepare_norm(Norm(bench.normal(depth, dtype=torch.float32), None, 1e-5))
    stream = bench.normal(1, depth, dtype=torch.float32)
    if extra == "residual":
        x, added = bench.normal(1, depth), bench.normal(1, outputs, dtype=torch.float32)
        result, expected = kernels.add(added, kernels.linear(x, ours)), added + reference.linear(x.float(), theirs)
    else:
        result = kernels.linear(kernels.norm(stream, norm), ours)
        expected = reference.linear(reference.norm(stream, norm), theirs)
    if extra == "gated":
        result, expected = kernels.act_mul(result, "silu"), reference.act_mul(expected, "silu")
    if nvrtc.works():
        options: dict[str, Any] = {"norm": norm, "residual": None, "num_processors": kernels.num_processors}
        assert can_multiply(stream, ours.prepared[0], gated=extra == "gated", **options)
    return relative_error(tensor(result), expected)


def expert_error(bench: Bench, *, count: int, top_k: int, width: int, depth: int, normed: bool) -> float:
    kernels, dtype = bench.kernels, torch.float32
    ups = [tuple(bench.normal(width, depth, scale=depth**-0.5) for _ in range(2)) for _ in range(count)]
    downs = [bench.normal(depth, width, scale=width**-0.5) for _ in range(count)]
    linears = tuple(Linear(pair, (None, None)) for pair in ups), tuple(Linear((down,), (None,)) for down in downs)
    experts = kernels.prepare_experts(Experts(*linears, "silu"))
    chosen = torch.randperm(count, generator=bench.generator, device=bench.device)[:top_k]
    shares = torch.rand(top_k, generator=bench.generator, device=bench.device)
    routing = Routing(chosen.to(torch.int32)[None], shares[None])
    norm = kernels.prepare_norm(Norm(bench.normal(depth, dtype=dtype), None, 1e-5))
    stream, residual = bench.normal(1, depth, dtype=dtype), bench.normal(1, depth, dtype=dtype)
    x = kernels.norm(stream, norm) if normed else bench.normal(1, depth)
    truth = bench.reference.norm(stream, norm) if normed else x.float()
    hidden = [torch.nn.functional.silu(truth @ ups[e][0].float().T) * (truth @ ups[e][1].float().T) for e in chosen]
    parts = [share * (row @ downs[e].float().T) for share, row, e in zip(shares, hidden, chosen, strict=True)]
    if nvrtc.works():
        prepared = experts.prepared[0].weight, experts.prepared[1].weight
        options: dict[str, Any] = {"norm": norm, "residual": residual, "num_processors": kernels.num_processors}
        assert can_mix(stream, *prepared, top_k, **options)
    mixed = kernels.mix_experts(x, routing, experts)
    alone = relative_error(tensor(kernels.mix_experts(x, routing, experts)), torch.stack(parts).sum(0))
    total = kernels.add(residual, mixed)
    return max(alone, relative_error(tensor(total) - residual, torch.stack(parts).sum(0)))


def delta_error(bench: Bench, *, sequences: int, **sizes: Any) -> float:
    """Of outputs, windows and states, beside the kernels in Triton."""
    tiled, heads, groups = sizes.pop("tiled"), sizes["heads"], sizes["groups"]
    channels, wide = 2 * groups * sizes["key_size"] + heads * sizes["value_size"], torch.float32
    r = Recurrence(
        "delta", 0, 4, channels, conv_weight=bench.normal(channels, 4, dtype=wide),
        decay=-bench.normal(heads, dtype=wide).abs(), bias=bench.normal(heads, dtype=wide),
        norm=Norm(bench.normal(sizes["value_size"], dtype=wide), None, 1e-6), tiled=tiled, **sizes,
    )  # fmt: skip
    x, reads, writes = bench.normal(sequences, r.in_features), bench.integers([3, 1]), bench.integers([3, 2])
    windows = bench.normal(4, 3, channels, dtype=wide)
    states = bench.normal(4, heads, r.key_size, r.value_size, dtype=wide)
    if not nvrtc.works():
        return 0.0
    found = []
    for is_row in (False, True):
        own_windows, own_states = windows.clone(), states.clone()
        if is_row:
            assert row_delta.can_step(r, x)
            out = row_delta.row_delta(x, r, reads, writes, own_windows, own_states)
        else:
            storage: Any = SimpleNamespace(convolutions=[own_windows], recurrent=[own_states])
            staged: Any = SimpleNamespace(
                reads=reads[:sequences], writes=writes[:sequences], sequences=reads, starts=reads, is_decode=True
            )
            mixed = torch.empty((sequences, channels), dtype=wide, device=bench.device)
            recurrence._convolve(x, r, staged, storage, mixed)
            out = recurrence.delta_step(mixed, x, r, reads[:sequences], writes[:sequences], own_states)
        found.append((out, own_windows, own_states))
    return max(relative_error(ours, theirs) for theirs, ours in zip(*found, strict=True))


def near_error(
    bench: Bench, *, shape: AttentionShape, rotary: int, lengths: list[int], block_size: int, normed: bool
) -> float:
    """Of the attention of new tokens, and of the keys and values that it writes; fused, then from rotated queries."""
    kernels, reference, count = bench.kernels, bench.reference, len(lengths)
    if not kernels.attention.can_be_near(count, (shape,), new_context(bench, shape, lengths, block_size).storage):
        assert not nvrtc.works()
        return 0.0
    if normed:
        weights = (bench.normal(shape.head_dim, dtype=torch.float32) for _ in range(2))
        query_norm, key_norm = (kernels.prepare_norm(Norm(weight, None, 1e-6)) for weight in weights)
        shape = replace(shape, query_norm=query_norm, key_norm=key_norm)
    context = new_context(bench, shape, lengths, block_size)
    fill(bench, context, shape)
    angles = bench.normal(count, rotary // 2, scale=3.0, dtype=torch.float32)
    rotation = Rotation(angles.cos(), angles.sin())
    qkv = bench.normal(count, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    newest = torch.stack([index[-1] for index in context.index])
    segment = segment_of(AttentionPhase.DECODE, [1] * count, lengths, context.tables)
    segment = replace(segment, context_lens=bench.integers(lengths))
    batch = Batch(newest, newest, newest, (segment,), None)

    truth = reference.rope_and_write(qkv.float(), shape, rotation, batch, None)
    context.storage.write(shape.layer, newest, truth.key.to(bench.dtype), truth.value.to(bench.dtype))
    expected = expected_attention(bench, truth.query, shape, context, [1] * count)
    places = context.storage.keys[0], context.storage.values[0]
    written = [array[newest // block_size, :, newest % block_size] for array in places]
    for array in places:
        array[newest // block_size, :, newest % block_size] = float("nan")

    kernels.attention.stage_decode(segment, bench.integers(range(count)), {}, (shape,), context.storage, is_near=True)
    heads = kernels.rope_and_write(qkv, shape, rotation, batch, context.storage)
    assert isinstance(heads.query, RawHeads)
    results = [kernels.attend(heads, shape, (segment,), context.storage) for _ in range(2)]  # none disturbs the next
    found = [array[newest // block_size, :, newest % block_size] for array in places]
    turned = heads._replace(query=truth.query.to(bench.dtype))
    results.append(kernels.attend(turned, shape, (segment,), context.storage))
    errors = [relative_error(result, expected) for result in results]
    return max(*errors, *(relative_error(ours, theirs) for ours, theirs in zip(found, written, strict=True)))
