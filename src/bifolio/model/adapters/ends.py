"""The ends of a network in adapters: the embedding, the head, and the layers of a classifier behind it.

An adapter changes an embedding and a head as it changes other matrices, or brings matrices of its own
(`modules_to_save` of PEFT), which take the place of the base's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.kernels.interface import Linear, LowRank
from bifolio.model.adapters.delta import Changes, plain_name
from bifolio.model.adapters.layout import Side, TracedTensor
from bifolio.model.families import family_of
from bifolio.model.pooler_weights import PoolerWeights
from bifolio.quant.tensor import QuantizedTensor

USUAL = ("lm_head", "embed_tokens", "score", "classifier")  # modules that can be saved, by the last part of their names
ROWS = 4096  # that are checked at a time


class Ends(NamedTuple):
    """The tensors of the ends of a base, by their names in files of one side."""

    embedding: TracedTensor
    head: TracedTensor | None  # None: the network has none
    has_bias: bool  # of the head

    @classmethod
    def of(cls, config: ModelConfig, side: Side) -> Ends:
        family = family_of(config)
        names, shape = family.hf_names if side == "hf" else family.gguf_names, (config.vocab_size, config.hidden_size)
        rows = np.arange(config.vocab_size, dtype=np.int64)
        embedding, head = (TracedTensor(name + ".weight", shape, rows, shape) for name in (names.embedding, names.head))
        return cls(embedding, head if config.language_head else None, config.head_bias)

    def tensors(self) -> dict[str, TracedTensor]:
        return {each.name: each for each in (self.embedding, self.head) if each is not None}


@dataclass(frozen=True, slots=True)
class SavedEnds:
    """The matrices that an adapter brings."""

    embedding: QuantizedTensor | None = None
    head: QuantizedTensor | None = None
    head_bias: np.ndarray | None = None
    pooler: Mapping[int, Linear] | None = None  # of a classifier, by number of the layer

    @property
    def nbytes(self) -> int:
        own = [part.nbytes for linear in (self.pooler or {}).values() for part in linear.parts]
        return sum(each.nbytes for each in (self.embedding, self.head) if each is not None) + sum(own)

    @property
    def size(self) -> int:
        own = [part.size for linear in (self.pooler or {}).values() for part in linear.parts]
        return sum(each.size for each in (self.embedding, self.head) if each is not None) + sum(own)

    def head_parts(self) -> tuple[LowRank, ...]:
        return () if self.head is None else (LowRank(0, None, self.head, self.head_bias),)

    def embedding_parts(self) -> tuple[LowRank, ...]:
        return () if self.embedding is None else (LowRank(0, None, self.embedding),)


def saved_ends(
    changes: Changes, config: ModelConfig, pooler: PoolerWeights | None, spellings: Iterable[str], path: object
) -> SavedEnds:
    """The matrices of an adapter folder, checked against the base; `spellings`: beginnings that names can lack."""
    ends, found = Ends.of(config, "hf"), _Found(dict(changes.saved), tuple(spellings), path)
    classifier = _classifier_names(config, pooler)
    _check_modules(changes.modules, config, classifier, path)
    table = found.take(ends.embedding.name, ends.embedding.whole)
    head = bias = None
    if ends.head is not None:
        head = found.take(ends.head.name, ends.head.whole)
        if head is not None and ends.has_bias:
            bias = found.need(ends.head.name.replace(".weight", ".bias"), ends.head.whole[:1]).dequantize()
    layers = {} if pooler is None else _classifier_layers(found, pooler, classifier)
    if changes.ties and config.tie_embeddings and table is not None and head is None:
        head = table
    found.finish()
    found.check_copies(changes.copies, ends)
    own = {"embedding": table, "head": head}
    _check_complete(changes.modules, ends, own, classifier, layers, path)
    return SavedEnds(table, head, bias, layers or None)


def _classifier_names(config: ModelConfig, pooler: PoolerWeights | None) -> tuple[str, ...]:
    """The modules of the layers of a classifier; empty: the base is none."""
    layers = family_of(config).hf_head
    if pooler is None or config.language_head or len(pooler.layers) != len(layers):
        return ()
    return tuple(layer.name for layer in layers)


def _check_modules(modules: tuple[str, ...], config: ModelConfig, classifier: tuple[str, ...], path: object) -> None:
    """Raise unless each module that the file saves is one that can be saved."""
    names = family_of(config).hf_names
    ends = {*USUAL, names.embedding.rpartition(".")[2], names.head.rpartition(".")[2], *classifier}
    for module in modules:
        if module not in ends and module.rpartition(".")[2] not in ends:
            raise UnsupportedModelError(
                f"{path}: modules_to_save names {module!r}: only the head (lm_head, score, classifier) and the "
                "embedding (embed_tokens) can be saved; merge the adapter"
            )


def _check_complete(
    modules: tuple[str, ...],
    ends: Ends,
    own: Mapping[str, QuantizedTensor | None],
    classifier: tuple[str, ...],
    layers: Mapping[int, Linear],
    path: object,
) -> None:
    """Raise unless the file has the tensors of all modules of the base that it says it saves."""
    for module in modules:
        for kind, tensor in (("embedding", ends.embedding), ("head", ends.head)):
            name = "" if tensor is None else tensor.name.removesuffix(".weight")
            if name and own[kind] is None and (name == module or name.endswith("." + module)):
                raise ModelFileError(f"{path}: modules_to_save names {module!r}, but {name}.weight is missing")
        for number, name in enumerate(classifier):
            if number not in layers and (name == module or name.startswith(module + ".")):
                raise ModelFileError(f"{path}: modules_to_save names {module!r}, but {name}.weight is missing")


def _classifier_layers(found: _Found, pooler: PoolerWeights, names: tuple[str, ...]) -> dict[int, Linear]:
    layers = {}
    for number, (name, layer) in enumerate(zip(names, pooler.layers, strict=bool(names))):
        shape = layer.linear.out_features, layer.linear.in_features
        weight = found.take(name + ".weight", shape)
        if weight is not None:
            has_bias = layer.linear.biases[0] is not None
            bias = found.need(name + ".bias", shape[:1]).dequantize() if has_bias else None
            layers[number] = Linear((weight,), (bias,))
    return layers


class _Found:
    """The saved tensors of a file, taken one by one."""

    def __init__(self, tensors: dict[str, QuantizedTensor], beginnings: tuple[str, ...], path: object) -> None:
        self._tensors, self._beginnings, self._path = tensors, beginnings, path

    def _spells(self, given: str, name: str) -> bool:
        """Whether a name of the file stands for one of the base."""
        plain = plain_name(given)
        return name in (given, plain, *(start + plain for start in self._beginnings))

    def take(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor | None:
        """The tensor of a name of the base, which must fit; None: the file has none."""
        known = [each for each in self._tensors if self._spells(each, name)]
        if len(known) > 1:
            raise ModelFileError(f"{self._path}: {name!r} is saved under two names: save the adapter again")
        return checked(self._tensors.pop(known[0]), name, shape, self._path) if known else None

    def need(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        tensor = self.take(name, shape)
        if tensor is None:
            raise ModelFileError(f"{self._path}: {name} is missing beside its matrix: save the adapter again")
        return tensor

    def check_copies(self, copies: Mapping[str, tuple[int, ...]], ends: Ends) -> None:
        """Raise unless the copies of tensors of the base are of the size of this base's; they are not read."""
        for given, shape in copies.items():
            own = [tensor for name, tensor in ends.tensors().items() if self._spells(given, name)]
            if not own or own[0].whole != shape:
                wanted = f"{own[0].whole}" if own else "no such tensor"
                raise ModelFileError(
                    f"{self._path} has a copy of {given.removesuffix('.weight')!r} with the shape {shape}, and the "
                    f"base has {wanted}: use the adapter's own base"
                )

    def finish(self) -> None:
        """Raise if a tensor was not taken."""
        for name in self._tensors:
            raise UnsupportedModelError(
                f"{self._path}: {name.removesuffix('.weight')!r} is saved as a whole, and is neither the head nor the "
                "embedding of this base: use the adapter's own base, or merge it"
            )


def checked(tensor: QuantizedTensor, name: str, shape: tuple[int, ...], path: object) -> QuantizedTensor:
    """The tensor, which must have the shape of the base's and finite numbers."""
    if tuple(tensor.shape) != tuple(shape):
        raise ModelFileError(
            f"{path}: {name} has the shape {tuple(tensor.shape)} and the base has {tuple(shape)}: use the adapter's "
            "own base"
        )
    for start in range(0, tensor.num_rows, ROWS):
        if not np.isfinite(tensor.dequantize_rows(slice(start, start + ROWS))).all():
            raise ModelFileError(f"{path}: {name} has numbers that are not finite: train it again")
    return tensor
