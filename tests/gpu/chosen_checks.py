"""Checks of attention to chosen positions, and of the choice itself, against torch in float32."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from check_bench import Bench, Check, Context, fill, new_context, relative_error, rows_of

from bifolio.kernels.interface import AttentionShape
from bifolio.kernels.triton.chosen_attention import chosen_attention
from bifolio.kernels.triton.index_scores import index_scores
from bifolio.kernels.triton.pass_rows import PassRows
from bifolio.kernels.triton.top_positions import top_positions

# queries, heads, size of a key, chosen positions, the longest context, tokens of a block
LATENTS = [(1, 128, 576, 2048, 5000, 64), (9, 64, 576, 2048, 3000, 64), (300, 16, 576, 512, 2500, 64)]
SMALL = [(2, 4, 40, 24, 90, 16), (3, 20, 32, 16, 70, 4)]
INDEXERS = [(1, 64, 128, 2048, 70000, 64), (65, 32, 128, 2048, 9000, 64)]


def chosen_checks() -> list[Check]:
    found = []
    for sizes in (*LATENTS, *SMALL):
        for fixed in (False, True):
            name = f"chosen {' '.join(map(str, sizes))}{' fixed' * fixed}"
            found.append(Check(name, partial(attention_error, sizes, fixed), large=sizes in LATENTS))
    return found + [
        Check(f"choice {' '.join(map(str, sizes))}", partial(choice_error, sizes), large=sizes in INDEXERS)
        for sizes in (*INDEXERS, *SMALL)
    ]


def pass_rows(
    bench: Bench, shape: AttentionShape, count: int, longest: int, block_size: int
) -> tuple[Context, np.ndarray, PassRows]:
    """A cache with a sequence for each query, some of which see less than the chosen number of positions."""
    seen = np.maximum(longest * np.arange(1, count + 1) // count, 1)
    context = new_context(bench, shape, seen.tolist(), block_size)
    fill(bench, context, shape)
    owners = torch.arange(count, dtype=torch.int32, device=bench.device)
    return context, seen, PassRows(bench.integers(seen), context.tables, owners, seen, longest)


def keys_of(context: Context, row: int) -> torch.Tensor:
    return rows_of(context.storage.keys[0], context.index[row], context.storage.block_size)[:, 0].float()


def attention_error(sizes: tuple[int, ...], fixed: bool, bench: Bench) -> float:
    count, heads, dim, top_k, longest, block_size = sizes
    shape = AttentionShape(0, heads, 1, dim, dim**-0.5, top_k=top_k)
    context, seen, rows = pass_rows(bench, shape, count, longest, block_size)
    query = bench.normal(count, heads, dim)
    chosen = torch.full((count, top_k), -1, dtype=torch.int32, device=bench.device)
    expected = []
    for row, length in enumerate(seen.tolist()):
        keys = keys_of(context, row)
        if length > top_k:
            picked = torch.randperm(length, generator=bench.generator, device=bench.device)[:top_k].sort().values
            chosen[row], keys = picked.to(torch.int32), keys[picked]
        expected.append(torch.softmax(query[row].float() @ keys.T * shape.scale, dim=-1) @ keys)
    processors = bench.kernels.num_processors
    found = chosen_attention(query, chosen, shape, context.storage, rows, num_processors=processors, fixed=fixed)
    return relative_error(found.view(count, heads, dim), torch.stack(expected))


def choice_error(sizes: tuple[int, ...], bench: Bench) -> float:
    """The share of positions that differ from a sort of the kernel's scores, and the error of these."""
    count, heads, dim, top_k, longest, block_size = sizes
    shape = AttentionShape(0, heads, 1, dim, dim**-0.5, top_k=top_k)
    context, seen, rows = pass_rows(bench, shape, count, longest, block_size)
    query, weights = bench.normal(count, heads, dim), bench.normal(count, heads)
    processors = bench.kernels.num_processors
    part = 0, count, longest
    ranked = index_scores(query, weights, shape, context.storage, rows, part, num_processors=processors)
    found = torch.full((count, top_k), -1, dtype=torch.int32, device=bench.device)
    top_positions(ranked, rows, found)
    errors = [0.0]
    for row, length in enumerate(seen.tolist()):
        if length > top_k:
            scores = torch.relu(query[row].float() @ keys_of(context, row).T * shape.scale)
            errors.append(relative_error(ranked[row, :length], weights[row].float() @ scores))
            best = torch.sort(ranked[row, :length], descending=True, stable=True).indices[:top_k].sort().values
            errors.append(float((found[row] != best).float().mean()))
        else:
            errors.append(float((found[row] != -1).float().mean()))
    return max(errors)
