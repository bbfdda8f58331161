"""Every field of every request body, each with values that it does not have in a small request.

Fields and values come from the types that requests are decoded into, so a new field is probed without a change here.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from limit_cases import smallest
from msgspec import inspect

from bifolio.serve.http.bounds import parts

WORD = "probe_of_words"
EACH = "[]"  # every item of a list


@dataclass(frozen=True)
class Probe:
    """A field of a request."""

    path: tuple[str, ...]
    owners: tuple[tuple[type, str], ...]  # (struct, field) from the request down to the field
    structs: dict[tuple[str, ...], Any]  # path → type of a struct on the way that a request may lack
    described: list[Any]  # types of the field

    @property
    def name(self) -> str:
        return ".".join(self.path).replace(f".{EACH}", EACH)

    @property
    def is_fixed(self) -> bool:
        """Whether the field has one value only, which means the same as no value."""
        return len(values(self.described)) < 2 and all(has_one_value(part) for part in self.described)

    def bodies(self, base: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(request without the probe, the same with it), for one place and one value at a time."""
        for place in _places(base, self.path):
            plain = copy.deepcopy(base)
            target = _target(plain, self.path, place, self.structs)
            for value in values(self.described):
                if target.get(self.path[-1]) != value or type(target.get(self.path[-1])) is not type(value):
                    probed = copy.deepcopy(plain)
                    _target(probed, self.path, place, self.structs)[self.path[-1]] = value
                    yield plain, probed


def probes(kind: type) -> list[Probe]:
    """All fields below a request type."""
    return list(_below(inspect.type_info(kind), (), (), {}))


def _below(struct: Any, path: tuple[str, ...], owners: tuple[Any, ...], structs: dict[Any, Any]) -> Iterator[Probe]:
    for field in struct.fields:
        here, owned, plain = (*path, field.encode_name), (*owners, (struct.cls, field.name)), []
        for part in parts(field.type):
            inner = part.type if isinstance(part, inspect.Metadata) else part
            items = list(parts(inner.item_type)) if isinstance(inner, inspect.ListType) else []
            item = next((item for item in items if isinstance(item, inspect.StructType)), None)
            if isinstance(inner, inspect.StructType):
                yield from _below(inner, here, owned, {**structs, here: inner})
            elif item is not None:
                yield from _below(item, (*here, EACH), owned, {**structs, (*here, EACH): item})
            elif not isinstance(part, inspect.NoneType):
                plain.append(part)
        if plain:
            yield Probe(here, owned, structs, plain)


def _places(base: dict[str, Any], path: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The indexes for each list on a path: all that the request has, or the first of a new list."""
    found: list[tuple[tuple[int, ...], Any]] = [((), base)]
    for name in path[:-1]:
        if name != EACH:
            found = [(place, value.get(name) if isinstance(value, dict) else None) for place, value in found]
        else:
            lists = [(place, value if isinstance(value, list) and value else [None]) for place, value in found]
            found = [((*place, number), item) for place, value in lists for number, item in enumerate(value)]
    return list(dict.fromkeys(place for place, _ in found))


def _target(body: Any, path: tuple[str, ...], place: tuple[int, ...], structs: dict[Any, Any]) -> dict[str, Any]:
    """The struct with the field; structs that are missing on the way are made."""
    target, numbers = body, iter(place)
    for depth, (name, below) in enumerate(itertools.pairwise(path)):
        made = structs.get(path[: depth + 1])
        if name == EACH:
            number = next(numbers)
            if number >= len(target) or not isinstance(target[number], dict):
                target[number : number + 1] = [smallest(made)]
            target = target[number]
            continue
        if not isinstance(target.get(name), list if below == EACH else dict):
            target[name] = [] if below == EACH else smallest(made)
        target = target[name]
    return target  # type: ignore[no-any-return]


def has_one_value(described: Any) -> bool:
    if isinstance(described, inspect.Metadata):
        return has_one_value(described.type)
    if isinstance(described, inspect.LiteralType):
        return len(described.values) == 1
    if isinstance(described, inspect.IntType | inspect.FloatType):
        return described.ge is not None and described.ge == described.le
    if isinstance(described, inspect.ListType):
        return described.max_length == 0 or (described.max_length == 1 and has_one_value(described.item_type))
    return isinstance(described, inspect.StrType) and described.max_length == 0


def values(described: Any) -> list[Any]:
    """Some values of a type."""
    if isinstance(described, list):
        return [value for part in described for value in values(part)]
    if isinstance(described, inspect.Metadata):
        return values(described.type)
    if isinstance(described, inspect.BoolType):
        return [True, False]
    if isinstance(described, inspect.LiteralType):
        return list(described.values)
    if isinstance(described, inspect.IntType):
        return [number for number in (1, 3, 0) if _fits(described, number)]
    if isinstance(described, inspect.FloatType):
        return [number for number in (0.3, 1.5, 0.0) if _fits(described, number)][:2]
    if isinstance(described, inspect.StrType):
        return ["" if described.max_length == 0 else WORD]
    if isinstance(described, inspect.ListType):
        if described.max_length == 0:
            return [[]]
        items = [item for part in parts(described.item_type) for item in values(part)[:1]]
        return [[item] * max(described.min_length or 1, 1) for item in items]
    if isinstance(described, inspect.DictType):
        return [{"5": value} for value in values(described.value_type)[:1]]
    if isinstance(described, inspect.AnyType):
        return [1]
    raise TypeError(f"no rule for values of {type(described).__name__}")


def _fits(described: Any, number: float) -> bool:
    bounds = ((described.ge, lambda b: number >= b), (described.gt, lambda b: number > b),
              (described.le, lambda b: number <= b), (described.lt, lambda b: number < b))  # fmt: skip
    return all(bound is None or holds(bound) for bound, holds in bounds)
