"""RoBERTa and XLM-R (bge-m3, bge-reranker-v2-m3, multilingual-e5): BERT whose positions begin behind the padding's."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from bifolio.model.encoders import bert
from bifolio.model.encoders.shared import BERT, SIZES, TOKEN_TYPES, padded_positions
from bifolio.model.families.family import Family, HeadLayer
from bifolio.model.tensor_names import TensorNames


def renamed(names: TensorNames, old: str, new: str) -> TensorNames:
    """The names with another name of the base model."""
    values = {each.name: getattr(names, each.name) for each in fields(names)}
    changed: dict[str, Any] = {
        name: new + value.removeprefix(old)
        for name, value in values.items()
        if isinstance(value, str) and value.startswith(old)
    }
    return replace(names, **changed)


FAMILY = Family(
    name="roberta",
    network=BERT,
    fields=(*SIZES, TOKEN_TYPES, *padded_positions(1)),
    hf_types=("roberta", "xlm-roberta", "camembert"),
    hf_class="RobertaModel",
    hf_defaults={"hidden_act": "gelu", "type_vocab_size": 2},
    hf_needed={"position_embedding_type": "absolute"},
    hf_refused={"is_decoder": "a RoBERTa that generates text is not supported"},
    hf_names=renamed(bert.NAMES, "bert.", "roberta."),
    hf_head=(HeadLayer("classifier.dense", "tanh"), HeadLayer("classifier.out_proj")),
    written_as="bert",
    gguf_implied=bert.FAMILY.gguf_implied,
    gguf_names=bert.GGUF_NAMES,
)
