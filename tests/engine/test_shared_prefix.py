"""What rows of a step share, and how the work on it is dealt out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.kernels import shared_prefix
from bifolio.kernels.shared_prefix import SharedWork, share_work

BLOCK, TILE = 32, 64


@st.composite
def families(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """(tables, lengths) of rows in families, each with blocks of its own behind a common beginning."""
    rows, lengths, fresh = [], [], 1
    for _ in range(draw(st.integers(1, 4))):
        common = draw(st.integers(0, 12))
        blocks = list(range(fresh, fresh + common))
        fresh += common
        for _ in range(draw(st.integers(1, 9))):
            own = draw(st.integers(1, 4))
            rows.append(blocks + list(range(fresh, fresh + own)))
            fresh += own
            lengths.append(len(rows[-1]) * BLOCK - draw(st.integers(1, own * BLOCK)))
    order = draw(st.permutations(range(len(rows))))
    tables = np.zeros((len(rows), max(map(len, rows)) + 1), dtype=np.int32)
    for place, row in enumerate(order):
        tables[place, : len(rows[row])] = rows[row]
    return tables, np.array([lengths[row] for row in order], dtype=np.int64)


def check(work: SharedWork, tables: np.ndarray, lengths: np.ndarray, rows_per_item: int) -> int:
    """Every row's skipped tokens are looked at exactly once, in order, through a table that agrees with its own."""
    assert sorted(work.order.tolist()) == list(range(len(lengths)))
    saved = 0
    for row, old in enumerate(work.order.tolist()):
        assert 0 <= work.skipped[row] <= lengths[old]
        reached = 0
        for item in range(work.first[row], work.first[row] + work.count[row]):
            first, count, begin, end = work.items[item].tolist()
            assert count <= rows_per_item
            assert first + work.offset[row] == row < first + count
            assert begin == reached
            assert end > begin
            assert begin % TILE == 0
            reached = end
            leader = work.order[first]
            blocks = slice(begin // BLOCK, -(-end // BLOCK))
            assert np.array_equal(tables[leader, blocks], tables[old, blocks])
            saved += end - begin if row > first else 0
        assert reached == work.skipped[row]
    return saved


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(families(), st.integers(1, 5))
def test_every_shared_token_is_looked_at_once(family: tuple[np.ndarray, np.ndarray], rows_per_item: int) -> None:
    tables, lengths = family
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "MIN_SAVED", 1)
        work = share_work(tables, lengths, BLOCK, TILE, rows_per_item, 96)
    if work is not None:
        check(work, tables, lengths, rows_per_item)
        assert len(work.items) <= 96


def test_sixty_four_rows_of_one_prompt() -> None:
    tables = np.zeros((64, 70), dtype=np.int32)
    tables[:, :64] = 1 + np.arange(64)
    tables[:, 64:] = 100 + np.arange(64 * 6).reshape(64, 6)
    lengths = np.full(64, 64 * BLOCK + 5, dtype=np.int64)
    work = share_work(tables, lengths, BLOCK, TILE, 32, 96)
    assert work is not None
    assert check(work, tables, lengths, 32) == 62 * 64 * BLOCK  # 2 items of 32 rows each read everything once
    assert set(work.skipped.tolist()) == {64 * BLOCK}


def test_little_to_save_is_left_alone() -> None:
    tables = np.tile(np.arange(1, 5, dtype=np.int32), (2, 1))
    assert share_work(tables, np.array([100, 100]), BLOCK, TILE, 32, 96) is None


def test_blocks_that_somebody_has_not_filled_are_not_shared() -> None:
    tables = np.tile(np.arange(1, 1001, dtype=np.int32), (64, 1))
    lengths = np.full(64, 1000 * BLOCK)
    lengths[7] = 600 * BLOCK + 3
    work = share_work(tables, lengths, BLOCK, TILE, 32, 96)
    assert work is not None
    assert work.skipped.max() == 600 * BLOCK
