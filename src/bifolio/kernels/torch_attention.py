"""Rotation and attention on torch tensors: fresh sequences of equal lengths, and sequences in the paged cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from bifolio.kernels.interface import Array, AttentionSegment, AttentionShape, Heads, Rotation, Storage


def are_equally_long(segment: AttentionSegment) -> bool:
    return segment.num_sequences * segment.max_query_len == segment.token_end - segment.token_start


def scale_by_position(
    query: torch.Tensor,
    shape: AttentionShape,
    segment: AttentionSegment,
    positions: torch.Tensor | None = None,  # i32[t]  None: from the segment
) -> torch.Tensor:
    """Queries [t, heads, dim] of a segment, multiplied by the temperature at their positions."""
    if not shape.temperature:
        return query
    if positions is None:
        positions = _query_positions(segment, query.shape[0], query.device)
    positions = positions + shape.temperature_start
    factors = 1 + shape.temperature * (1 + positions // shape.temperature_period).float().log()
    return (query * factors[:, None, None]).to(query.dtype)


def _query_positions(segment: AttentionSegment, num_queries: int, device: torch.device) -> torch.Tensor:
    lengths = torch.as_tensor(segment.context_lens, device=device)
    if segment.max_query_len == 1 and segment.num_sequences == num_queries:
        return (lengths - 1).clamp(min=0)
    starts = torch.as_tensor(segment.query_starts, device=device)
    counts = starts.diff()
    before = (lengths - counts - starts[:-1]).repeat_interleave(counts)
    return torch.arange(num_queries, device=device) + before


def rotate(x: torch.Tensor, rotation: Rotation, interleaved: bool) -> torch.Tensor:
    """Rotate each pair of dimensions by its angle, in float32; dimensions past the rotated ones are unchanged."""
    cos, sin = rotation.cos[:, None, :], rotation.sin[:, None, :]
    half = rotation.cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    first, second = torch.unflatten(turned, -1, (half, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    first, second = first * cos - second * sin, second * cos + first * sin
    result = torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)
    result = result.to(x.dtype)
    return torch.cat((result, rest), dim=-1) if rest.shape[-1] else result


def attend_fresh(own: Heads, shape: AttentionShape, segment: AttentionSegment) -> torch.Tensor:
    """Attention of the sequences of a segment over their own fresh keys and values."""
    if are_equally_long(segment):
        return attend_equal(own, shape, segment.num_sequences, shape.is_causal(segment))
    starts = segment.query_starts.tolist()
    parts = (Heads(*(h[a:b] for h in own)) for a, b in pairwise(starts))
    return torch.cat([attend_equal(part, shape, 1, shape.is_causal(segment)) for part in parts])


def attend_equal(heads: Heads, shape: AttentionShape, num_sequences: int, causal: bool = True) -> torch.Tensor:
    """Attention of equally long sequences over their own fresh keys and values: [t, num_heads * head_dim]."""
    query, key, value = (h.unflatten(0, (num_sequences, -1)).transpose(1, 2) for h in heads)  # [s, heads, n, dim]
    length = query.shape[2]
    mask = None
    positions = torch.arange(length, device=query.device)[None]
    is_plain = not shape.bidirectional and shape.slopes is None and shape.bias is None
    if not is_plain or (shape.window is not None and shape.window < length):
        mask = _visible(positions, positions[0], shape, causal)
    return _attend_masked(query, key, value, mask, shape, _biases(positions, positions[0], shape), causal)


def _visible(positions: torch.Tensor, keys: torch.Tensor, shape: AttentionShape, causal: bool) -> torch.Tensor:
    """bool[s, 1, n, L]: the keys that queries at [s, n] see."""
    distance = positions[:, None, :, None] - keys
    if shape.bidirectional:
        return distance.abs() < (keys.shape[0] if shape.window is None else shape.window)
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if shape.window is None:
        return visible
    if shape.in_chunks:
        return visible & (keys >= (positions - positions % shape.window)[:, None, :, None])
    return visible & (distance < shape.window)


def _biases(positions: torch.Tensor, keys: torch.Tensor, shape: AttentionShape) -> torch.Tensor | None:
    """Biases of scores by distance, [s, heads, n, L]; None: none."""
    if shape.bias is not None:
        reach = shape.bias.shape[1] // 2
        columns = (keys - positions[:, :, None] + reach).clamp(0, 2 * reach)
        return torch.as_tensor(shape.bias, device=keys.device).float()[:, columns].transpose(0, 1)
    if shape.slopes is None:
        return None
    slopes = torch.as_tensor(shape.slopes, device=keys.device).float().view(1, -1, 1, 1)
    return slopes * (keys - positions[:, None, :, None]).clamp(max=0)


def _attend_masked(
    query: torch.Tensor,  # [s, heads, n, dim]
    key: torch.Tensor,  # [s, kv_heads, L, dim]
    value: torch.Tensor,
    mask: torch.Tensor | None,  # bool, broadcast to [s, heads, n, L]; None: causal, or none
    shape: AttentionShape,
    biases: torch.Tensor | None = None,  # of scores, [s, heads, n, L]
    causal: bool = True,  # without a mask
) -> torch.Tensor:
    """[s * n, heads * dim]"""
    if not shape.softcap and shape.sinks is None and biases is None:
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and causal,
            scale=shape.scale,
            enable_gqa=shape.num_heads != shape.num_kv_heads,
        )
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril() if causal else mask
    group = shape.num_heads // shape.num_kv_heads
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = ((query * shape.scale) @ key.transpose(2, 3)).float()
    if shape.softcap:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    scores = scores if biases is None else scores + biases
    scores = scores.masked_fill(~mask, float("-inf"))
    if shape.sinks is not None:  # a column without a value
        columns = shape.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, columns], dim=-1)
    mixed = scores.softmax(dim=-1)[..., : key.shape[2]].to(query.dtype) @ value
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def attend_both_ways(
    own: Heads, shape: AttentionShape, segment: AttentionSegment, storage: Storage | None
) -> torch.Tensor:
    """Attention of a segment that is not causal, sequence by sequence: no result depends on another sequence."""
    starts, found = segment.query_starts.tolist(), []
    for number, (first, last) in enumerate(pairwise(starts)):
        part = Heads(*(None if heads is None else heads[first:last] for heads in own))
        if storage is None or segment.block_tables is None:
            found.append(attend_equal(part, shape, 1, shape.is_causal(segment)))
            continue
        alone = replace(
            segment,
            query_starts=np.array([0, last - first], np.int32),
            context_lens=segment.context_lens[number : number + 1],
            block_tables=segment.block_tables[number : number + 1],
            max_query_len=last - first,
            max_context_len=int(segment.context_lens[number]),
        )
        found.append(attend_cached(part.query, shape, alone, storage))
    return torch.cat(found)


def attend_cached(
    query: torch.Tensor, shape: AttentionShape, segment: AttentionSegment, storage: Storage
) -> torch.Tensor:
    """Queries over the cached context of their sequences; equally many of each in one call."""
    tables: Array = segment.block_tables
    lens = segment.context_lens
    if are_equally_long(segment):
        return _attend_paged(query, shape, storage, tables, lens, segment)
    bounds = pairwise(segment.query_starts.tolist())
    return torch.cat(
        [
            _attend_paged(query[a:b], shape, storage, tables[i : i + 1], lens[i : i + 1], segment)
            for i, (a, b) in enumerate(bounds)
        ]
    )


def _attend_paged(
    query: torch.Tensor,  # [s * n, num_heads, head_dim], n queries for each of s sequences
    shape: AttentionShape,
    storage: Storage,
    block_tables: torch.Tensor,  # i32[s, max_blocks]
    context_lens: torch.Tensor,  # i32[s]
    segment: AttentionSegment,
) -> torch.Tensor:
    """Attention of queries at the end of each context over its cached tokens: [s * n, num_heads * head_dim].

    Entries past a context are uninitialised (NaN when poisoned), and 0 * NaN is NaN: they are zeroed, not only masked.
    """
    num_blocks = min(block_tables.shape[1], -(-segment.max_context_len // storage.block_size))
    tables = torch.as_tensor(block_tables, device=query.device)[:, :num_blocks].long()
    queries = torch.unflatten(query, 0, (block_tables.shape[0], -1))  # [s, n, heads, dim]
    lens = torch.as_tensor(context_lens, device=query.device)  # the engine keeps lengths on the host
    slots = torch.arange(num_blocks * storage.block_size, device=query.device)
    used = (slots[None, :] < lens[:, None])[:, None, :, None]  # [s, 1, L, 1]

    def context(array: torch.Tensor) -> torch.Tensor:
        if array.dtype == torch.float8_e4m3fn:  # torch indexes its bytes
            gathered = array.view(torch.uint8)[tables].view(array.dtype)
        else:
            gathered = array[tables]
        gathered = gathered.transpose(1, 2).flatten(2, 3).to(query.dtype)  # [s, kv_heads, L, dim]
        return gathered.masked_fill(~used, 0.0)

    num_queries = queries.shape[1]
    positions = lens[:, None] - num_queries + torch.arange(num_queries, device=query.device)[None, :]  # [s, n]
    causal = shape.is_causal(segment)
    visible, biases = _visible(positions, slots, shape, causal), _biases(positions, slots, shape)
    if not causal or shape.bidirectional:
        visible = visible & (slots < lens[:, None])[:, None, None, :]
    keys, values = context(storage.keys[shape.layer]), context(storage.values[shape.layer])
    return _attend_masked(queries.transpose(1, 2), keys, values, visible, shape, biases)
