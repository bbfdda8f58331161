"""Micro-benchmark: one layer with an indexer on a GPU: scores, choice and attention of some queries.

    python -m benchmarks.micro.gpu_choice --rows 1,16,64,1024 --contexts 8192,65536 [--heads 128] [--torch]

Microseconds of each part. Up to 64 queries each belong to a sequence of their own; more are the last queries of one
sequence. Keys of 128 and latents of 576 values in bf16, as in DeepSeek-V3.2. `--torch` adds a sort of the scores and
attention to gathered latents by torch; `--tiles` other tiles of attention: heads, positions, warps, stages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu_limits import time_launches
from bifolio.cache.storage import CacheLayout, KVStorage
from bifolio.errors import ConfigError
from bifolio.kernels.interface import AttentionShape
from bifolio.kernels.select import require_gpu

if TYPE_CHECKING:
    from bifolio.kernels.triton.pass_rows import PassRows

LATENT, KEY, INDEX_HEADS, BLOCK = 576, 128, 64, 64
ONE_EACH = 64  # queries of as many sequences
MOST_SCORES = 1 << 25  # computed at once


def storage_of(dim: int, tokens: int) -> KVStorage:
    layout = CacheLayout(1, -(-tokens // BLOCK) + 1, BLOCK, 1, dim, "bf16", shared_values=True)
    storage = KVStorage(layout, device="cuda", backend="torch")
    storage.keys[0].normal_()
    return storage


def queries_of(rows: int, context: int) -> PassRows:
    from bifolio.kernels.triton.pass_rows import PassRows

    sequences = rows if rows <= ONE_EACH else 1
    blocks = -(-context // BLOCK)
    tables = 1 + torch.randperm(sequences * blocks, device="cuda").view(sequences, blocks).to(torch.int32)
    numbers = np.arange(rows, dtype=np.int32)
    seen = np.full(rows, context) if sequences == rows else context - rows + 1 + numbers
    owners = numbers if sequences == rows else 0 * numbers
    on_device = [torch.from_numpy(part.astype(np.int32)).cuda() for part in (seen, owners)]
    return PassRows(on_device[0], tables, on_device[1], seen, context)


def microseconds(work: Callable[[], object]) -> float:
    return 1e6 * time_launches([work])


def times_of_choice(every: PassRows, chosen: torch.Tensor, *, with_torch: bool) -> dict[str, float]:
    """Microseconds of scores and of the choice, which is written to `chosen`."""
    from bifolio.kernels.triton.index_scores import index_scores
    from bifolio.kernels.triton.top_positions import top_positions

    rows, context, top_k = len(every.seen), every.longest, chosen.shape[1]
    shape = AttentionShape(0, INDEX_HEADS, 1, KEY, KEY**-0.5, top_k=top_k)
    keys = storage_of(KEY, every.tables.numel() * BLOCK)
    query = torch.randn(rows, INDEX_HEADS, KEY, device="cuda").to(torch.bfloat16)
    weights = torch.randn(rows, INDEX_HEADS, device="cuda").to(torch.bfloat16)
    part = 0, min(rows, max(MOST_SCORES // context, 1)), context
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count

    def scores() -> torch.Tensor:
        return index_scores(query, weights, shape, keys, every, part, num_processors=processors)

    ranked, scale = scores(), rows / part[1]
    for first in range(0, rows, part[1]):
        top_positions(ranked[: rows - first], every, chosen, first=first)
    found = {
        "scores": scale * microseconds(scores),
        "choice": scale * microseconds(lambda: top_positions(ranked, every, chosen)),
    }
    if with_torch:
        found["torch.sort"] = scale * microseconds(lambda: torch.sort(ranked, dim=-1, descending=True, stable=True))
    return found


def times_of_attention(
    every: PassRows, chosen: torch.Tensor, heads: int, tiles: list[str], *, with_torch: bool
) -> dict[str, float]:
    from bifolio.kernels.triton import chosen_attention as kernels
    from bifolio.kernels.triton.latents import LatentTile

    rows = len(every.seen)
    shape = AttentionShape(0, heads, 1, LATENT, 192**-0.5, top_k=chosen.shape[1])
    latents = storage_of(LATENT, every.tables.numel() * BLOCK)
    query = torch.randn(rows, heads, LATENT, device="cuda").to(torch.bfloat16)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count

    def attend() -> torch.Tensor:
        return kernels.chosen_attention(query, chosen, shape, latents, every, num_processors=processors, fixed=False)

    found = {"attention": microseconds(attend)}
    for text in tiles:
        tile = LatentTile(*map(int, text.split("x")))
        with mock.patch.object(kernels, "latent_tile", return_value=tile):
            found[f"attention {text}"] = microseconds(attend)
    if with_torch:
        some = min(rows, 16)
        picked = chosen[:some].long()
        places = every.tables[0].long()[picked // BLOCK] * BLOCK + picked % BLOCK

        def gathered() -> torch.Tensor:
            own = latents.keys[0].view(-1, LATENT)[places][:, None]
            return F.scaled_dot_product_attention(query[:some, None], own, own, scale=shape.scale)

        found["attention by torch"] = rows / some * microseconds(gathered)
    return found


def print_times(rows: int, context: int, options: argparse.Namespace) -> None:
    every = queries_of(rows, context)
    chosen = torch.full((rows, options.top_k), -1, dtype=torch.int32, device="cuda")
    found = times_of_choice(every, chosen, with_torch=options.torch)
    found |= times_of_attention(every, chosen, options.heads, options.tiles, with_torch=options.torch)
    rate = 4 * rows * options.heads * options.top_k * LATENT / found["attention"] / 1e6
    line = ", ".join(f"{name} {value:.0f} us" for name, value in found.items())
    print(f"{rows} queries, {context} positions: {line}; {rate:.0f} TFLOP/s of attention", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,1024", help="queries")
    parser.add_argument("--contexts", default="8192,65536")
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--tiles", nargs="*", default=[], help="heads x positions x warps x stages, as 64x32x8x2")
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    try:
        require_gpu("cuda")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for context in map(int, options.contexts.split(",")):
        for rows in map(int, options.rows.split(",")):
            print_times(rows, context, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
