"""The queries of a pass by the number of positions that they see: an indexer chooses for those that see many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import PhaseError
from bifolio.kernels.interface import Array, AttentionPhase, AttentionSegment, Heads, Segments, Storage


@dataclass(frozen=True, slots=True)
class ChoosingQueries:
    """Consecutive queries of one sequence; each sees more positions than are chosen for it."""

    start: int  # rows of the batch
    stop: int
    seen: int  # positions that the first of them sees
    origin: int  # row of the sequence's first token, where there is no cache
    table: Array | None  # i32[blocks] of the sequence; None: there is no cache

    def rows(self) -> Iterator[tuple[int, int]]:
        """(row, positions that it sees)."""
        return zip(range(self.start, self.stop), range(self.seen, self.seen + self.stop - self.start), strict=True)

    def keys(self, heads: Heads, layer: int, storage: Storage | None, positions: Array) -> Array:
        """The keys at these positions of the sequence: [*positions, head size]."""
        if storage is None or self.table is None:
            return heads.key[self.origin + positions][..., 0, :]
        return storage.keys_at(layer, self.table, positions)[..., 0, :]


@dataclass(frozen=True, slots=True)
class QuerySplit:
    """The queries that choose positions, and the others as a pass of their own."""

    choosing: tuple[ChoosingQueries, ...]
    rows: NDArray[np.int64]  # of the others, in the order of `segments`
    segments: Segments

    def others(self, heads: Heads, storage: Storage | None) -> Heads:
        """The heads of the others; their keys and values are in the cache, if there is one."""
        if storage is not None:
            return Heads(heads.query[self.rows], None, None)
        return Heads(*(part[self.rows] for part in heads))


def split_queries(segments: Segments, top_k: int) -> QuerySplit:
    """A sequence may be in both parts: whether a query chooses depends on its position alone."""
    choosing: list[ChoosingQueries] = []
    rows: list[NDArray[np.int64]] = []
    others: list[AttentionSegment] = []
    for segment in segments:
        tables = segment.block_tables
        if tables is None and segment.phase is AttentionPhase.DECODE:
            raise PhaseError("decode reads the cache: pass a storage and block tables")
        starts = np.asarray(segment.query_starts).astype(np.int64)
        counts = np.diff(starts)
        before = np.asarray(segment.context_lens).astype(np.int64) - counts
        few = np.clip(top_k - before, 0, counts)  # queries that see at most top_k positions
        starts = starts + segment.token_start
        for i in np.flatnonzero(few < counts):
            start, stop, seen = int(starts[i] + few[i]), int(starts[i + 1]), int(before[i] + few[i] + 1)
            choosing.append(ChoosingQueries(start, stop, seen, int(starts[i]), None if tables is None else tables[i]))
        kept = np.flatnonzero(few)
        if len(kept):
            others.append(_of_first(segment, kept, few[kept], before[kept], sum(len(part) for part in rows)))
            rows += [starts[i] + np.arange(few[i]) for i in kept]
    return QuerySplit(tuple(choosing), np.concatenate(rows) if rows else np.zeros(0, np.int64), tuple(others))


def _of_first(
    segment: AttentionSegment,
    kept: NDArray[np.int64],
    counts: NDArray[np.int64],
    before: NDArray[np.int64],
    token_start: int,
) -> AttentionSegment:
    """The first queries of some sequences, over the cache if there is one."""
    tables, ends = segment.block_tables, np.cumsum(counts)
    contexts = before + counts
    return replace(
        segment,
        token_start=token_start,
        token_end=token_start + int(ends[-1]),
        query_starts=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=contexts.astype(np.int32),
        block_tables=None if tables is None else tables[kept],
        fresh=segment.fresh and tables is None,
        max_query_len=int(counts.max()),
        max_context_len=int(contexts.max()),
    )


class LastSplit:
    """The split of the running pass: all of its layers use the same one."""

    def __init__(self) -> None:
        self._known: tuple[Segments, int, QuerySplit] | None = None

    def of(self, segments: Segments, top_k: int) -> QuerySplit:
        known = self._known
        if known is None or known[0] is not segments or known[1] != top_k:
            known = self._known = segments, top_k, split_queries(segments, top_k)
        return known[2]
