"""Classifiers and rerankers against transformers: pairs with their types of tokens, labels, and activations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_models import ENCODERS, TEXTS, encoder_model, word_pieces

from bifolio import LLM, PoolingParams
from bifolio.errors import RequestError

HEAD = "SequenceClassification"
PAIRS = [("who runs", text) for text in TEXTS]


def logits(model: Any, encoding: Any, has_types: bool) -> np.ndarray:
    """f32[labels] of one text or pair."""
    import torch

    inputs = {
        "input_ids": torch.tensor([encoding.ids]),
        "attention_mask": torch.ones(1, len(encoding.ids), dtype=torch.long),
    }
    if has_types:
        inputs["token_type_ids"] = torch.tensor([encoding.type_ids])
    with torch.no_grad():
        found: np.ndarray = model(**inputs).logits[0].double().numpy()
    return found


@cache
def classifier(name: str, num_labels: int) -> tuple[Any, Path]:
    return encoder_model(name, HEAD, num_labels=num_labels)


@pytest.mark.parametrize("name", ENCODERS)
def test_pairs_are_scored_as_by_transformers(name: str) -> None:
    model, folder = classifier(name, 1)
    has_types = ENCODERS[name].fields.get("type_vocab_size", 0) > 1
    with LLM(folder) as llm:
        found = np.array([result.outputs.score for result in llm.score(PAIRS[0][0], list(TEXTS))])
        raw = llm.score(PAIRS[0][0], list(TEXTS), pooling_params=PoolingParams(use_activation=False))
    expected = np.array([logits(model, word_pieces().encode(*pair), has_types)[0] for pair in PAIRS])
    assert np.abs(np.array([result.outputs.score for result in raw]) - expected).max() < 1e-5
    assert np.abs(found - 1 / (1 + np.exp(-expected))).max() < 1e-6


@pytest.mark.parametrize("name", ENCODERS)
def test_labels_have_the_probabilities_of_transformers(name: str) -> None:
    model, folder = classifier(name, 4)
    with LLM(folder) as llm:
        found = np.stack([result.outputs.data for result in llm.classify(list(TEXTS))])
        assert llm.model.pooling.head is not None
        assert llm.model.pooling.head.labels == tuple(f"LABEL_{i}" for i in range(4))
        with pytest.raises(RequestError, match="gives texts one of 4 labels and scores no pairs"):
            llm.score("a", "b")
        with pytest.raises(RequestError, match="this model scores texts and makes no vectors"):
            llm.embed("a")
    rows = np.stack([logits(model, word_pieces().encode(text), False) for text in TEXTS])
    weights = np.exp(rows - rows.max(axis=1, keepdims=True))
    assert np.abs(found - weights / weights.sum(axis=1, keepdims=True)).max() < 1e-6


def test_the_activation_that_the_folder_names(tmp_path: Path) -> None:
    import shutil

    model, folder = classifier("bert", 1)
    shutil.copytree(folder, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    own = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    with LLM(tmp_path / "m") as llm:
        found = llm.score("who", "the fox")[0].outputs.score
    assert abs(found - logits(model, word_pieces().encode("who", "the fox"), True)[0]) < 1e-5


def test_long_pairs_are_cut_at_the_longer_text() -> None:
    with LLM(classifier("bert", 1)[1]) as llm:
        with pytest.raises(RequestError, match="the text has 105 tokens and 64 fit"):
            llm.score("fox", "dog " * 101)
        (cut,) = llm.score("fox", "dog " * 101, truncate_prompt_tokens=-1)
        assert cut.prompt_token_ids == word_pieces().encode("fox", "dog " * 60).ids
        (both,) = llm.score("fox " * 50, "dog " * 50, truncate_prompt_tokens=23)
    assert both.prompt_token_ids == word_pieces().encode("fox " * 10, "dog " * 10).ids


def test_a_decoder_with_a_head_reads_its_last_token() -> None:
    import torch
    import transformers

    from helpers import fresh_folder, tiny_tokenizer

    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, num_labels=3, pad_token_id=0,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    folder = fresh_folder("qwen3")
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    texts = ["Once upon a time", "The fox", "There was a little dog who ran"] * 3
    with LLM(folder, chunk_size=4, token_budget=16, max_num_seqs=4, block_size=4) as llm:
        found = [llm.classify(texts), llm.classify(texts)]  # the second time from the prefix cache
        assert found[1][0].num_cached_tokens > 0
        with pytest.raises(RequestError, match="generates no text"):
            llm.generate("Once")
    rows = np.stack([logits(model, tiny_tokenizer().encode(text), False) for text in texts])
    weights = np.exp(rows - rows.max(axis=1, keepdims=True))
    for results in found:
        values = np.stack([result.outputs.data for result in results])
        assert np.abs(values - weights / weights.sum(axis=1, keepdims=True)).max() < 1e-5
