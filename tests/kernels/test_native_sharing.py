"""Attention over blocks that several contexts share: the same bits as each sequence by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from native_support import filled_storage, isas, segment, settings

from bifolio.cache.storage import KVStorage
from bifolio.kernels import native
from bifolio.kernels.interface import AttentionPhase, AttentionSegment, AttentionShape, Heads

ISAS = isas()
DTYPES = ["f32", "f16", "bf16", "q8_0"]
GROUP = tuple[Sequence[int], int]  # contexts of its members, tokens they have in common


@dataclass
class Crowd:
    """A step: sequences that share blocks in groups, shuffled."""

    storage: KVStorage
    tables: np.ndarray  # i32[s, max_blocks]
    contexts: list[int]
    queries: list[int]
    starts: np.ndarray  # i64[s + 1]  tokens of each sequence

    def segment(self, rows: slice = slice(None), phase: AttentionPhase | None = None) -> AttentionSegment:
        return segment(self.queries[rows], self.contexts[rows], self.tables[rows].copy(), 0, phase)

    def in_phases(self, border: int, first: AttentionPhase, second: AttentionPhase) -> tuple[AttentionSegment, ...]:
        """Two segments: the sequences before `border` and those from it on."""
        rows, rest, start = slice(0, border), slice(border, None), int(self.starts[border])
        tables = self.tables[rest].copy()
        return (
            self.segment(rows, first),
            segment(self.queries[rest], self.contexts[rest], tables, start, second),
        )


def crowd(
    groups: Sequence[GROUP], kv_heads: int, dim: int, dtype: str, block_size: int = 16, drafts: bool = False
) -> Crowd:
    """Sequences of all groups in random order; with `drafts` some have several queries."""
    rng = np.random.default_rng(len(groups) + dim)
    contexts = [length for members, _ in groups for length in members]
    storage, tables = filled_storage(rng, contexts, kv_heads, dim, dtype, block_size)
    first = 0
    for members, common in groups:
        tables[first : first + len(members), : common // block_size] = tables[first, : common // block_size]
        first += len(members)
    order = rng.permutation(len(contexts))
    queries = [int(rng.integers(1, 6)) if drafts else 1 for _ in contexts]
    queries = [min(count, contexts[i]) for count, i in zip(queries, order, strict=True)]
    starts = np.concatenate([[0], np.cumsum(queries)])
    return Crowd(storage, tables[order], [contexts[i] for i in order], queries, starts)


def attend(
    kernels: native.NativeKernels, query: np.ndarray, shape: AttentionShape, part: AttentionSegment, s: KVStorage
):  # type: ignore[no-untyped-def]
    return kernels.attend(Heads(query, None, None), shape, (part,), s)


def assert_the_same_bits(
    crowd: Crowd, heads: int, kv_heads: int, dim: int, window: int | None, isa: str, threads: Sequence[int]
) -> None:
    """Together == apart == each sequence alone, whatever the number of threads; together, something is shared."""
    query = np.random.default_rng(5).standard_normal((int(crowd.starts[-1]), heads, dim), np.float32)
    shape = AttentionShape(0, heads, kv_heads, dim, 1 / np.sqrt(dim), window)
    sharing, separate = native.NativeKernels(), native.NativeKernels(share_prefixes=False)
    with settings(isa, 1):
        alone = np.concatenate(
            [
                attend(separate, query[start:end], shape, crowd.segment(slice(i, i + 1)), crowd.storage)
                for i, (start, end) in enumerate(zip(crowd.starts[:-1], crowd.starts[1:], strict=True))
            ]
        )
    assert np.isfinite(alone).all()
    for count in threads:
        with settings(isa, count):
            before = native.shared_tokens()
            together = attend(sharing, query, shape, crowd.segment(), crowd.storage)
            shared = native.shared_tokens()
            apart = attend(separate, query, shape, crowd.segment(), crowd.storage)
            assert shared > before
            assert native.shared_tokens() == shared
        np.testing.assert_array_equal(together, alone)
        np.testing.assert_array_equal(apart, alone)


@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(2, 2, None), (6, 2, None), (7, 1, 300), (9, 3, 70)])
def test_groups_and_loners_in_one_step(isa: str, dtype: str, heads: int, kv_heads: int, window: int | None) -> None:
    dim = 64 if dtype == "q8_0" else 48
    groups: list[GROUP] = [
        ([641, 655, 700, 900], 640),  # whole spans and a part of one
        ([130, 131], 112),  # less than a span
        ([33], 0),
        ([300, 290, 600], 256),  # exactly a span
        ([1], 0),
        ([520, 530], 16),  # too little to be worth it
        ([257], 0),
    ]
    assert_the_same_bits(crowd(groups, kv_heads, dim, dtype), heads, kv_heads, dim, window, isa, (1, 2))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 5, 21, 22, 40])
def test_groups_of_any_size(dtype: str, size: int) -> None:
    """Groups of fewer rows than a unit holds, exactly as many, and more; every member has another length. With fewer
    heads a small group would be cut up, so that every thread has something to do."""
    members = [400 + 7 * i for i in range(size)]
    assert_the_same_bits(crowd([(members, 384)], 8, 32, dtype), 24, 8, 32, None, "", (1, 2, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 200])
def test_sequences_with_drafts(dtype: str, window: int | None) -> None:
    groups: list[GROUP] = [([700 + i for i in range(9)], 688), ([50, 260, 266], 48), ([900, 901], 896)]
    assert_the_same_bits(crowd(groups, 2, 64, dtype, drafts=True), 6, 2, 64, window, "", (1, 2))


@pytest.mark.parametrize("block_size", [4, 5, 32, 128])
def test_block_sizes(block_size: int) -> None:
    common = 500 // block_size * block_size
    groups: list[GROUP] = [([501, 510, 640, 777], common), ([300], 0)]
    assert_the_same_bits(crowd(groups, 2, 64, "f16", block_size), 4, 2, 64, None, "", (1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_of_prefixes(dtype: str) -> None:
    """All share a little, some share more, a few share nearly everything: as beams do."""
    made = crowd([([1000 + i for i in range(12)], 320)], 2, 32, dtype)
    for members, blocks in ((slice(0, 6), 34), (slice(2, 5), 47), (slice(3, 5), 61), (slice(8, 11), 25)):
        made.tables[members, :blocks] = made.tables[members.start, :blocks]
    assert_the_same_bits(made, 4, 2, 32, None, "", (1, 2))


@pytest.mark.full
def test_units_that_walk_over_all_spans() -> None:
    """With so many rows there are units enough without cutting the context."""
    made = crowd([([1000 + i for i in range(90)], 800), ([700 + i for i in range(30)], 640)], 4, 16, "f16")
    assert_the_same_bits(made, 32, 4, 16, None, "", (1, 2))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("groups", "window", "spared"),
    [
        ([([700] * 5, 640)], None, 4 * 640),
        ([([700] * 5, 640), ([400, 500, 600], 384), ([90], 0)], None, 4 * 640 + 2 * 384),
        ([([520, 530], 16)], None, 0),  # too little to be worth it
        ([([300], 0), ([301], 0)], None, 0),
        ([([700] * 3, 640)], 300, 2 * (640 - 400)),  # the window begins at 400
    ],
)
def test_a_shared_prefix_is_read_once(
    isa: str, threads: int, groups: list[GROUP], window: int | None, spared: int
) -> None:
    """Sequences after the first of a group are spared the reading of what they have in common, if they see it."""
    made = crowd(groups, 8, 32, "f16")
    query = np.random.default_rng(3).standard_normal((len(made.contexts), 8, 32), np.float32)
    shape = AttentionShape(0, 8, 8, 32, 0.2, window)
    with settings(isa, threads):
        before = native.shared_tokens()
        attend(native.NativeKernels(), query, shape, made.segment(), made.storage)
    assert native.shared_tokens() - before == spared


def test_shared_blocks_are_read_for_everyone() -> None:
    """A change to a shared block is seen by exactly those that share it."""
    made = crowd([([400, 410, 420], 384), ([390], 0)], 1, 32, "f32")
    query = np.random.default_rng(7).standard_normal((4, 1, 32), np.float32)
    shape = AttentionShape(0, 1, 1, 32, 0.2, None)
    before = attend(native.NativeKernels(), query, shape, made.segment(), made.storage)
    loner = made.contexts.index(390)
    block = int(made.tables[(loner + 1) % 4, 3])
    made.storage.values[0][block] += 1
    after = attend(native.NativeKernels(), query, shape, made.segment(), made.storage)
    changed = [bool((before[i] != after[i]).any()) for i in range(4)]
    assert changed == [i != loner for i in range(4)]


@pytest.mark.sampled(3)
@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 200])
def test_both_phases_give_the_same_bits(isa: str, dtype: str, window: int | None) -> None:
    """PREFILL and DECODE plan differently: with any mix of them, threads and sharing, a query's output is the same."""
    prefill, decode = AttentionPhase.PREFILL, AttentionPhase.DECODE
    groups: list[GROUP] = [
        ([700 + i for i in range(5)], 688),
        ([50, 260], 48),
        ([1100], 0),
        ([900, 901], 896),
        ([5], 0),
    ]
    made = crowd(groups, 2, 64, dtype, drafts=True)
    query = np.random.default_rng(6).standard_normal((int(made.starts[-1]), 6, 64), np.float32)
    shape = AttentionShape(0, 6, 2, 64, 0.2, window)
    border = len(made.contexts) // 2
    mixes = [
        (made.segment(phase=prefill),),
        (made.segment(phase=decode),),
        made.in_phases(border, decode, prefill),
        made.in_phases(border, prefill, decode),
        made.in_phases(1, decode, decode),
    ]
    with settings(isa, 1):
        expected = attend(native.NativeKernels(share_prefixes=False), query, shape, made.segment(), made.storage)
    for threads in (1, 2, 5):
        for sharing in (True, False):
            kernels = native.NativeKernels(share_prefixes=sharing)
            for segments in mixes:
                with settings(isa, threads):
                    result = kernels.attend(Heads(query, None, None), shape, segments, made.storage)
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("queries", "context"), [(1, 2000), (8, 2000), (130, 130), (130, 900), (300, 700)])
def test_a_chunk_gives_the_same_bits_in_both_phases(threads: int, queries: int, context: int) -> None:
    """Sizes on both sides of where a phase splits the context."""
    storage, tables = filled_storage(np.random.default_rng(1), [context], 2, 32, "f16", 16)
    query = np.random.default_rng(2).standard_normal((queries, 6, 32), np.float32)
    shape = AttentionShape(0, 6, 2, 32, 0.2, None)
    with settings("", threads):
        results = [
            attend(native.NativeKernels(), query, shape, segment([queries], [context], tables, 0, phase), storage)
            for phase in AttentionPhase
        ]
    np.testing.assert_array_equal(*results)
