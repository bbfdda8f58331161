"""Differences of two GGUF models: metadata, tensors and, where bytes differ, the values that they stand for.

Split models are compared as a whole. Values are decoded a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bifolio.model.gguf.reader import GgufFile, TensorEntry, Value
from bifolio.model.gguf.split import SPLIT_KEYS
from bifolio.model.gguf.typed_values import type_of
from bifolio.quant.formats import Floats
from bifolio.quant.tensor import PANEL_ROWS, QuantizedTensor

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class MetadataDifference:
    """A key whose value or type differs; a value is None where the key is missing."""

    key: str
    old_type: str | None
    new_type: str | None
    old: Value | None
    new: Value | None


@dataclass(frozen=True, slots=True)
class ValueStatistics:
    """Differences of the decoded values of two tensors of one shape."""

    num_values: int  # that differ
    largest: float  # absolute difference, of finite values
    rms: float  # root mean square of the differences of all values
    old_rms: float  # root mean square of the first tensor's values
    num_non_finite: int  # values that differ where one of them is NaN or infinite


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs; an entry is None where the tensor is missing."""

    name: str
    old: TensorEntry | None
    new: TensorEntry | None
    num_bytes: int | None  # that differ; None where shapes or types differ
    values: ValueStatistics | None  # None where shapes differ, or values cannot be decoded

    def exceeds(self, tolerance: float) -> bool:
        """Whether the tensors differ by more than `tolerance`, 0 stands for any difference of type or bytes."""
        if tolerance <= 0 or self.values is None:
            return True
        return self.values.largest > tolerance or self.values.num_non_finite > 0


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """All differences of two models."""

    metadata: tuple[MetadataDifference, ...]
    tensors: tuple[TensorDifference, ...]
    num_equal: int  # tensors with equal shapes, types and bytes


def compare(old: GgufFile, new: GgufFile) -> ModelDifference:
    """The differences of two models, opened by `open_whole_gguf`."""
    names = list(dict.fromkeys([*old.entries, *new.entries]))
    found = [_tensor_difference(old, new, name) for name in names]
    differing = tuple(difference for difference in found if difference is not None)
    return ModelDifference(tuple(_metadata_differences(old, new)), differing, len(names) - len(differing))


def _metadata_differences(old: GgufFile, new: GgufFile) -> Iterator[MetadataDifference]:
    for key in dict.fromkeys([*old.spans, *new.spans]):
        if key in SPLIT_KEYS:
            continue
        (old_type, old_bytes), (new_type, new_bytes) = _encoded(old, key), _encoded(new, key)
        if (old_type, old_bytes) != (new_type, new_bytes):
            yield MetadataDifference(key, old_type, new_type, old.metadata.get(key), new.metadata.get(key))


def _encoded(file: GgufFile, key: str) -> tuple[str | None, bytes]:
    span = file.spans.get(key)
    if span is None:
        return None, b""
    encoded = file.data[span.start : span.end].tobytes()
    return str(type_of(span.kind, encoded)), encoded


def _tensor_difference(old: GgufFile, new: GgufFile, name: str) -> TensorDifference | None:
    """None if the tensors are equal."""
    left, right = old.entries.get(name), new.entries.get(name)
    if left is None or right is None or left.shape != right.shape:
        return TensorDifference(name, left, right, None, None)
    first, second = old.tensor(name), new.tensor(name)
    num_bytes = None
    if left.format is right.format:
        num_bytes = _differing_bytes(first.data.reshape(-1), second.data.reshape(-1))
        if not num_bytes:
            return None
    readable = left.format.is_readable and right.format.is_readable
    return TensorDifference(name, left, right, num_bytes, value_statistics(first, second) if readable else None)


def _differing_bytes(first: np.ndarray, second: np.ndarray) -> int:
    starts = range(0, len(first), _CHUNK_BYTES)
    return sum(int(np.count_nonzero(first[n : n + _CHUNK_BYTES] != second[n : n + _CHUNK_BYTES])) for n in starts)


def value_statistics(first: QuantizedTensor, second: QuantizedTensor) -> ValueStatistics:
    """Compare the decoded values of two tensors of one shape, `PANEL_ROWS` rows at a time."""
    differing = non_finite = 0
    largest, squares, old_squares = 0.0, 0.0, 0.0
    for start in range(0, first.num_rows, PANEL_ROWS):
        rows = slice(start, start + PANEL_ROWS)
        panel = _panel(first.dequantize_rows(rows), second.dequantize_rows(rows))
        differing += panel["differing"]
        non_finite += panel["non_finite"]
        largest = max(largest, panel["largest"])
        squares += panel["squares"]
        old_squares += panel["old_squares"]
    count = math.prod(first.shape)
    return ValueStatistics(differing, largest, math.sqrt(squares / count), math.sqrt(old_squares / count), non_finite)


def _panel(first: Floats, second: Floats) -> dict[str, Any]:
    """Sums over the values of some rows; equal infinities and two NaNs are no difference."""
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    finite = np.isfinite(first) & np.isfinite(second)
    left, right = np.where(finite, first, 0).astype(np.float64), np.where(finite, second, 0).astype(np.float64)
    delta = np.abs(left - right)
    return {
        "differing": int(np.count_nonzero(~same)),
        "non_finite": int(np.count_nonzero(~same & ~finite)),
        "largest": float(delta.max(initial=0.0)),
        "squares": float(np.square(delta).sum()),
        "old_squares": float(np.square(left).sum()),
    }
