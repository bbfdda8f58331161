"""`config.json` of a Hugging Face folder ↔ `ModelConfig`, by the table of the family of its `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bifolio.config import MODEL_LIMITS, ModelConfig
from bifolio.errors import ConfigError, ModelFileError, UnsupportedModelError
from bifolio.model.description import read_network, write_network
from bifolio.model.families import Family, family_of, family_of_folder
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.plain_values import is_number, shown

Raw = Mapping[str, Any]
LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "first_k_dense_replace", "num_dense_layers", "num_nextn_predict_layers",
    "mtp_num_hidden_layers", "num_kv_shared_layers",
)  # fmt: skip


def config_from_hf(raw: Raw, path: Path | str = "config.json") -> ModelConfig:
    """Read the fields; a missing field or one of the wrong type or value raises a named error."""
    family = family_of_folder(raw)
    _check_layer_counts(raw, path)
    if family.hf_text_part:
        raw = _text_part(raw)
        _check_layer_counts(raw, path)
    usual = {**family.hf_defaults, **family.hf_type_defaults.get(str(raw.get("model_type")), {})}
    json = JsonObject({**usual, **raw}, path, family=family.name)
    _check_support(family, json)
    try:
        return read_network(family, json)
    except ConfigError as error:
        raise ModelFileError(f"{path}: {error}") from error


def _text_part(raw: Raw) -> Raw:
    """The description of the text part of a model of text and images, with the fields that only the whole names."""
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping) or not inner:
        return raw
    outer = {name: raw[name] for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id") if name in raw}
    return {**outer, **inner}


def _check_layer_counts(raw: Raw, path: Path | str) -> None:
    """Refuse numbers of layers before lists of that many entries are made."""
    for field in LAYER_COUNTS:
        if is_number(raw.get(field)) and raw[field] > MODEL_LIMITS["num_layers"]:
            raise ModelFileError(f"{path} has {field} = {shown(raw[field])}, more layers than any real model")


def _check_support(family: Family, json: JsonObject) -> None:
    for field, reason in family.hf_refused.items():
        if json.get(field):
            raise UnsupportedModelError(f"{json.path}: {field} is {shown(json.get(field))}: {reason}")
    for field, needed in family.hf_needed.items():
        found = json.get(field)
        if any(value not in (None, needed) for value in (found if isinstance(found, list) else [found])):
            raise UnsupportedModelError(
                f"{json.path}: {field} is {shown(found)}: {family.name} models are supported with {needed!r} only"
            )


def config_to_hf(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Build a `config.json` from which transformers and `config_from_hf` read the same network."""
    family = family_of(config)
    named = {"architectures": [family.hf_class], "model_type": family.hf_types[0]}
    return {**named, **family.hf_written, **write_network(family, config, "hf"), "torch_dtype": dtype}
