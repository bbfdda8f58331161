"""The differences between model families, as data and small functions over shared readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.export import NamedTensor
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Activation, Raw, decoder_from_hf, decoder_to_hf
from bifolio.model.model_file import Factors, TensorSource
from bifolio.model.next_token_names import NextTokenNames
from bifolio.model.stored_form import StoredForm
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA, TensorNames


def usual_scale(config: ModelConfig) -> float:
    return 1 / math.sqrt(config.head_dim)


def as_they_are(source: TensorSource, config: ModelConfig) -> TensorSource:
    return source


def plain_form(config: ModelConfig) -> StoredForm:
    return StoredForm()


def unchanged(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    return tensors


def own_name(config: ModelConfig) -> str:
    return config.architecture


def no_factors(config: ModelConfig, name: str) -> Factors | None:
    return None


def no_entries(config: ModelConfig) -> dict[str, Value]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family: how its Hugging Face folders and GGUF files describe a network.

    The defaults describe a decoder like Llama; a family sets only the fields in which it differs.
    """

    name: str  # `ModelConfig.architecture`

    # -- Hugging Face folders
    hf_types: tuple[str, ...]  # `model_type` in config.json; the first one is written
    hf_class: str  # class of transformers, named in config.json
    config_from_hf: Callable[[Raw, str], ModelConfig] = decoder_from_hf  # (config.json, name of the family)
    config_to_hf: Callable[[ModelConfig], dict[str, Any]] = decoder_to_hf  # without the fields common to all families
    hf_names: TensorNames = HF_LLAMA
    hf_interleaved: bool = False  # rope on neighbouring pairs
    norm_offset: float = 0.0  # added to norm weights; folders store them without the offset, GGUF files with it
    folder_source: Callable[[TensorSource, ModelConfig], TensorSource] = as_they_are  # tensors under other names
    folder_tensors: Callable[[Iterator[NamedTensor], ModelConfig], Iterator[NamedTensor]] = unchanged  # the reverse
    folder_factors: Callable[[ModelConfig, str], Factors | None] = no_factors  # of the rows of a matrix, put into it
    folder_form: Callable[[ModelConfig], StoredForm] = plain_form  # of joined rows in `folder_source`, for training
    folder_family: Callable[[ModelConfig], str] = own_name  # the family whose folders can describe the network

    # -- GGUF files
    gguf_architectures: tuple[str, ...] = ()  # `general.architecture` of files read as this family
    written_as: str | None  # `general.architecture` of written files; None: GGUF cannot describe the family
    written_with_experts: str = ""  # the same of models with experts, where it differs
    config_from_gguf: Callable[[GgufFile, Metadata, str], ModelConfig] = decoder_from_gguf
    gguf_names: TensorNames = GGUF_LLAMA
    gguf_source: Callable[[TensorSource, ModelConfig], TensorSource] = as_they_are  # as `folder_source`
    gguf_tensors: Callable[[Iterator[NamedTensor], ModelConfig], Iterator[NamedTensor]] = unchanged  # the reverse
    gguf_tiled: bool = False  # the heads of recurrent layers are in the order of `Recurrence.tiled`
    gguf_interleaved: bool = False  # query and key rows are ordered for rope on neighbouring pairs
    gguf_activation: Activation = "silu"  # implied by the architecture: GGUF has no entry for it
    gguf_window_period: int = 0  # one layer of each period has no window, unless the file says otherwise; 0: off
    gguf_entries: Callable[[ModelConfig], dict[str, Value]] = no_entries  # written under the name of the architecture
    gguf_scale: Callable[[ModelConfig], float] = usual_scale  # of attention scores, unless the file says otherwise

    # -- heads for multi-token prediction, where checkpoints ship them
    hf_next_token: NextTokenNames | None = None
    gguf_next_token: NextTokenNames | None = None

    # -- training
    fresh_config: Callable[..., ModelConfig] | None = None  # (sizes) -> configuration for training from scratch
