"""The queries of a pass one by one, as the kernels of indexers and of chosen positions read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bifolio.kernels.interface import Segments
from bifolio.kernels.torch_arrays import upload


@dataclass(frozen=True, slots=True)
class PassRows:
    """Query i belongs to the sequence whose block table is row `table_rows[i]` of `tables`."""

    seen: torch.Tensor  # i32[t]  positions that the query sees, its own included; 0: padding
    tables: torch.Tensor  # i32[s, blocks]
    table_rows: torch.Tensor  # i32[t]
    on_host: np.ndarray | None  # i64[t]  `seen`; None: only the device knows it
    longest: int  # no query sees more positions

    def pieces(self, least: int, most_values: int) -> list[tuple[int, int, int]]:
        """(first row, row after the last, most positions that one sees): parts of `most_values` values at most.

        Parts whose queries all see at most `least` positions are left out.
        """
        size = max(most_values // max(self.longest, 1), 1)
        found = []
        for start in range(0, len(self.seen), size):
            stop = min(start + size, len(self.seen))
            longest = self.longest if self.on_host is None else int(self.on_host[start:stop].max())
            if longest > least:
                found.append((start, stop, longest))
        return found

    @classmethod
    def of_segments(cls, segments: Segments, device: torch.device | str) -> PassRows:
        """Of a pass whose lengths the host knows."""
        seen, owners, tables, sequences = [], [], [], 0
        for segment in segments:
            counts = np.diff(np.asarray(segment.query_starts)).astype(np.int64)
            last = np.asarray(segment.context_lens).astype(np.int64)
            starts = np.cumsum(counts) - counts
            seen.append(np.arange(counts.sum()) - np.repeat(starts + counts - 1, counts) + np.repeat(last, counts))
            owners.append(sequences + np.repeat(np.arange(len(counts)), counts))
            sequences += len(counts)
            tables.append(_integers(segment.block_tables, device))
        own = np.concatenate(seen)
        return cls(
            upload(own.astype(np.int32), device),
            _stacked(tables),
            upload(np.concatenate(owners).astype(np.int32), device),
            own,
            int(own.max(initial=0)),
        )


def _integers(tables: object, device: torch.device | str) -> torch.Tensor:
    if isinstance(tables, torch.Tensor):
        return tables.to(device=device, dtype=torch.int32)
    return upload(np.asarray(tables, dtype=np.int32), device)


def _stacked(tables: list[torch.Tensor]) -> torch.Tensor:
    """i32[s, most blocks]: the tables of all segments, padded with block 0."""
    if len(tables) == 1:
        return tables[0]
    width = max(table.shape[1] for table in tables)
    return torch.cat([torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables])
