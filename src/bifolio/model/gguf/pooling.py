"""Pooling in GGUF files: `pooling_type`, and the head of a reranker or classifier.

cls         a dense layer with an activation, and in some families a norm
cls.output  the scores
"""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.config import HeadConfig, ModelConfig, PoolingConfig
from bifolio.config.pooling import MOST_LABELS, PoolingKind
from bifolio.errors import UnsupportedModelError
from bifolio.kernels.interface import Linear, Norm
from bifolio.model.export import NamedTensor, linear_tensors, norm_tensors
from bifolio.model.fetch import Fetch, FetchVector
from bifolio.model.gguf.header import Header
from bifolio.model.gguf.reader import Value
from bifolio.model.pooler_weights import PoolerLayer, PoolerWeights
from bifolio.text.pairs import PairTemplate

KINDS: dict[int, PoolingKind] = {0: "mean", 1: "mean", 2: "cls", 3: "last"}
RANK = 4
DENSE, OUTPUT, NORM = "cls", "cls.output", "cls.norm"
RERANK_TEMPLATE, QUERY, DOCUMENT = "tokenizer.chat_template.rerank", "{query}", "{document}"
ANSWER = "yes"  # the label of a reranker that answers with a word


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """The tensors of a head that a file has."""

    dense: bool  # a layer before the scores
    output: str
    biased: frozenset[str]  # layers and norms with a bias
    normed: bool

    def weights(self, network: ModelConfig, num_labels: int, fetch: Fetch, vector: FetchVector) -> PoolerWeights:
        size = network.hidden_size

        def bias(name: str, rows: int) -> object:
            return vector(name + ".bias", (rows,)) if name in self.biased else None

        layers = []
        if self.dense:
            dense = Linear((fetch(DENSE + ".weight", (size, size)),), (bias(DENSE, size),))
            norm = None
            if self.normed:
                weight = vector(NORM + ".weight", (size,))
                norm = Norm(weight, bias(NORM, size), network.norm_eps, network.norm == "layer")
            layers.append(PoolerLayer(dense, "gelu" if self.normed else "tanh", norm))
        output = fetch(self.output + ".weight", (num_labels, size))
        layers.append(PoolerLayer(Linear((output,), (bias(self.output, num_labels),))))
        return PoolerWeights(tuple(layers))


def pooling_entries(pooling: PoolingConfig) -> dict[str, Value]:
    """The entries that `read_pooling` reads, without the name of the architecture."""
    if pooling.head is None:
        return {"pooling_type": next((number for number, kind in KINDS.items() if kind == pooling.kind and number), 0)}
    return {"pooling_type": RANK, "classifier.output_labels": list(pooling.head.labels)}


def template_entries(template: PairTemplate | None) -> dict[str, Value]:
    """The text around a query and a document."""
    return {} if template is None else {RERANK_TEMPLATE: template.filled(QUERY, DOCUMENT)}


def head_tensors(pooling: PoolingConfig, pooler: PoolerWeights | None) -> list[NamedTensor]:
    """The tensors of a head; UnsupportedModelError for one that files cannot describe."""
    if pooler is None:
        return []
    *dense, last = pooler.layers
    is_known = pooling.head is not None and len(dense) <= 1 and last.norm is None and not last.activation
    for layer in dense:
        normed = layer.norm is not None
        is_known &= (layer.activation, pooling.kind) == (("gelu", "mean") if normed else ("tanh", "cls"))
    if not is_known:
        raise UnsupportedModelError(
            "GGUF files cannot describe the dense layers behind the pooling of this model: use its folder, whose "
            "matrices --quantization q8_0 rounds while it is loaded"
        )
    found = [part for layer in dense for part in linear_tensors(DENSE, layer.linear)]
    found += [part for layer in dense for part in norm_tensors(NORM, layer.norm)]
    return [*found, *linear_tensors(OUTPUT, last.linear)]


def read_pooling(header: Header, network: ModelConfig) -> tuple[PoolingConfig, HeadTensors | None]:
    """Pooling as the file describes it; without a `pooling_type` states are averaged."""
    number = header.count(".pooling_type", 1)
    if number != RANK:
        if number not in KINDS:
            raise UnsupportedModelError(f"{header.path}: pooling_type {number} is not supported")
        return PoolingConfig(KINDS[number]), None
    tensors = _head_tensors(header)
    kind: PoolingKind = "mean" if tensors.normed else "cls"
    head = _head(header, header.shape(tensors.output + ".weight")[0])
    template = header.get(RERANK_TEMPLATE)
    pair = PairTemplate.of_text(template, QUERY, DOCUMENT) if isinstance(template, str) else None
    return PoolingConfig(kind if network.bidirectional else "last", head=head, pair_template=pair), tensors


def _head_tensors(header: Header) -> HeadTensors:
    has = header.has_tensor
    output = OUTPUT if has(OUTPUT + ".weight") else DENSE
    if not has(output + ".weight"):
        raise header.fail("the file pools by rank and has no tensor 'cls.output.weight': convert the model again")
    biased = frozenset(name for name in (DENSE, OUTPUT, NORM) if has(name + ".bias"))
    return HeadTensors(output == OUTPUT and has(DENSE + ".weight"), output, biased, has(NORM + ".weight"))


def _head(header: Header, count: int) -> HeadConfig:
    if not 0 < count <= MOST_LABELS:
        raise header.fail(f"the head has {count} labels, and between 1 and {MOST_LABELS} are supported")
    labels = tuple(header.strings(".classifier.output_labels") or (f"LABEL_{i}" for i in range(count)))
    if len(labels) != count:
        raise header.fail(f"the head has {count} scores and {len(labels)} labels: convert the model again")
    if count == 1:
        return HeadConfig(labels, "sigmoid", 0)
    return HeadConfig(labels, "softmax", labels.index(ANSWER) if ANSWER in labels else None)
