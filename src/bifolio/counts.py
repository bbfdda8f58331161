"""Whole numbers from callers: one that is no whole number, or out of range, is refused before any state changes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from bifolio.errors import BifolioError, CacheError


def whole(
    name: str,
    value: Any,
    *,
    least: int | None = 0,
    most: int | None = None,
    error: type[BifolioError] = CacheError,
) -> int:
    """`value` as an int; `error` if it is a bool, a float or anything else, or outside `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise error(f"{name} is a whole number, not {value!r}: pass an int") from None
    if type(value).__name__ in ("bool", "bool_"):  # numpy has one, too
        raise error(f"{name} is a whole number, not {value!r}: pass an int")
    if least is not None and number < least:
        raise error(f"{name} must be at least {least}, not {number}")
    if most is not None and number > most:
        raise error(f"{name} must be at most {most}, not {number}")
    return number


def distinct_ids(name: str, values: Any, *, error: type[BifolioError] = CacheError) -> list[int]:
    """Ids as ints; `error` if they are no list of whole numbers, or if one of them occurs twice."""
    found = whole_ids(name, values, error=error)
    if len(set(found)) != len(found):
        raise error(f"{name} {found} name one twice: pass each once")
    return found


def whole_ids(name: str, values: Any, *, error: type[BifolioError] = CacheError) -> list[int]:
    """Ids as ints, in order; `error` if they are no list of whole numbers."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise error(f"{name} are a list of whole numbers, not {values!r}")
    return [whole(f"each of {name}", value, least=None, error=error) for value in values]
