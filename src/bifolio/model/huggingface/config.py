"""`config.json` of a Hugging Face folder ↔ `ModelConfig`, by the family of its `model_type`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import MODEL_LIMITS, ModelConfig
from bifolio.errors import ConfigError, ModelFileError
from bifolio.model.families import family_of, family_of_hf
from bifolio.model.huggingface.decoder_config import Raw

LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "first_k_dense_replace", "num_dense_layers", "num_nextn_predict_layers",
    "mtp_num_hidden_layers", "num_kv_shared_layers",
)  # fmt: skip


def config_from_hf(raw: Raw) -> ModelConfig:
    """Read the fields; a missing field or one of the wrong type raises a named error."""
    family = family_of_hf(raw.get("model_type"))
    try:
        check_layer_counts(raw)
        return replace(family.config_from_hf(raw, family.name), rope_interleaved=family.hf_interleaved)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, ConfigError | ModelFileError):
            raise
        raise ModelFileError(f"config.json is not usable: {type(error).__name__}: {error}") from error


def check_layer_counts(raw: Raw) -> None:
    """Refuse numbers of layers before lists of so many entries are made."""
    text = raw.get("text_config")
    for fields in (raw, text if isinstance(text, dict) else {}):
        for name in LAYER_COUNTS:
            if int(fields.get(name) or 1) > MODEL_LIMITS["num_layers"]:
                raise ModelFileError(f"config.json has {name} = {fields[name]}, more layers than any real model")


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
