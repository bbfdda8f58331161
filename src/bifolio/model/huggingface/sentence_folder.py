"""The part of a folder behind the network: pooling and dense modules of sentence-transformers, or a classifier.

modules.json                         the chain: a transformer, pooling, dense layers, normalisation
1_Pooling/config.json                first token, mean or last token
2_Dense/                             a layer with an activation: config.json and model.safetensors
sentence_bert_config.json            the most tokens of a text
1_LogitScore/config.json             tokens of the answers of a reranker, whose logits are compared
config_sentence_transformers.json    prompts by name, and the activation of scores
config.json                          labels, if the class of the model is one for classification of sequences
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bifolio.config import HeadConfig, ModelConfig, PoolingConfig
from bifolio.config.pooling import MOST_LABELS, PoolingKind, ScoreActivation
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.kernels.interface import Linear, Norm
from bifolio.model.families import family_of
from bifolio.model.families.family import OF_DECODERS, Family
from bifolio.model.fetch import Fetch, FetchVector
from bifolio.model.huggingface.json_file import read_json_value
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.huggingface.named_rerankers import NamedReranker, named_reranker
from bifolio.model.huggingface.safetensors_file import open_safetensors
from bifolio.model.pooler_weights import PoolerLayer, PoolerWeights
from bifolio.quant.tensor import QuantizedTensor
from bifolio.text.tokenizer import Tokenizer

CLASSIFIER = "ForSequenceClassification"
MODES: dict[str, PoolingKind] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "GELU": "gelu", "SiLU": "silu"}  # classes of torch
SCORE_ACTIVATIONS: dict[str, ScoreActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
MOST_FEATURES = 1 << 18
ANSWER = HeadConfig(("yes",), "sigmoid", 0)  # of rerankers that answer with a token


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense module of a folder."""

    path: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


class Compared(NamedTuple):
    """The tokens of the two answers of a reranker, whose score is the difference of their logits."""

    positive: int
    negative: int | None  # None: the score is the logit of the positive one


@dataclass(frozen=True, slots=True)
class FolderPooling:
    """Pooling as a folder describes it, and how its weights are read."""

    config: PoolingConfig
    dense: tuple[Dense, ...] = ()
    compared: Callable[[], Compared] | None = None  # of rerankers that answer with a token

    def weights(self, network: ModelConfig, family: Family, fetch: Fetch, vector: FetchVector) -> PoolerWeights | None:
        """The layers between pooled hidden states and the result; None: there are none."""
        layers = [_dense_layer(dense) for dense in self.dense]
        if self.compared is not None:
            table = fetch(_head_name(network, family) + ".weight", (network.vocab_size, network.hidden_size))
            layers.append(_comparison(table, self.compared()))
        elif self.config.head is not None:
            layers += _classifier(network, family, len(self.config.head.labels), fetch, vector)
        return PoolerWeights(tuple(layers)) if layers else None


def read_pooling(
    folder: Path, raw: Mapping[str, Any], network: ModelConfig, tokenizer: Callable[[], Tokenizer] | None
) -> FolderPooling:
    """Read the modules of the folder, or the head of a classifier."""
    path, length = folder / "modules.json", _max_length(folder)
    modules = _modules(path) if path.is_file() else []
    if any(_kind(module) != "Transformer" for module in modules):
        return _read_modules(folder, path, modules, network, length)
    if is_classifier(raw):
        prompts, default = _prompts(folder)
        config = _classifier_config(JsonObject(raw, folder / "config.json"), folder, network, length)
        return FolderPooling(replace(config, prompts=prompts, default_prompt=default))
    named = named_reranker(folder) if network.language_head and tokenizer is not None else None
    if named is not None and tokenizer is not None:
        config = PoolingConfig("last", head=ANSWER, max_length=length, pair_template=named.template)
        return FolderPooling(config, compared=partial(_answers, named, tokenizer))
    return FolderPooling(PoolingConfig(max_length=length))


def is_classifier(raw: Mapping[str, Any]) -> bool:
    """Whether config.json names a class for classification of sequences."""
    classes = raw.get("architectures")
    return isinstance(classes, list) and bool(classes) and str(classes[0]).endswith(CLASSIFIER)


def without_language_head(
    network: ModelConfig, raw: Mapping[str, Any], folder: Path, has: Callable[[str], bool]
) -> ModelConfig:
    """The network of a folder; a classifier has no logits of a next token, nor has a model saved without its head.

    `has`: whether the folder has a tensor of a name.
    """
    if not network.language_head:
        return network
    is_saved = network.tie_embeddings or has(family_of(network).hf_names.head + ".weight")
    is_headless = not is_saved and (folder / "modules.json").is_file()
    return replace(network, language_head=False) if is_headless or is_classifier(raw) else network


# -- sentence-transformers --------------------------------------------------------------------------------------------
def _read_modules(
    folder: Path, path: Path, modules: Sequence[JsonObject], network: ModelConfig, length: int | None
) -> FolderPooling:
    kind: PoolingKind = "none"
    normalize, dense, compared = False, [], None
    for module in modules:
        name, place = _kind(module), _inside(folder, module.text("path", ""), path)
        if name == "Pooling":
            kind = _pooling_kind(_object(place / "config.json"))
        elif name == "Dense":
            dense.append(_dense(place))
        elif name == "Normalize":
            normalize = True
        elif name == "LogitScore":
            compared = _compared(_object(place / "config.json", needed=True), network)
        elif name != "Transformer":
            raise UnsupportedModelError(
                f"{path} names a module {module.text('type')!r}: Transformer, Pooling, Dense, Normalize and LogitScore "
                "are supported"
            )
    prompts, default = _prompts(folder)
    if compared is not None:
        head = replace(ANSWER, activation=_own_activation(folder) or ANSWER.activation)
        config = PoolingConfig("last", head=head, prompts=prompts, default_prompt=default, max_length=length)
        return FolderPooling(config, compared=partial(Compared, *compared))
    sizes = [network.hidden_size, *(each.out_features for each in dense)]
    for before, each in zip(sizes, dense, strict=False):
        if each.in_features != before:
            raise ModelFileError(f"{each.path} takes {each.in_features} values where {before} come before it")
    config = PoolingConfig(
        kind, normalize, None, prompts, default, length, _object(folder / "sentence_bert_config.json").flag(
            "do_lower_case", False), sizes[-1] if dense else 0,
    )  # fmt: skip
    return FolderPooling(config, tuple(dense))


def _kind(module: JsonObject) -> str:
    return module.text("type").rpartition(".")[2]


def _modules(path: Path) -> list[JsonObject]:
    found = _read(path)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ModelFileError(f"{path} must hold a list of objects")
    return [JsonObject(each, path) for each in found]


def _inside(folder: Path, name: str, path: Path) -> Path:
    if name and Path(name).name != name:
        raise ModelFileError(f"{path} names a place outside the folder")
    return folder / name


def _pooling_kind(found: JsonObject) -> PoolingKind:
    prefix = "pooling_mode_"
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    chosen = [flag.removesuffix("_token").removesuffix("_tokens") for flag in flags if found.flag(prefix + flag, False)]
    mode = found.get("pooling_mode")
    if not chosen and mode is not None:
        chosen = [mode] if isinstance(mode, str) else list(mode)
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise UnsupportedModelError(
            f"{found.path} pools by {' and '.join(map(str, chosen)) or 'nothing'}: one of {', '.join(MODES)} is needed"
        )
    if not found.flag("include_prompt", True):
        raise UnsupportedModelError(f"{found.path} leaves prompts out of the pooling, which is not supported")
    return MODES[chosen[0]]


def _dense(place: Path) -> Dense:
    found = _object(place / "config.json", needed=True)
    name = found.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"{found.path} has the activation {name}: {', '.join(ACTIVATIONS)} are supported")
    inputs, outputs = (found.count(key, most=MOST_FEATURES) for key in ("in_features", "out_features"))
    return Dense(place, inputs, outputs, found.flag("bias", True), ACTIVATIONS[name])


def _dense_layer(dense: Dense) -> PoolerLayer:
    path = dense.path / "model.safetensors"
    if not path.is_file():
        raise ModelFileError(f"{path} is missing: save the model with safe_serialization=True")
    tensors = open_safetensors(path).tensors
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (dense.out_features, dense.in_features)}
    expected |= {"linear.bias": (dense.out_features,)} if dense.bias else {}
    for name, shape in expected.items():
        if name not in tensors or tensors[name].shape != shape:
            raise ModelFileError(f"{path} has no tensor {name!r} of shape {shape}: the files do not belong together")
    bias = tensors["linear.bias"].dequantize() if dense.bias else None
    return PoolerLayer(Linear((tensors["linear.weight"],), (bias,)), dense.activation)


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    found = _object(folder / "config_sentence_transformers.json")
    prompts = found.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise found.wrong("prompts", "an object of texts")
    default = found.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise found.wrong("default_prompt_name", "one of the prompts, or null")
    return prompts, default


def _max_length(folder: Path) -> int | None:
    found = _object(folder / "sentence_bert_config.json")
    return None if found.get("max_seq_length") is None else found.count("max_seq_length")


# -- rerankers that answer with a token -------------------------------------------------------------------------------
def _compared(found: JsonObject, network: ModelConfig) -> Compared:
    """The tokens of a LogitScore module."""
    tokens = [found.count("true_token_id", least=0)]
    tokens += [] if found.get("false_token_id") is None else [found.count("false_token_id", least=0)]
    if max(tokens) >= network.vocab_size:
        raise found.wrong("true_token_id", "a token of the vocabulary, as false_token_id")
    if not network.language_head:
        raise ModelFileError(f"{found.path} compares logits, which the network does not have")
    return Compared(tokens[0], tokens[1] if len(tokens) > 1 else None)


def _answers(named: NamedReranker, tokenizer: Callable[[], Tokenizer]) -> Compared:
    """The tokens of a reranker that is known by its name."""
    own = tokenizer()
    positive, negative = own.token_id(named.positive), own.token_id(named.negative)
    if positive is None or negative is None:
        raise ModelFileError(
            f"the vocabulary of this reranker has no tokens {named.positive!r} and {named.negative!r}: fetch the whole "
            "model again, or give its folder another name if it is none"
        )
    return Compared(positive, negative)


def _comparison(table: QuantizedTensor, tokens: Compared) -> PoolerLayer:
    """The difference of two logits as one row of a matrix."""
    rows = table.select_rows(np.array([token for token in tokens if token is not None])).dequantize()
    row = rows[:1] - rows[1:] if len(rows) > 1 else rows
    return PoolerLayer(Linear((QuantizedTensor.from_array(np.ascontiguousarray(row)),), (None,)))


# -- classifiers ------------------------------------------------------------------------------------------------------
def _classifier_config(raw: JsonObject, folder: Path, network: ModelConfig, length: int | None) -> PoolingConfig:
    names = raw.get("id2label")
    count = len(names) if isinstance(names, dict) and names else raw.count("num_labels", 2, most=MOST_LABELS)
    labels = tuple(
        str(names.get(str(i), f"LABEL_{i}")) if isinstance(names, dict) else f"LABEL_{i}" for i in range(count)
    )
    kind: PoolingKind = "last" if family_of(network).hf_head == OF_DECODERS else "cls"
    if raw.get("classifier_pooling") is not None:
        kind = "mean" if raw.text("classifier_pooling") == "mean" else "cls"
    activation = _own_activation(folder) or _score_activation(raw, count)
    head = HeadConfig(labels, activation, 0 if count == 1 else None)
    return PoolingConfig(kind, head=head, max_length=length)


def _score_activation(raw: JsonObject, num_labels: int) -> ScoreActivation:
    """As sentence-transformers: of one label a sigmoid, unless config.json names another function."""
    own = raw.object("sentence_transformers").get("activation_fn") or raw.get("sbert_ce_default_activation_function")
    if own is not None:
        return _known_activation(str(own), raw.path)
    if raw.get("problem_type") == "regression":
        return "none"
    return "sigmoid" if num_labels == 1 or raw.get("problem_type") == "multi_label_classification" else "softmax"


def _own_activation(folder: Path) -> ScoreActivation | None:
    """The activation of scores in the configuration of sentence-transformers."""
    found = _object(folder / "config_sentence_transformers.json")
    return None if found.get("activation_fn") is None else _known_activation(found.text("activation_fn"), found.path)


def _known_activation(function: str, path: Path | str) -> ScoreActivation:
    name = function.rpartition(".")[2]
    if name not in SCORE_ACTIVATIONS:
        raise UnsupportedModelError(f"{path} names the activation {name}: {', '.join(SCORE_ACTIVATIONS)} are supported")
    return SCORE_ACTIVATIONS[name]


def _classifier(
    network: ModelConfig, family: Family, num_labels: int, fetch: Fetch, vector: FetchVector
) -> list[PoolerLayer]:
    layers = []
    for number, layer in enumerate(family.hf_head, start=1):
        rows = num_labels if number == len(family.hf_head) else network.hidden_size
        bias = vector(layer.name + ".bias", (rows,)) if layer.bias else None
        linear = Linear((fetch(layer.name + ".weight", (rows, network.hidden_size)),), (bias,))
        norm = None
        if layer.norm:
            shift = vector(layer.norm + ".bias", (rows,)) if network.norm_bias else None
            norm = Norm(vector(layer.norm + ".weight", (rows,)), shift, network.norm_eps, network.norm == "layer")
        layers.append(PoolerLayer(linear, layer.activation, norm))
    return layers


def _head_name(network: ModelConfig, family: Family) -> str:
    return family.hf_names.embedding if network.tie_embeddings else family.hf_names.head


def _object(path: Path, needed: bool = False) -> JsonObject:
    found = _read(path) if needed or path.is_file() else {}
    if not isinstance(found, dict):
        raise ModelFileError(f"{path} must hold a JSON object")
    return JsonObject(found, path)


def _read(path: Path) -> Any:
    return read_json_value(path)
