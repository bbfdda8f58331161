"""Typed access to the JSON files of a model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bifolio.errors import ModelFileError

MAX_COUNT = (1 << 31) - 1


class JsonObject:
    """The fields of an object; one of the wrong type raises an error that names the file, the field and its value.

    A field that is missing or null has its default.
    """

    def __init__(self, values: Mapping[str, Any], path: Path | str, name: str = "") -> None:
        self._values, self._path, self._name = values, path, name

    def fail(self, field: str, wanted: str) -> ModelFileError:
        return ModelFileError(f"{self._path}: {self._name}{field} is {shown(self.get(field))}: it must be {wanted}")

    def get(self, field: str) -> Any:
        """The value as it is in the file."""
        return self._values.get(field)

    def count(self, field: str, default: int, *, least: int = 1, most: int = MAX_COUNT) -> int:
        value = self.get(field)
        if value is None:
            return default
        found = _integer(value)
        if found is None or not least <= found <= most:
            raise self.fail(field, f"an integer from {least} to {most}")
        return found

    def counts(self, field: str, *, least: int = 1, most: int = MAX_COUNT) -> tuple[int, ...]:
        """A list of integers; empty by default."""
        value = self.get(field)
        found = [_integer(item) for item in value] if isinstance(value, list | tuple) else [None]
        if value is not None and not all(item is not None and least <= item <= most for item in found):
            raise self.fail(field, f"a list of integers from {least} to {most}")
        return () if value is None else tuple(item for item in found if item is not None)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.fail(field, "true or false")
        return default if value is None else value

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of texts; empty by default."""
        value = self.get(field)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.fail(field, "a list of texts")
        return tuple(value or ())

    def object(self, field: str) -> JsonObject:
        """An object inside this one; without fields by default."""
        value = self.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise self.fail(field, "an object")
        return JsonObject(value or {}, self._path, f"{self._name}{field}.")

    def objects(self) -> list[JsonObject]:
        """The fields, which are all objects."""
        return [self.object(field) for field in self._values]

    def __bool__(self) -> bool:
        return bool(self._values)


def _integer(value: Any) -> int | None:
    """An integer; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def shown(value: Any) -> str:
    """The value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
