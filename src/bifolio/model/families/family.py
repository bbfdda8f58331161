"""The differences between model families, as data and small functions over shared readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.decoder_fields import DECODER
from bifolio.model.export import NamedTensor
from bifolio.model.fields import Field, Side, Table, constants, table
from bifolio.model.model_file import Factors, TensorSource
from bifolio.model.next_token_names import NextTokenNames
from bifolio.model.stored_form import StoredForm
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA, TensorNames
from bifolio.model.weights import ModelWeights


def as_they_are(source: TensorSource, config: ModelConfig) -> TensorSource:
    return source


def plain_form(config: ModelConfig) -> StoredForm:
    return StoredForm()


def unchanged(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    return tensors


def own_name(config: ModelConfig) -> str:
    return config.architecture


def no_entries(weights: ModelWeights) -> Mapping[str, Any]:
    return {}


def no_factors(config: ModelConfig, name: str) -> Factors | None:
    return None


def fresh_decoder(architecture: str, *, hidden_size: int, num_heads: int, **fields: Any) -> ModelConfig:
    """A network for training from scratch."""
    head_dim = hidden_size // num_heads
    usual = {"head_dim": head_dim, "tie_embeddings": True, "ropes": (RopeConfig(10000.0, head_dim),)}
    return ModelConfig(architecture, hidden_size=hidden_size, num_heads=num_heads, **{**usual, **fields})


class HeadLayer(NamedTuple):
    """A layer between the pooled hidden state and the scores of a classifier."""

    name: str
    activation: str = ""
    norm: str = ""
    bias: bool = True


OF_DECODERS = (HeadLayer("score", bias=False),)  # over the last token


def nothing() -> Any:
    """The default of a table."""
    return field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family: how its Hugging Face folders and GGUF files describe a network.

    The defaults describe a decoder like Llama; a family sets only the fields in which it differs. Places are those of
    `model.fields`.
    """

    name: str  # `ModelConfig.architecture`

    # -- the network
    network: Mapping[str, Any] = nothing()  # values of all networks of the family, by place
    fields: tuple[Field, ...] = ()  # that differ from those of Llama (`decoder_fields.DECODER`)
    window_period: int = 0  # one layer of each period has no window, unless the file says otherwise; 0: off

    # -- Hugging Face folders
    hf_types: tuple[str, ...]  # `model_type` in config.json; the first one is written
    hf_variant: Callable[[Mapping[str, Any]], str] | None = None  # the type that config.json means by one of them
    hf_class: str  # class of transformers, named in config.json
    hf_defaults: Mapping[str, Any] = nothing()  # of fields that config.json leaves out, as in the class of transformers
    hf_type_defaults: Mapping[str, Mapping[str, Any]] = nothing()  # the same of single `hf_types`
    hf_implied: Mapping[str, Any] = nothing()  # values by place that folders do not store
    hf_always: tuple[str, ...] = ()  # optional fields of config.json that are written also with their defaults
    hf_written: Mapping[str, Any] = nothing()  # fields that are written and not read
    hf_needed: Mapping[str, Any] = nothing()  # fields that have these values, or none
    hf_refused: Mapping[str, str] = nothing()  # fields that are not supported, and the reason
    hf_text_part: bool = False  # config.json may describe a model of text and images, whose text part is the model
    hf_names: TensorNames = HF_LLAMA
    hf_modules: Mapping[str, str] = nothing()  # parts of names in transformers, and in folders where these differ
    hf_interleaved: bool = False  # rope on neighbouring pairs
    norm_offset: float = 0.0  # added to norm weights; folders store them without the offset, GGUF files with it
    folder_source: Callable[[TensorSource, ModelConfig], TensorSource] = as_they_are  # tensors under other names
    folder_tensors: Callable[[Iterator[NamedTensor], ModelConfig], Iterator[NamedTensor]] = unchanged  # the reverse
    folder_factors: Callable[[ModelConfig, str], Factors | None] = no_factors  # of the rows of a matrix, put into it
    folder_form: Callable[[ModelConfig], StoredForm] = plain_form  # of joined rows in `folder_source`, for training
    folder_family: Callable[[ModelConfig], str] = own_name  # the family whose folders can describe the network

    hf_head: tuple[HeadLayer, ...] = OF_DECODERS  # of folders for classification of sequences

    # -- GGUF files
    gguf_architectures: tuple[str, ...] = ()  # `general.architecture` of files read as this family
    written_as: str = ""  # `general.architecture` of written files; the first of those that are read, if there is one
    written_with_experts: str = ""  # the same of models with experts, where it differs
    written_both_ways: str = ""  # the same of models whose tokens see those after them, where it differs
    gguf_implied: Mapping[str, Any] = nothing()  # values by place that the architecture implies
    gguf_written: Mapping[str, Any] = nothing()  # entries that are written and not read
    gguf_needed: Mapping[str, Any] = nothing()  # keys with a point that have these values, or none
    gguf_refused: Mapping[str, str] = nothing()  # keys with a point, and tensors, with the reason
    gguf_names: TensorNames = GGUF_LLAMA
    gguf_source: Callable[[TensorSource, ModelConfig], TensorSource] = as_they_are  # as `folder_source`
    gguf_tensors: Callable[[Iterator[NamedTensor], ModelConfig], Iterator[NamedTensor]] = unchanged  # the reverse
    gguf_entries: Callable[[ModelWeights], Mapping[str, Any]] = no_entries  # that the weights give, with whole keys
    gguf_tiled: bool = False  # the heads of recurrent layers are in the order of `Recurrence.tiled`
    gguf_interleaved: bool = False  # query and key rows are ordered for rope on neighbouring pairs

    # -- heads for multi-token prediction, where checkpoints ship them
    hf_next_token: NextTokenNames | None = None
    gguf_next_token: NextTokenNames | None = None

    # -- training
    fresh_config: Callable[..., ModelConfig] | None = None  # (sizes) -> configuration for training from scratch

    _tables: dict[Side, Table] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.written_as and self.gguf_architectures:
            object.__setattr__(self, "written_as", self.gguf_architectures[0])

    def table(self, side: Side) -> Table:
        """The fields in one kind of files; made when it is first read, since a process reads few families."""
        if (found := self._tables.get(side)) is None:
            implied = self.hf_implied if side == "hf" else self.gguf_implied
            found = self._tables[side] = table(side, DECODER, constants(self.network), self.fields, constants(implied))
        return found
