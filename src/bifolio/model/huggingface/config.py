"""`config.json` of a Hugging Face folder ↔ `ModelConfig`, by the family of its `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bifolio.config import MODEL_LIMITS, ModelConfig
from bifolio.errors import BifolioError, ModelFileError
from bifolio.model.families import family_of, family_of_hf
from bifolio.model.huggingface.decoder_config import Raw
from bifolio.model.huggingface.json_object import shown

LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "first_k_dense_replace", "num_dense_layers", "num_nextn_predict_layers",
    "mtp_num_hidden_layers", "num_kv_shared_layers",
)  # fmt: skip


_RAISED = (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)


def config_from_hf(raw: Raw, path: Path | str = "config.json") -> ModelConfig:
    """Read the fields; a missing field or one of the wrong type raises a named error."""
    family = family_of_hf(raw.get("model_type"))

    def read(fields: Raw) -> ModelConfig:
        check_layer_counts(fields)
        return replace(family.config_from_hf(fields, family.name), rope_interleaved=family.hf_interleaved)

    try:
        return read(raw)
    except _RAISED as error:
        if isinstance(error, BifolioError):
            raise
        if isinstance(error, KeyError) and _failure(read, {**raw, error.args[0]: 1}) != repr(error):
            raise ModelFileError(f"{path} has no field {error}: fetch the whole model again") from error
        field = _faulty_field(raw, read, error)
        place = "is not usable" if field is None else f"has {field}, which is not usable"
        raise ModelFileError(f"{path} {place}: {type(error).__name__}: {error}") from error


def _failure(read: Callable[[Raw], object], fields: Raw) -> str:
    try:
        read(fields)
    except _RAISED as error:
        return repr(error)
    return ""


def _faulty_field(raw: Raw, read: Callable[[Raw], object], error: Exception) -> str | None:
    """The field, with its value, without which reading fails in another way or not at all."""
    for name, value in raw.items():
        found = _failure(read, {other: item for other, item in raw.items() if other != name})
        if found == repr(KeyError(name)):  # a required field
            found = _failure(read, {**raw, name: 1})
        if found == repr(error):
            continue
        inner = None
        if isinstance(value, dict):
            inner = _faulty_field(value, lambda fields, name=name: read({**raw, name: fields}), error)  # type: ignore[misc]
        return f"{name} = {shown(value)}" if inner is None else f"{name}.{inner}"
    return None


def check_layer_counts(raw: Raw) -> None:
    """Refuse numbers of layers before lists of so many entries are made."""
    text = raw.get("text_config")
    for fields in (raw, text if isinstance(text, dict) else {}):
        for name in LAYER_COUNTS:
            if int(fields.get(name) or 1) > MODEL_LIMITS["num_layers"]:
                raise ModelFileError(f"config.json has {name} = {shown(fields[name])}, more layers than any real model")


def config_to_hf(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """Build a `config.json` from which transformers and `config_from_hf` read the same network."""
    family = family_of(config)
    eos = list(config.eos_token_ids)
    return {
        "architectures": [family.hf_class],
        "model_type": family.hf_types[0],
        "vocab_size": config.vocab_size,
        **family.config_to_hf(config),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
    }
