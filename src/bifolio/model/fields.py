"""Fields: the facts of a network, with their places in `ModelConfig` and their keys in the files of models.

The table of a family is that of a decoder like Llama (`decoder_fields.py`) with the fields in which the family differs.
`description.py` reads and writes files by tables.

    "hidden_size"    a field of `ModelConfig`
    "moe.top_k"      a field of its part `moe`, which a network has if the first field of the part is not 0 or empty
    "layers.window"  a tuple with the value of each layer; (): the usual one in all layers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from bifolio.config import (
    MODEL_LIMITS,
    CompressedConfig,
    HyperConfig,
    LatentConfig,
    LayerInputConfig,
    ModelConfig,
    MoeConfig,
    RecurrentConfig,
    SharedBlockConfig,
    StreamConfig,
)
from bifolio.config.compressed import MOST_GROUPS, MOST_HYPER_STREAMS, MOST_ITERATIONS, MOST_RANK
from bifolio.config.layers import EXPERT_LIMITS, MOST_BLOCKS, MOST_COLUMNS, MOST_STREAMS, USUAL
from bifolio.config.recurrent import RECURRENT_LIMITS

if TYPE_CHECKING:
    from bifolio.model.description import Reading, Writing

Side = Literal["hf", "gguf"]
Table = Mapping[str, "Entry"]

PARTS: dict[str, Any] = {
    "moe": MoeConfig,
    "mla": LatentConfig,
    "recurrent": RecurrentConfig,
    "layer_inputs": LayerInputConfig,
    "streams": StreamConfig,
    "shared_blocks": SharedBlockConfig,
    "hyper": HyperConfig,
    "compressed": CompressedConfig,
}
FIRST = {part: f"{part}.{fields(owner)[0].name}" for part, owner in PARTS.items()}
_SET_BY_FAMILY = {"architecture", "rope_interleaved", "norm_offset", "recurrent.tiled", "layers", *PARTS}

LIMITS = {place: (1, most) for place, most in MODEL_LIMITS.items()}  # least and most values of integers
LIMITS |= {f"moe.{name}": (1, most) for name, most in EXPERT_LIMITS.items()}
LIMITS |= {f"recurrent.{name}": (1, most) for name, most in RECURRENT_LIMITS.items()} | {
    "recurrent.width": (2, RECURRENT_LIMITS["width"])
}
LIMITS |= dict.fromkeys(("streams.low_rank", "layer_inputs.size", "shared_blocks.rank"), (1, MOST_COLUMNS))
LIMITS["shared_blocks.count"] = 1, MOST_BLOCKS
LIMITS["streams.count"] = 2, MOST_STREAMS
LIMITS |= {"hyper.count": (2, MOST_HYPER_STREAMS), "hyper.iterations": (1, MOST_ITERATIONS)}
LIMITS |= dict.fromkeys(("compressed.query_rank", "compressed.output_rank"), (1, MOST_RANK))
LIMITS["compressed.output_groups"] = 1, MOST_GROUPS
POSITIVE = {"embedding_scale", "residual_scale", "logit_scale"}  # other numbers may be 0


class Mark(Enum):
    """Properties of a field that have no value."""

    INHERITED = 0  # as in the table that the field changes
    REQUIRED = 1  # there is no default


INHERITED, REQUIRED = Mark.INHERITED, Mark.REQUIRED


@dataclass(frozen=True, slots=True)
class Form:
    """A value that several keys, or tensors, describe together."""

    read: Callable[[Reading], Any]
    write: Callable[[Writing], Mapping[str, Any]] = lambda values: {}


@dataclass(frozen=True, slots=True)
class Key:
    """A key of one kind of files, with properties that the field has there only."""

    name: str | tuple[str, ...]  # several: the first that the file has is read
    written: str | Mark = INHERITED  # the key that is written; the first, if it is not given
    reader: Callable[[Reading], Any] | None = None  # reads the value from more than the key; it checks the type itself
    default: Any = INHERITED
    read: Callable[[Any], Any] | Mark | None = INHERITED
    write: Callable[[Any], Any] | Mark | None = INHERITED
    optional: bool | Mark = INHERITED


Stored = str | tuple[str, ...] | Key | Form | None


@dataclass(frozen=True, slots=True)
class Field:
    """One fact of a network; properties that are not given are those of the field of Llama at the same place.

    In each kind of files it is a key, a `Form`, or None: files do not store the value. Then all networks have the
    default, and others cannot be written.
    """

    place: str
    hf: Stored | Mark = INHERITED
    gguf: Stored | Mark = INHERITED
    default: Any = INHERITED  # where files leave it out: a value, or a function of the values; REQUIRED: none
    read: Callable[[Any], Any] | Mark | None = INHERITED  # from the stored value to ours; None: they are the same
    write: Callable[[Any], Any] | Mark | None = INHERITED  # the reverse
    optional: bool | Mark = INHERITED  # not written where it has the default

    def changed_by(self, other: Field) -> Field:
        return replace(self, **_given(other))

    def entry(self, side: Side) -> Entry:
        stored = self.hf if side == "hf" else self.gguf
        properties = {name: getattr(self, name) for name in ("default", "read", "write", "optional")}
        if isinstance(stored, Key):
            properties |= _given(stored)
            stored = properties.pop("name")
        form = stored if isinstance(stored, Form) else None
        keys = (stored,) if isinstance(stored, str) else stored if isinstance(stored, tuple) else ()
        usual = {"written": keys[0] if keys else "", "reader": None if form is None else form.read}
        return Entry(self.place, keys, form, **{**usual, **properties})


def _given(properties: Field | Key) -> dict[str, Any]:
    values = {each.name: getattr(properties, each.name) for each in fields(properties)}
    return {name: value for name, value in values.items() if value is not INHERITED}


@dataclass(frozen=True, slots=True)
class Entry:
    """A field in one kind of files."""

    place: str
    keys: tuple[str, ...]  # empty: the value is not stored, or in a form
    form: Form | None
    written: str
    reader: Callable[[Reading], Any] | None
    default: Any
    read: Callable[[Any], Any] | None
    write: Callable[[Any], Any] | None
    optional: bool


def constants(values: Mapping[str, Any]) -> tuple[Field, ...]:
    """Fields that all networks of a family share, and that no file stores."""
    return tuple(Field(place, hf=None, gguf=None, default=value) for place, value in values.items())


def table(side: Side, *changes: Iterable[Field]) -> Table:
    """The entries of one kind of files by place; later fields change earlier ones."""
    merged = dict(_BLANK)
    for change in changes:
        for field in change:
            merged[field.place] = merged[field.place].changed_by(field)
    return {place: field.entry(side) for place, field in merged.items()}


def usual(name: str, values: tuple[Any, ...], num_layers: int) -> tuple[Any, ...]:
    """The values of all layers, also where they are the usual one."""
    return values or (USUAL[name],) * num_layers


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, numbers to the precision of a file."""
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def _places() -> Iterable[tuple[str, type, Any]]:
    """(place, type, default) of everything that a table may describe."""
    for prefix, owner in (("", ModelConfig), *((f"{part}.", owner) for part, owner in PARTS.items())):
        hints = get_type_hints(owner)
        for each in fields(owner):
            place, default = prefix + each.name, REQUIRED if each.default is MISSING else each.default
            if place in FIRST.values():
                default = 0
            kinds = {type(choice) for choice in get_args(hints[each.name])} | {
                hints[each.name],
                *get_args(hints[each.name]),
            }
            kind = next((kind for kind in (bool, float, int, str) if kind in kinds), tuple)
            if place not in _SET_BY_FAMILY:
                yield place, kind, default
    for name in USUAL:
        yield f"layers.{name}", tuple, ()


KINDS: dict[str, type] = {place: kind for place, kind, _ in _places()}
_BLANK = {
    place: Field(place, hf=None, gguf=None, default=default, read=None, write=None, optional=False)
    for place, _, default in _places()
}
