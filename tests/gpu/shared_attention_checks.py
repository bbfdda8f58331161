"""Checks of decode attention over shared prefixes: the same result as when every sequence reads its own context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from attention_checks import shape_of
from check_bench import (
    Bench,
    Check,
    Context,
    describe,
    expected_attention,
    fill,
    new_context,
    relative_error,
    segment_of,
)

from bifolio.kernels.interface import AttentionPhase, AttentionShape, Heads
from bifolio.kernels.shared_prefix import Group, deal, find_groups
from bifolio.kernels.triton.shared_attention import MAX_ITEMS, new_shared_rows, rows_per_item
from bifolio.kernels.triton.step.decodes import shared_words
from bifolio.kernels.triton.tiles import TILE

MANY = list(range(1, 65))
CASES: list[tuple[AttentionShape, list[int], list[list[int]], list[int], int, bool]] = [
    # shape, context lengths, groups of sequences, tokens that each group shares, block size, large
    (shape_of(4, 2, 64), [80, 100, 65, 9], [[0, 1, 2]], [64], 16, False),
    (shape_of(2, 1, 80), [140, 30, 200, 130, 90, 70], [[0, 2, 3], [4, 5]], [128, 64], 32, False),
    (shape_of(32, 8, 64), [4200 + row for row in range(64)], [list(range(64))], [4096], 64, True),
    (shape_of(32, 8, 128), [50, *(2100 + row for row in MANY), 700, 701], [MANY, [65, 66]], [2048, 640], 64, True),
    (shape_of(16, 8, 128), [1000 + row for row in range(40)], [list(range(0, 40, 2))], [960], 16, True),
]


def shared_attention_checks() -> Iterator[Check]:
    for shape, lengths, groups, shared, block_size, large in CASES:
        name = f"shared {describe(shape)} block {block_size} {shared} of {len(lengths)} sequences"
        pairs = list(zip(groups, shared, strict=True))
        error = partial(shared_error, shape=shape, lengths=lengths, groups=pairs, block_size=block_size)
        yield Check(name, error, large)


def shared_error(
    bench: Bench, *, shape: AttentionShape, lengths: list[int], groups: list[tuple[list[int], int]], block_size: int
) -> float:
    kernels: Any = bench.kernels
    context = _shared_context(bench, shape, lengths, groups, block_size)
    fill(bench, context, shape)
    found = find_groups(context.tables.cpu().numpy(), np.asarray(lengths) - 1, block_size, TILE)
    if [sorted(group.rows.tolist()) for group in found] != [rows for rows, _ in _by_table(context, groups)]:
        return float("inf")
    work = deal([Group(group.rows, group.shared) for group in found], len(lengths), TILE, rows_per_item(shape))
    order = work.order.tolist()
    query = bench.normal(len(lengths), shape.num_heads, shape.head_dim)
    segment = segment_of(AttentionPhase.DECODE, [1] * len(lengths), [lengths[row] for row in order], context.tables)
    segment = replace(segment, context_lens=bench.integers(segment.context_lens))
    rows = new_shared_rows(len(lengths), shape, bench.device)
    rows.words.copy_(torch.from_numpy(shared_words(work, len(lengths), MAX_ITEMS)))
    expected = expected_attention(bench, query, shape, context, [1] * len(lengths))[order]
    pieces: dict[int, Any] = {}
    worst = 0.0
    for _ in range(2):
        kernels.attention.stage_decode(segment, bench.integers(order), pieces, (shape,), context.storage, rows)
        result = kernels.attend(Heads(query[order], None, None), shape, (segment,), context.storage)
        worst = max(worst, relative_error(result, expected))
    return worst


def _by_table(context: Context, groups: list[tuple[list[int], int]]) -> list[tuple[list[int], int]]:
    """Groups in the order in which they are found."""
    return sorted(groups, key=lambda group: int(context.tables[group[0][0], 0]))


def _shared_context(
    bench: Bench, shape: AttentionShape, lengths: list[int], groups: list[tuple[list[int], int]], block_size: int
) -> Context:
    """Every sequence of a group begins with the blocks of its first."""
    context = new_context(bench, shape, lengths, block_size)
    for rows, shared in groups:
        for row in rows[1:]:
            blocks = shared // block_size
            context.tables[row, :blocks] = context.tables[rows[0], :blocks]
            context.index[row][:shared] = context.index[rows[0]][:shared]
    return context
