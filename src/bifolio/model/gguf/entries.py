"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.gguf.reader import StringArray, Value
from bifolio.model.plain_values import is_number, shown


class Metadata:
    """The entries of a file by key; a missing entry or one of the wrong type raises a named error."""

    def __init__(self, values: Mapping[str, Value], path: Path) -> None:
        self._values = values
        self.path = path
        self.architecture = self.text("general.architecture")

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def wrong(self, key: str, wanted: str) -> ModelFileError:
        """The error of an entry that is missing, or has the wrong type or value."""
        found = self.get(key)
        name = self._key(key)
        if found is None:
            return self.fail(f"the metadata has no entry {name!r}, which must be {wanted}: convert the model again")
        return self.fail(f"the metadata {name!r} is {shown(found)}: it must be {wanted}")

    def _key(self, key: str) -> str:
        """Expand `.name` to a key with the architecture of the file as prefix."""
        return self.architecture + key if key.startswith(".") else key

    def get(self, key: str) -> Any:
        return self._values.get(self._key(key))

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 0, most: int = (1 << 48) - 1) -> int:
        """An integer; values given per layer must be equal."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray):
            distinct = set(value.tolist())
            if len(distinct) != 1:
                raise UnsupportedModelError(f"{self.path}: {self._key(key)!r} differs between layers")
            value = distinct.pop()
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"an integer from {least} to {most}")
        return value

    def by_layer(self, key: str, num_layers: int) -> tuple[int, ...]:
        """An integer for each layer; a single value is that of all layers."""
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return (self.count(key),) * num_layers
        if len(value) < num_layers or not np.issubdtype(value.dtype, np.integer) or (value < 0).any():
            raise self.wrong(key, f"an integer for each of {num_layers} layers")
        return tuple(int(number) for number in value[:num_layers])

    def of_some_layers(self, key: str, default: int | None = None) -> int:
        """The integer of all layers that have one; those without it say 0."""
        value = self.get(key)
        distinct = set(value.tolist()) - {0} if isinstance(value, np.ndarray) else ()
        if not isinstance(value, np.ndarray) or len(distinct) > 1:
            return self.count(key, default)
        return self.with_values({key: distinct.pop() if distinct else 0}).count(key)

    def with_values(self, values: Mapping[str, Value]) -> Metadata:
        """The metadata with other values of these keys."""
        return Metadata({**self._values, **{self._key(key): value for key, value in values.items()}}, self.path)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not is_number(value):
            raise self.wrong(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def array(self, key: str) -> np.ndarray | None:
        value = self.get(key)
        return value if isinstance(value, np.ndarray) else None

    def strings(self, key: str) -> Sequence[str] | None:
        value = self.get(key)
        return value if isinstance(value, StringArray | list) else None

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """The id of a special token, or None if it is missing or outside the vocabulary."""
        value = self.get(key)
        return value if type(value) is int and 0 <= value < vocab_size else None
