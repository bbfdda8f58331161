"""Small random encoders written by transformers, with a WordPiece tokenizer and the modules of sentence-transformers.

The oracle is the model of transformers itself, one text at a time and without padding, pooled here by its definition.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from helpers import fresh_folder

WORDS = (
    "a",
    "the",
    "fox",
    "dog",
    "sees",
    "runs",
    "who",
    "what",
    "red",
    "blue",
    "house",
    "is",
    "in",
    "of",
    "##s",
    "##ing",
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY = (*SPECIAL, *WORDS, *(chr(code) for code in range(97, 123)), *(f"##{chr(c)}" for c in range(97, 123)))
TEXTS = (
    "the fox",
    "a red dog sees the blue house",
    "who",
    "what is in the house of the red fox running running running running runs",
    "blue dogs",
)


class Encoder(NamedTuple):
    """A family of encoders: the class of transformers, and the fields of its small configuration."""

    config: str
    fields: dict[str, Any]
    model: str = ""  # the class of the base model, where AutoModel does not find it


SIZES = {"vocab_size": len(VOCABULARY), "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
         "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.15,
         "pad_token_id": 0}  # fmt: skip
ENCODERS: dict[str, Encoder] = {
    "bert": Encoder("BertConfig", {"type_vocab_size": 2}),
    "roberta": Encoder("RobertaConfig", {"type_vocab_size": 1}),
    "xlm-roberta": Encoder("XLMRobertaConfig", {"type_vocab_size": 1}),
    "mpnet": Encoder("MPNetConfig", {"pad_token_id": 1}),
    "modernbert": Encoder(
        "ModernBertConfig",
        {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
    ),
    "nomicbert": Encoder("NomicBertConfig", {"type_vocab_size": 2, "intermediate_size": 64}),
    "embeddinggemma": Encoder(
        "Gemma3TextConfig",
        {
            "use_bidirectional_attention": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
        },
    ),
}


def word_pieces() -> Any:
    """A WordPiece tokenizer as BERT's: [CLS] a [SEP] b [SEP], of types 0 and 1."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    tokenizer = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


@cache
def encoder_model(name: str, head: str = "", **overrides: Any) -> tuple[Any, Path]:
    """A model of transformers with random weights, and its folder; `head`: "SequenceClassification"."""
    import torch
    import transformers

    row = ENCODERS[name]
    torch.manual_seed(3)
    if not hasattr(transformers, row.config):
        pytest.skip(f"this version of transformers knows no {name}")
    config = getattr(transformers, row.config)(**{**SIZES, **row.fields, **overrides})
    written = config.to_dict()
    if any(written[key] != value for key, value in row.fields.items() if key == "sliding_window"):
        pytest.skip("this version of transformers writes another window than it reads")
    kind = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # norms and biases begin as ones and zeros: a forgotten one must be visible
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    folder = fresh_folder(name)
    model.save_pretrained(folder)
    word_pieces().save(str(folder / "tokenizer.json"))
    return model, folder


def add_modules(folder: Path, mode: str, *, normalize: bool = True, max_length: int | None = None) -> None:
    """Describe pooling as sentence-transformers does."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * normalize
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    chosen = (mode, f"{mode}_token", f"{mode}_tokens")
    pooling = {"word_embedding_dimension": 48} | {f"pooling_mode_{flag}": flag in chosen for flag in flags}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))


def oracle_states(model: Any, token_ids: Sequence[int], types: Sequence[int] | None = None) -> np.ndarray:
    """f32[t, d]: the last hidden states of one text."""
    import torch

    inputs: dict[str, Any] = {"input_ids": torch.tensor([list(token_ids)])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if types is not None:
        inputs["token_type_ids"] = torch.tensor([list(types)])
    with torch.no_grad():
        states: np.ndarray = model(**inputs).last_hidden_state[0].numpy()
    return states


def pool(states: np.ndarray, mode: str, *, normalize: bool = True) -> np.ndarray:
    """The vector of a text, by definition."""
    vector = {"mean": states.mean(axis=0), "cls": states[0], "lasttoken": states[-1]}[mode]
    return np.asarray(vector / np.linalg.norm(vector) if normalize else vector)
