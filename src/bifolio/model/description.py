"""A family's table of fields over a file or a configuration: the reader and the writer of all descriptions.

config.json, or the header of a GGUF file  -- read_network -->  ModelConfig  -- write_network -->  keys and values
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from bifolio.config import ModelConfig, layers_of
from bifolio.errors import UnsupportedModelError
from bifolio.model.fields import FIRST, KINDS, LIMITS, PARTS, POSITIVE, REQUIRED, Entry, Side, is_same, usual
from bifolio.model.gguf.header import Header
from bifolio.model.huggingface.json_object import MAX_COUNT, JsonObject
from bifolio.model.plain_values import is_integer, is_number, shown

if TYPE_CHECKING:
    from bifolio.model.families.family import Family


PART_NAMES = {
    "moe": "experts",
    "mla": "attention over latents",
    "recurrent": "recurrent layers",
    "layer_inputs": "inputs of layers",
    "streams": "parallel streams",
    "shared_blocks": "shared blocks",
    "hyper": "mixed streams",
    "compressed": "compressed entries",
}


class Values(Protocol):
    """The values of a network by their places, while it is read or written."""

    @property
    def layers(self) -> range: ...

    def __getitem__(self, place: str) -> Any: ...


class Reading:
    """The values of a network by their places; each is read when it is needed, once."""

    def __init__(self, family: Family, source: JsonObject | Header) -> None:
        self.family, self.source = family, source
        self.side: Side = "hf" if isinstance(source, JsonObject) else "gguf"
        self._found: dict[str, Any] = {}

    @property
    def json(self) -> JsonObject:
        assert isinstance(self.source, JsonObject)
        return self.source

    @property
    def header(self) -> Header:
        assert isinstance(self.source, Header)
        return self.source

    @property
    def layers(self) -> range:
        return range(self["num_layers"])

    def __getitem__(self, place: str) -> Any:
        if place not in self._found:
            entry = self.family.table(self.side)[place]
            self._found[place] = self._of_key(entry) if entry.reader is None else entry.reader(self)
        return self._found[place]

    def _of_key(self, entry: Entry) -> Any:
        keys = [key if self.side == "hf" else f".{key}" for key in entry.keys]
        found = [key for key in keys if self.source.get(key) is not None]
        if not found and entry.default is not REQUIRED:
            return entry.default(self) if callable(entry.default) else entry.default
        usable = (key for key in found if not is_integer(self.source.get(key)) or self.source.get(key) != 0)
        return self._typed(entry, next(usable, (found or keys)[0]))

    def _typed(self, entry: Entry, key: str) -> Any:
        """The value of a key, checked by the type of its place and by its limits."""
        kind, (least, most) = KINDS[entry.place], LIMITS.get(entry.place, (0, MAX_COUNT))
        least = min(least, entry.default) if is_integer(entry.default) else least
        if kind is int:
            limits = {"least": least, "most": most} if entry.read is None else {"least": 0}
            value: Any = self.source.count(key, **limits)
        else:
            kinds: dict[type, Any] = {bool: self.source.flag, float: self.source.number, str: self.source.text}
            value = kinds[kind](key)
        try:
            value = value if entry.read is None else entry.read(value)
        except ArithmeticError as error:
            raise self.source.wrong(key, "another number") from error
        if kind is int and not least <= value <= most:
            raise self.source.wrong(key, f"a number that means {least} to {most}")
        lowest = 1e-30 if entry.place in POSITIVE else 0.0
        if kind is float and not (is_number(value) and value >= lowest):
            raise self.source.wrong(key, "a positive number" if lowest else "a number of at least 0")
        return value


def read_network(family: Family, source: JsonObject | Header) -> ModelConfig:
    """The network that a file describes."""
    values = Reading(family, source)
    found: dict[str, dict[str, Any]] = {"": {"architecture": family.name}, "layers": {}}
    for place in family.table(values.side):
        part, _, name = place.rpartition(".")
        if part not in PARTS or values[FIRST[part]]:
            found.setdefault(part, {})[name] = values[place]
    if "moe" not in found:
        found["layers"]["dense"] = ()
    if values.side == "hf":
        found[""] |= {"rope_interleaved": family.hf_interleaved, "norm_offset": family.norm_offset}
    else:
        found[""] |= {"rope_interleaved": family.gguf_interleaved}
        if "recurrent" in found:
            found["recurrent"]["tiled"] = family.gguf_tiled
    values_of_model, layers = found.pop(""), found.pop("layers")
    values_of_model["layers"] = layers_of(values_of_model["num_layers"], **layers)
    return ModelConfig(**values_of_model, **{part: PARTS[part](**own) for part, own in found.items()})


class Writing:
    """The values of a network by their places."""

    def __init__(self, family: Family, config: ModelConfig, side: Side) -> None:
        self.family, self.config, self.side = family, config, side

    @property
    def layers(self) -> range:
        return range(self.config.num_layers)

    def __getitem__(self, place: str) -> Any:
        part, _, name = place.rpartition(".")
        if part == "layers":
            return tuple(getattr(layer, name) for layer in self.config.layers)
        owner = getattr(self.config, part) if part else self.config
        return None if owner is None else getattr(owner, name)

    def writes(self, key: str) -> bool:
        """Whether the family writes the key also with its default."""
        return self.side == "hf" and key in self.family.hf_always

    def refusal(self, value: str, only: str = "") -> UnsupportedModelError:
        """The error that files cannot describe a value of the network."""
        others = f", only with {only}" if only else ""
        name = self.family.name
        if self.side == "hf":
            return UnsupportedModelError(
                f"a folder of the family {name} cannot describe a model with {value}{others}: keep it as a GGUF file"
            )
        return UnsupportedModelError(
            f"GGUF cannot describe a {name} model with {value}{others}: keep it as a Hugging Face folder"
        )


def write_network(family: Family, config: ModelConfig, side: Side) -> dict[str, Any]:
    """The keys of a network and their values; UnsupportedModelError where files cannot describe it."""
    values = Writing(family, config, side)
    written: dict[str, Any] = {}
    for entry in _entries(values):
        written |= _written(values, entry)
    return written


def undescribed(family: Family, config: ModelConfig, side: Side) -> list[str]:
    """The places of the values that files of the family cannot describe."""
    values, found = Writing(family, config, side), []
    for entry in _entries(values):
        try:
            _written(values, entry)
        except UnsupportedModelError:
            found.append(entry.place)
    return found


def _entries(values: Writing) -> Iterator[Entry]:
    """The entries of the parts that the network has; the first one of the others, too."""
    for place, entry in values.family.table(values.side).items():
        part = place.rpartition(".")[0]
        if part not in PARTS or place == FIRST[part] or getattr(values.config, part) is not None:
            yield entry


def _written(values: Writing, entry: Entry) -> Any:
    if entry.form is not None:
        return entry.form.write(values)
    value = values[entry.place]
    default = entry.default(values) if callable(entry.default) else entry.default
    if value is None and entry.place in FIRST.values():  # the network does not have the part
        if default:
            raise values.refusal(f"no {PART_NAMES[entry.place.partition('.')[0]]}")
        return {}
    if not entry.keys:
        if entry.place.startswith("layers."):
            default = usual(entry.place.removeprefix("layers."), default, values.config.num_layers)
        if default is not REQUIRED and not is_same(value, default):
            raise values.refusal(f"{entry.place} = {shown(value)}", shown(default))
        return {}
    if entry.optional and is_same(value, default) and not values.writes(entry.written):
        return {}
    return {entry.written: value if entry.write is None else entry.write(value)}
