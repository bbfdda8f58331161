"""The tables of all families, in both directions: network -> file -> network, and wrong values under every key."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import HF_CASES

from bifolio.config import ModelConfig
from bifolio.errors import BifolioError, ConfigError, ModelFileError, UnsupportedModelError
from bifolio.model.description import Writing, undescribed
from bifolio.model.families import Family, all_families, family_of, family_of_gguf, family_of_hf
from bifolio.model.fields import FIRST, KINDS, PARTS, Entry, Side, is_same
from bifolio.model.gguf.loader import config_from_gguf
from bifolio.model.gguf.metadata import gguf_architecture, model_metadata
from bifolio.model.gguf.reader import GgufFile, TensorEntry
from bifolio.model.gguf.rope_fields import rope_tensors
from bifolio.model.huggingface.config import config_from_hf, config_to_hf
from bifolio.model.huggingface.folder_writer import folder_config
from bifolio.model.tensor_names import network_tensors
from bifolio.quant import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

FIRST_CASES = {family_of_hf(raw["model_type"]).name: raw for raw in reversed(HF_CASES.values())}
PATH = Path("m.gguf")
BY_FILE = {"architecture", "rope_interleaved", "norm_offset", "weight_factors"}  # belong to one kind of files
IN_TOKENIZER = {"bos_token_id", "eos_token_ids"}
IN_WEIGHTS = {"embedding_scale", "logit_scale"}  # of Falcon-H1
FREQUENCIES = {"scaling", "factor", "original_max_position", "high_freq_factor", "low_freq_factor", "frequency_factors",
               "attention_factor", "frequency_factors_short"}  # fmt: skip  # GGUF stores those of llama3 as divisors


class NotedError(Exception):
    """A tensor was asked for."""


class Names:
    """The tensors of a file that holds those of a network; it notes the names under which they are stored."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return "attn_qkv" not in name

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        self.shapes[name] = shape
        raise NotedError


def gguf_file(config: ModelConfig) -> GgufFile:
    """The header of the file that is written for a network; of the tensors it holds those of rope."""
    family, names, data, entries = family_of(config), Names(), bytearray(), {}
    source = family.gguf_source(names, config)
    for name, shape in network_tensors(config, family.gguf_names).items():
        with contextlib.suppress(NotedError):
            source.view(name, shape)
    for name, shape in names.shapes.items():
        entries[name] = TensorEntry(name, shape, QuantFormat.F16, 0, 0)
    for name, tensor in rope_tensors(config).items():
        entries[name] = TensorEntry(name, tensor.shape, QuantFormat.F32, len(data), tensor.nbytes)
        data += tensor.data.tobytes()
    metadata = {"general.architecture": gguf_architecture(config), **model_metadata(config, 0, "name")}
    return GgufFile(PATH, 3, 32, metadata, {}, entries, np.frombuffer(bytes(data), np.uint8), 0)


def differences(one: ModelConfig, other: ModelConfig, skipped: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    def plain(config: ModelConfig) -> dict[str, Any]:
        found = {each.name: getattr(config, each.name) for each in fields(config)}
        found |= {part: None if found[part] is None else asdict(found[part]) for part in PARTS}
        if found["recurrent"]:
            found["recurrent"]["tiled"] = False
        found["attention_scale"] = config.scale
        is_divided = any(rope.scaling == "llama3" or rope.frequency_factors for rope in (*one.ropes, *other.ropes))
        hidden = FREQUENCIES if is_divided and "frequencies" in skipped else {"original_max_position"}
        found["ropes"] = [
            {name: value for name, value in asdict(rope).items() if name not in hidden} for rope in config.ropes
        ]
        return found

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple) and isinstance(b, list | tuple):
            return len(a) == len(b) and all(map(same, a, b))
        return is_same(a, b)

    a, b = plain(one), plain(other)
    return [f"{name}: {a[name]} and {b[name]}" for name in a if name not in skipped and not same(a[name], b[name])]


@pytest.mark.parametrize("name", HF_CASES)
def test_a_network_is_the_same_after_config_json(name: str) -> None:
    config = folder_config(config_from_hf(HF_CASES[name]))
    assert differences(config, config_from_hf(config_to_hf(config))) == []


@pytest.mark.parametrize("name", HF_CASES)
def test_a_network_is_the_same_after_gguf_metadata(name: str) -> None:
    config = config_from_hf(HF_CASES[name])
    if undescribed(family_of(config), config, "gguf"):
        with pytest.raises(UnsupportedModelError, match="GGUF cannot describe"):
            model_metadata(config, 0, "name")
        return
    skipped = BY_FILE | IN_TOKENIZER | {"frequencies"}
    skipped |= IN_WEIGHTS if config.weight_factors else set()
    again = config_from_gguf(gguf_file(config))
    assert differences(config, again, skipped) == []
    architecture = family_of_gguf(gguf_architecture(config), "").name
    assert again.architecture == architecture


# -- single fields ----------------------------------------------------------------------------------------------------
def changed(config: ModelConfig, place: str) -> Iterator[ModelConfig]:
    """The network with other values of one place, as far as they are possible."""
    part, _, name = place.rpartition(".")
    owner = getattr(config, part) if part else config
    value = getattr(owner, name)
    others: list[Any] = [not value] if isinstance(value, bool) else []
    if KINDS[place] in (int, float) and isinstance(value, int | float) and not others:
        others = [value + 1, 2 * value or 3]
    for other in others:
        try:
            yield replace(config, **({part: replace(owner, **{name: other})} if part else {name: other}))
        except ConfigError:
            continue


def stored_places(family: Family, config: ModelConfig, side: Side) -> Iterator[Entry]:
    """The entries with a key of the parts that the network has."""
    for place, entry in family.table(side).items():
        part = place.rpartition(".")[0]
        if entry.keys and part != "layers" and (part not in PARTS or getattr(config, part) is not None):
            yield entry


@pytest.mark.parametrize("name", [family.name for family in all_families()])
@pytest.mark.full
def test_every_stored_value_survives_config_json(name: str) -> None:
    config = folder_config(config_from_hf(FIRST_CASES[name]))
    family, tried = family_of(config), 0
    entries = list(stored_places(family, config, "hf"))
    for number, entry in enumerate(entries):
        if entry.written in [later.written for later in entries[number + 1 :]]:
            continue  # the width of MLPs in a network of experts, which have the key
        for other in changed(config, entry.place):
            if undescribed(family, other, "hf"):
                continue
            written = config_to_hf(other)
            try:
                again = config_from_hf(written)
            except BifolioError:
                continue
            values = [Writing(family, found, "hf")[entry.place] for found in (other, again)]
            assert is_same(*values), f"{entry.place}: {values}"
            tried += 1
    assert tried > 5


@pytest.mark.parametrize("name", [family.name for family in all_families()])
def test_a_wrong_type_is_an_error_with_the_key_the_value_and_the_family(name: str) -> None:
    raw = FIRST_CASES[name]
    config = config_from_hf(raw)
    text = raw.get("text_config")
    for entry in stored_places(family_of(config), config, "hf"):
        key, family = entry.keys[0], family_of(config)
        if entry.reader is not None or key in (*family.hf_refused, *family.hf_needed):
            continue
        wrong = {key: ["x"]}
        with pytest.raises(ModelFileError, match=rf"config.json: {key} is \['x'\]: it must be .* in a {name} model"):
            config_from_hf({**raw, "text_config": {**text, **wrong}} if text else {**raw, **wrong})


@pytest.mark.parametrize("name", [family.name for family in all_families()])
@pytest.mark.full
def test_a_wrong_entry_of_a_gguf_file_is_an_error_with_its_key_and_value(name: str) -> None:
    config = config_from_hf(FIRST_CASES[name])
    family = family_of(config)
    if not family.gguf_architectures or undescribed(family, config, "gguf"):
        return
    file = gguf_file(config)
    for entry in stored_places(family, config, "gguf"):
        key = f"{gguf_architecture(config)}.{entry.keys[0]}"
        if entry.reader is not None:
            continue
        metadata: dict[str, Any] = {**file.metadata, key: ["x"]}
        with pytest.raises(ModelFileError, match=rf"{PATH}: the metadata '{re.escape(key)}' is \['x'\]: it must be"):
            config_from_gguf(replace(file, metadata=metadata))


@pytest.mark.parametrize("name", [family.name for family in all_families()])
def test_a_missing_required_field_is_named(name: str) -> None:
    raw = FIRST_CASES[name]
    text = raw.get("text_config")
    for key in ("vocab_size", "hidden_size", "num_attention_heads"):
        inner = text or raw
        if key not in inner:
            continue
        without = {field: value for field, value in inner.items() if field != key}
        with pytest.raises(ModelFileError, match=rf"config.json has no field '{key}', which a {name} model needs"):
            config_from_hf({**raw, "text_config": without} if text else without)


def test_each_part_of_a_network_is_marked_by_its_first_field() -> None:
    assert FIRST["moe"] == "moe.num_experts"
    assert FIRST.keys() == PARTS.keys()
