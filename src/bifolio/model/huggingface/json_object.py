"""Typed access to the JSON files of a model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bifolio.errors import ModelFileError
from bifolio.model.plain_values import is_integer, is_number, shown

MAX_COUNT = (1 << 31) - 1


class JsonObject:
    """The fields of an object; one of the wrong type raises an error that names the file, the field and its value.

    A field that is missing or null has its default, and is an error where there is none.
    """

    def __init__(self, values: Mapping[str, Any], path: Path | str, name: str = "", family: str = "") -> None:
        """`name`: of the object in its file, with a point at its end; `family`: of the described model."""
        self._values, self.path, self._name, self._family = values, path, name, family

    def wrong(self, field: str, wanted: str) -> ModelFileError:
        if self.get(field) is None:
            needed = f", which a {self._family} model needs" if self._family else ""
            return ModelFileError(
                f"{self.path} has no field {self._name + field!r}{needed}: fetch the whole model again"
            )
        model = f" in a {self._family} model" if self._family else ""
        found = shown(self.get(field))
        return ModelFileError(f"{self.path}: {self._name}{field} is {found}: it must be {wanted}{model}")

    def get(self, field: str) -> Any:
        """The value as it is in the file."""
        return self._values.get(field)

    def count(self, field: str, default: int | None = None, *, least: int = 1, most: int = MAX_COUNT) -> int:
        found = self.get(field)
        if found is None and default is not None:
            return default
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if not is_integer(found) or not least <= found <= most:
            raise self.wrong(field, f"an integer from {least} to {most}")
        return int(found)

    def counts(self, field: str, *, least: int = 1, most: int = MAX_COUNT) -> tuple[int, ...]:
        """A list of integers; empty by default."""
        value = self.get(field)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(is_integer(x) and least <= x <= most for x in value):
            raise self.wrong(field, f"a list of integers from {least} to {most}")
        return tuple(value)

    def number(self, field: str, default: float | None = None) -> float:
        found = self.get(field)
        if found is None and default is not None:
            return default
        if not is_number(found):
            raise self.wrong(field, "a number")
        return float(found)

    def numbers(self, field: str, default: tuple[float, ...] = ()) -> tuple[float, ...]:
        """A list of numbers."""
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, list | tuple) or not all(is_number(number) for number in value):
            raise self.wrong(field, "a list of numbers")
        return tuple(float(number) for number in value)

    def flag(self, field: str, default: bool | None = None) -> bool:
        found = self.get(field)
        if found is None and default is not None:
            return default
        if not isinstance(found, bool):
            raise self.wrong(field, "true or false")
        return found

    def text(self, field: str, default: str | None = None) -> str:
        found = self.get(field)
        if found is None and default is not None:
            return default
        if not isinstance(found, str):
            raise self.wrong(field, "a text")
        return found

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of texts; empty by default."""
        value = self.get(field)
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)):
            raise self.wrong(field, "a list of texts")
        return tuple(value or ())

    def object(self, field: str) -> JsonObject:
        """An object inside this one; without fields by default."""
        value = self.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(field, "an object")
        return JsonObject(value or {}, self.path, f"{self._name}{field}.", self._family)

    def needed_object(self, field: str) -> JsonObject:
        if self.get(field) is None:
            raise self.wrong(field, "an object")
        return self.object(field)

    def with_defaults(self, values: Mapping[str, Any]) -> JsonObject:
        """The object with these fields, where it has none of their names."""
        return JsonObject({**values, **self._values}, self.path, self._name, self._family)

    def with_values(self, values: Mapping[str, Any]) -> JsonObject:
        """The object with other values of these fields."""
        return JsonObject({**self._values, **values}, self.path, self._name, self._family)

    def objects(self) -> list[JsonObject]:
        """The fields, which are all objects."""
        return [self.object(field) for field in self._values]

    def __bool__(self) -> bool:
        return bool(self._values)
