"""Blocks between engines with tensor parallelism: every rank gets its heads, and output is that of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_engine import Running

from bifolio import LLM
from bifolio.config.transfer import Address
from bifolio.engine.parallel.shared_blocks import joined_blocks, split_blocks
from bifolio.engine.transfer.blocks import read_stored
from bifolio.engine.transfer.decode import BlockFetcher
from bifolio.engine.transfer.prefill import PrefillServer
from helpers import cpu_kernel_names, random_prompt, tiny_folder, tiny_model

needs_ranks = pytest.mark.skipif("native" not in cpu_kernel_names(), reason="the ranks need the compiled extension")
LENGTH, BLOCK = 63, 4
LATENTS = 0  # in place of kv heads: every rank caches the latents of all tokens


@cache
def folder(kv_heads: int) -> Path:
    if kv_heads == LATENTS:
        return tiny_model("deepseek2", vocab_size=61)[1]
    heads = 6 if kv_heads == 3 else 4
    return tiny_folder(seed=kv_heads, hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)


@contextmanager
def running(kv_heads: int, size: int, **options: Any) -> Iterator[Running]:
    sizes = {"num_blocks": 64, "block_size": BLOCK, "max_model_len": 128, "chunk_size": 8, "max_num_seqs": 4}
    llm = LLM(folder(kv_heads), tensor_parallel_size=size, poison_free_blocks=True, kernels="native", threads=size,
              **{**sizes, **options})  # fmt: skip
    engine = Running(llm)
    try:
        yield engine
    finally:
        engine.stop()
        llm.close()


def prompt(seed: int = 3) -> list[int]:
    return random_prompt(LENGTH, seed=seed, vocab_size=61)


@cache
def expected(kv_heads: int) -> Any:
    with running(kv_heads, 1) as engine:
        return engine.generate(prompt())[0]


def fetched(prefill: Running, decode: Running) -> tuple[int, Any, int]:
    """(blocks that arrived, output, tokens of the prompt that were cached)."""
    server = PrefillServer(prefill.thread, prefill.sizes)
    try:
        found = BlockFetcher(decode.thread, decode.sizes).fetch(Address(server.host, server.port), prompt())
    finally:
        server.close()
    return (found.num_blocks, *decode.generate(prompt()))


@pytest.mark.sampled(3)
@pytest.mark.full
@needs_ranks
@pytest.mark.parametrize(
    ("kv_heads", "sizes"), [(2, (2, 2)), (2, (1, 2)), (2, (2, 1)), (1, (2, 4)), (3, (2, 3)), (LATENTS, (2, 1))]
)
def test_output_equals_that_of_one_rank(kv_heads: int, sizes: tuple[int, int]) -> None:
    """Equal sizes and others; a kv head that several ranks hold; ranks with unequal numbers of heads."""
    with running(kv_heads, sizes[0]) as prefill, running(kv_heads, sizes[1]) as decode:
        num_blocks, output, num_cached = fetched(prefill, decode)
        assert num_blocks == (LENGTH - 1) // BLOCK
        assert num_cached == num_blocks * BLOCK
        assert output == expected(kv_heads)
        assert decode.llm.engine.stats().num_prefill_tokens == LENGTH - num_cached


@pytest.mark.full
@needs_ranks
def test_sums_of_ranks_are_exchanged_between_equal_sizes_alone() -> None:
    """Without `deterministic` the values of two ranks differ from those of one: such engines are not mixed."""
    with running(2, 2, deterministic=False) as pair, running(2, 1) as one:
        assert pair.sizes.fingerprint != one.sizes.fingerprint
        assert fetched(pair, one) == (0, expected(2), 0)
        with running(2, 2, deterministic=False) as other:
            assert fetched(pair, other)[0] == (LENGTH - 1) // BLOCK


@pytest.mark.full
@needs_ranks
def test_ranks_hold_the_heads_of_the_blocks_of_one_process() -> None:
    found = []
    for size in (1, 2):
        with running(2, size) as engine:
            engine.generate(prompt())
            found.append(engine.thread.call(lambda engine: read_stored(engine, [1, 2, 3])).result())
    assert found[0].shape == found[1].shape
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("heads", [[(0, 2), (2, 4)], [(0, 1), (1, 3)], [(0, 1), (0, 1), (1, 2), (1, 2)]])
def test_split_blocks_are_joined_again(heads: list[tuple[int, int]]) -> None:
    num_arrays, count = 6, 3
    whole = np.random.default_rng(0).integers(0, 256, (count, num_arrays * heads[-1][1] * 20), np.uint8)
    parts = split_blocks(whole, heads, num_arrays)
    assert [part.shape for part in parts] == [(count, num_arrays * (stop - start) * 20) for start, stop in heads]
    assert np.array_equal(joined_blocks(parts, heads, num_arrays), whole)
    by_head = whole.reshape(count, num_arrays, -1, 20)
    assert np.array_equal(parts[1].reshape(count, num_arrays, -1, 20)[:, 0, 0], by_head[:, 0, heads[1][0]])
