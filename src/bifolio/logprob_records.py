"""Logprobs of output tokens as packed records: a step copies bytes, and objects are made when they are read.

    record   | token id | logprob | rank | count | id | logprob | id | logprob | ...    32-bit words
             |<------------- 4 words ----------->|<---- count pairs, then zeros ---->|

A record has as many pairs as the request asked for, so all records of a sequence have one size, and a part of them can
be sent to another process as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

HEAD_WORDS = 4
WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logprob of one token and of the most likely alternatives."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


def pack_records(
    token_ids: NDArray[np.int32],  # i32[r]
    logprobs: NDArray[np.float32],  # f32[r]
    ranks: NDArray[np.int32],  # i32[r]
    counts: NDArray[np.int64],  # i64[r]  valid entries of `top_ids` and `top_logprobs`
    top_ids: NDArray[np.int32],  # i32[r, k]
    top_logprobs: NDArray[np.float32],  # f32[r, k]
    num_pairs: int,
) -> NDArray[np.int32]:
    """i32[r, 4 + 2 * num_pairs]: one record for each row."""
    words = np.zeros((len(token_ids), HEAD_WORDS + 2 * num_pairs), dtype=np.int32)
    words[:, 0], words[:, 2], words[:, 3] = token_ids, ranks, counts
    words[:, 1] = np.asarray(logprobs, dtype=np.float32).view(np.int32)
    width = min(num_pairs, top_ids.shape[1])
    if not width:
        return words
    found = np.ascontiguousarray(top_logprobs[:, :width], dtype=np.float32).view(np.int32)
    words[:, HEAD_WORDS : HEAD_WORDS + 2 * width : 2] = top_ids[:, :width]
    words[:, HEAD_WORDS + 1 : HEAD_WORDS + 1 + 2 * width : 2] = found
    if counts.min() < width:
        missing = np.repeat(np.arange(width) >= counts[:, None], 2, axis=1)
        words[:, HEAD_WORDS : HEAD_WORDS + 2 * width][missing] = 0
    return words


class LogprobRecords(Sequence[TokenLogprob]):
    """The logprobs of a sequence's tokens; an item is a `TokenLogprob`, made when it is read."""

    __slots__ = ("_data", "_items", "num_bytes")

    def __init__(self, num_top: int = 0, data: bytes | bytearray = b"") -> None:
        self.num_bytes = (HEAD_WORDS + 2 * num_top) * WORD_BYTES  # of one record
        self._data = bytearray(data)
        self._items: list[TokenLogprob] = []  # of the first records, as far as they were read

    def add(self, record: bytes | memoryview) -> None:
        """Append a record; one that is shorter than `num_bytes` has fewer pairs."""
        self._data += record
        if len(record) < self.num_bytes:
            self._data += bytes(self.num_bytes - len(record))

    def put(self, first: int, records: bytes) -> None:
        """Set the records from number `first` on, which may exist already."""
        start = first * self.num_bytes
        self._data[start : start + len(records)] = records

    def append(self, item: TokenLogprob) -> None:
        """Append an item, whose logprobs are float32 values."""
        num_top = self.num_bytes // WORD_BYTES // 2 - HEAD_WORDS // 2
        top = item.top[:num_top]
        ids = np.array([[token_id for token_id, _ in top]], dtype=np.int32).reshape(1, len(top))
        values = np.array([[value for _, value in top]], dtype=np.float32).reshape(1, len(top))
        token_ids, ranks = np.array([item.token_id], np.int32), np.array([item.rank], np.int32)
        logprobs, counts = np.array([item.logprob], np.float32), np.array([len(top)])
        self.add(pack_records(token_ids, logprobs, ranks, counts, ids, values, num_top).tobytes())

    def extend(self, items: Iterable[TokenLogprob]) -> None:
        for item in items:
            self.append(item)

    def copy(self, first: int = 0) -> LogprobRecords:
        """The records from number `first` on."""
        copy = LogprobRecords(0, self._data[first * self.num_bytes :])
        copy.num_bytes = self.num_bytes
        return copy

    def packed(self, first: int = 0, last: int | None = None) -> bytes:
        """The records of tokens [first, last)."""
        end = None if last is None else last * self.num_bytes
        return bytes(memoryview(self._data)[first * self.num_bytes : end])

    def __len__(self) -> int:
        return len(self._data) // self.num_bytes

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob]:
        items = self._items
        if len(items) < len(self):
            items.extend(self._read(len(items)))
        return items[index]

    def __iter__(self) -> Iterator[TokenLogprob]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LogprobRecords | list) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])

    def _read(self, first: int) -> list[TokenLogprob]:
        """The items from record `first` on."""
        words = np.frombuffer(self.packed(first), np.int32).reshape(-1, self.num_bytes // WORD_BYTES)
        floats = words.view(np.float32)
        ids, values = words[:, HEAD_WORDS::2].tolist(), floats[:, HEAD_WORDS + 1 :: 2].tolist()
        heads, logprobs = words[:, :HEAD_WORDS].tolist(), floats[:, 1].tolist()
        return [
            TokenLogprob(token_id, logprobs[row], rank, tuple(zip(ids[row][:count], values[row][:count], strict=True)))
            for row, (token_id, _, rank, count) in enumerate(heads)
        ]
