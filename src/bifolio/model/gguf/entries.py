"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.gguf.reader import StringArray, Value


class Metadata:
    """The entries of a file by key; a missing entry or one of the wrong type raises a named error."""

    def __init__(self, values: Mapping[str, Value], path: Path) -> None:
        self._values = values
        self.path = path
        self.architecture = self.text("general.architecture")

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def _get(self, key: str) -> Any:
        """Expand `.name` to a key with the architecture of the file as prefix."""
        return self._values.get(self.architecture + key if key.startswith(".") else key)

    def has(self, key: str) -> bool:
        return self._get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.fail(f"the metadata {key!r} is missing or not a string")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer; values given per layer must be equal."""
        value = self._get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray):
            distinct = set(value.tolist())
            if len(distinct) != 1:
                raise UnsupportedModelError(f"{self.path}: {key!r} differs between layers")
            value = distinct.pop()
        if type(value) is not int or not 0 <= value < 2**48:
            raise self.fail(f"the metadata {key!r} is {value!r}, not an integer")
        return value

    def by_layer(self, key: str, num_layers: int) -> tuple[int, ...]:
        """An integer for each layer; a single value is that of all layers."""
        value = self._get(key)
        if not isinstance(value, np.ndarray):
            return (self.count(key),) * num_layers
        if len(value) < num_layers or not np.issubdtype(value.dtype, np.integer) or (value < 0).any():
            raise self.fail(f"the metadata {key!r} must hold an integer for each of {num_layers} layers")
        return tuple(int(number) for number in value[:num_layers])

    def without_zeros(self, *keys: str) -> Metadata:
        """The metadata with one value for all layers that have one; those without it say 0."""
        values = dict(self._values)
        for key in keys:
            if isinstance(value := self._get(key), np.ndarray):
                values[self.architecture + key] = np.array([number for number in value.tolist() if number] or [0])
        return Metadata(values, self.path)

    def with_values(self, values: Mapping[str, Value]) -> Metadata:
        """The metadata with other values of these keys, which begin with a point."""
        return Metadata(
            {**self._values, **{self.architecture + key: value for key, value in values.items()}}, self.path
        )

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.fail(f"the metadata {key!r} is {value!r}, not a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"the metadata {key!r} is {value!r}, not true or false")
        return value

    def array(self, key: str) -> np.ndarray | None:
        value = self._get(key)
        return value if isinstance(value, np.ndarray) else None

    def strings(self, key: str) -> Sequence[str] | None:
        value = self._get(key)
        return value if isinstance(value, StringArray | list) else None

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """The id of a special token, or None if it is missing or outside the vocabulary."""
        value = self._get(key)
        return value if type(value) is int and 0 <= value < vocab_size else None
