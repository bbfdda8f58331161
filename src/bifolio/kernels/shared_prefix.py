"""Sequences of a decode step with a common prefix of blocks, and the work items of attention over it.

Beams, parallel samples and requests with a common system prompt share the blocks of their prefix. A GPU reads such a
prefix once for all of them: batch rows that share it are adjacent, and a work item is a few of these rows against a
range of the prefix.

    rows      a b c d | e | f g              a..d share 4096 tokens, f and g share 512
    items     [a b c d] x tokens 0..1024, [a b c d] x 1024..2048, ..., [f g] x 0..512
    the rest  tokens after the prefix, row by row as in plain decode attention

Only whole blocks that are full in every sharing sequence count: they are not written any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_SAVED = 16384  # token reads saved; below, the extra kernel costs more than it saves
WANTED_ITEMS = 16  # times the key heads of common models this fills a GPU; each row merges its items' partial results


@dataclass(frozen=True, slots=True)
class SharedWork:
    """Work items over rows in a new order, in which the rows of an item are adjacent."""

    order: np.ndarray  # i32[n]  original rows, sharers adjacent
    skipped: np.ndarray  # i32[n]  leading tokens covered by items; 0: none
    first: np.ndarray  # i32[n]  the first item of the row's prefix
    count: np.ndarray  # i32[n]  number of items, in the order of the context
    offset: np.ndarray  # i32[n]  index of the row within these items
    items: np.ndarray  # i32[m, 4]  first row, number of rows, first token, token after the last


@dataclass(frozen=True, slots=True)
class Group:
    """Rows with a common prefix."""

    rows: np.ndarray  # i64[k]
    shared: int  # tokens

    @property
    def saved(self) -> int:
        return (len(self.rows) - 1) * self.shared


def find_groups(tables: np.ndarray, lengths: np.ndarray, block_size: int, tile: int) -> list[Group]:
    """Rows whose tables (i32[n, blocks]) have a common prefix, in whole tiles that are full in all of them."""
    order = np.argsort(tables[:, 0], kind="stable")
    borders = np.flatnonzero(np.diff(tables[order, 0])) + 1
    groups = []
    for rows in np.split(order, borders):
        if len(rows) < 2:
            continue
        most = int(lengths[rows].min()) // block_size
        alike = (tables[rows, :most] == tables[rows[0], :most]).all(axis=0)
        blocks = most if alike.all() else int(alike.argmin())
        shared = blocks * block_size // tile * tile
        if shared:
            groups.append(Group(rows, shared))
    return groups


def share_work(
    tables: np.ndarray,  # i32[n, blocks]
    lengths: np.ndarray,  # i64[n]  tokens in the cache
    block_size: int,
    tile: int,  # tokens per tile of the kernels
    rows_per_item: int,
    max_items: int,
) -> SharedWork | None:
    """The work items of a step; None when too little would be saved."""
    groups = sorted(find_groups(tables, lengths, block_size, tile), key=lambda group: -group.saved)
    groups = [group for group in groups if group.saved * len(groups) * 2 >= MIN_SAVED]  # drop small groups
    tiles = np.cumsum([-(-len(group.rows) // rows_per_item) for group in groups])
    groups = groups[: int(np.searchsorted(tiles, max_items - WANTED_ITEMS, side="right"))]
    if sum(group.saved for group in groups) < MIN_SAVED:
        return None
    return deal(groups, len(lengths), tile, rows_per_item)


def deal(groups: list[Group], num_rows: int, tile: int, rows_per_item: int) -> SharedWork:
    """Cut the groups into items of about equal size."""
    total = sum(-(-len(group.rows) // rows_per_item) * group.shared for group in groups)
    stretch = -(-total // (WANTED_ITEMS * tile)) * tile
    sharers = np.concatenate([group.rows for group in groups])
    order = np.concatenate([sharers, np.setdiff1d(np.arange(num_rows), sharers)])
    skipped, first, count, offset = np.zeros((4, num_rows), dtype=np.int32)
    items: list[tuple[int, int, int, int]] = []
    row = 0
    for group in groups:
        for start in range(0, len(group.rows), rows_per_item):
            size = min(rows_per_item, len(group.rows) - start)
            mine = slice(row, row + size)
            begins = range(0, group.shared, stretch)
            skipped[mine], first[mine], count[mine] = group.shared, len(items), len(begins)
            offset[mine] = np.arange(size)
            items += [(row, size, begin, min(begin + stretch, group.shared)) for begin in begins]
            row += size
    return SharedWork(order.astype(np.int32), skipped, first, count, offset, np.array(items, dtype=np.int32))
