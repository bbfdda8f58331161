"""Encoders in GGUF files: against transformers for every architecture, pooling and head, and the real MiniLM."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from encoder_models import TEXTS, encoder_model, oracle_states, pool, word_pieces
from gguf_encoders import CLS, LAST, MEAN, RANK, write_encoder
from test_scores import logits

from bifolio import LLM, PoolingParams
from bifolio.errors import ModelFileError, RequestError, UnsupportedModelError

ARCHITECTURES = {"bert": ("bert", 0), "nomicbert": ("nomic-bert", 0), "modernbert": ("modern-bert", 0),
                 "xlm-roberta": ("bert", 1)}  # fmt: skip
MODES = {MEAN: "mean", CLS: "cls", LAST: "lasttoken"}
REAL_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Où est la bibliothèque ? 图书馆在哪里",
    "Photosynthesis turns light into sugar; respiration burns it again.",
)


@cache
def written(name: str, pooling: int | None = MEAN, head: str = "", **options: Any) -> tuple[Any, Path]:
    overrides = {"num_labels": options.pop("num_labels", 1)} if head else {}
    model, folder = encoder_model(name, head, **overrides)
    architecture, offset = ARCHITECTURES[name]
    place = folder / f"{architecture}-{pooling}-{len(options)}.gguf"
    return model, write_encoder(place, model, architecture, pooling, offset=offset, **options)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_token_vectors_are_those_of_transformers(name: str, kernels: str) -> None:
    model, path = written(name)
    with LLM(path, kernels=kernels) as llm:
        found = llm.encode(list(TEXTS), PoolingParams(normalize=False))
    for text, result in zip(TEXTS, found, strict=True):
        ids = word_pieces().encode(text).ids
        assert result.prompt_token_ids == ids
        assert np.abs(result.outputs.data - oracle_states(model, ids)).max() < 1e-5, text


@pytest.mark.parametrize("pooling", [*MODES, None])
def test_pooling_follows_the_file(pooling: int | None) -> None:
    model, path = written("bert", pooling)
    states = [oracle_states(model, word_pieces().encode(text).ids) for text in TEXTS]
    expected = np.stack([pool(each, MODES.get(pooling or MEAN, "")) for each in states])
    with LLM(path) as llm:
        found = np.stack([each.outputs.data for each in llm.embed(list(TEXTS))])
    assert np.abs(found - expected).max() < 1e-5


@pytest.mark.parametrize("name", ["bert", "modernbert", "xlm-roberta"])
def test_pairs_are_scored_as_by_transformers(name: str) -> None:
    """ModernBERT's head reads the first token unless its folder says "mean"; files always average."""
    overrides = {"classifier_pooling": "mean"} if name == "modernbert" else {}
    model, folder = encoder_model(name, "SequenceClassification", num_labels=1, **overrides)
    architecture, offset = ARCHITECTURES[name]
    path = write_encoder(folder / "rank.gguf", model, architecture, RANK, offset=offset)
    with LLM(path) as llm:
        raw = llm.score("who runs", list(TEXTS), pooling_params=PoolingParams(use_activation=False))
        with pytest.raises(RequestError, match="scores texts and makes no vectors"):
            llm.embed("x")
    pairs = [word_pieces().encode("who runs", text) for text in TEXTS]
    expected = np.array([logits(model, pair, name == "bert")[0] for pair in pairs])
    assert np.abs(np.array([each.outputs.score for each in raw]) - expected).max() < 1e-5


def test_labels_of_a_classifier() -> None:
    model, path = written("bert", RANK, "SequenceClassification", num_labels=3, labels=("a", "b", "c"))
    with LLM(path) as llm:
        found = np.stack([each.outputs.data for each in llm.classify(list(TEXTS))])
        assert llm.model.pooling.head is not None
        assert llm.model.pooling.head.labels == ("a", "b", "c")
    rows = np.stack([logits(model, word_pieces().encode(text), False) for text in TEXTS])
    weights = np.exp(rows - rows.max(axis=1, keepdims=True))
    assert np.abs(found - weights / weights.sum(axis=1, keepdims=True)).max() < 1e-5


def test_blocks_of_integers_are_near(tmp_path: Path) -> None:
    model, _ = encoder_model("bert", hidden_size=64, intermediate_size=128)
    path = write_encoder(tmp_path / "q8.gguf", model, "bert", kind=gguf.GGMLQuantizationType.Q8_0)
    with LLM(path) as llm:
        found = np.stack([each.outputs.data for each in llm.embed(list(TEXTS))])
    expected = np.stack([pool(oracle_states(model, word_pieces().encode(text).ids), "mean") for text in TEXTS])
    assert 1e-6 < np.abs(found - expected).max() < 0.02


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, _ = encoder_model("bert")
    with pytest.raises(ModelFileError, match=r"pools by rank and has no tensor 'cls\.output\.weight'"):
        LLM(write_encoder(tmp_path / "a.gguf", model, "bert", RANK))
    with pytest.raises(UnsupportedModelError, match="pooling_type 9 is not supported"):
        LLM(write_encoder(tmp_path / "b.gguf", model, "bert", 9))
    head, _ = encoder_model("bert", "SequenceClassification", num_labels=3)
    with pytest.raises(ModelFileError, match="has 3 scores and 2 labels"):
        LLM(write_encoder(tmp_path / "c.gguf", head, "bert", RANK, labels=("a", "b")))


def test_minilm_gives_the_vectors_of_transformers(models_dir: Path, tmp_path: Path) -> None:
    """The folder and a file converted from it, in f32 and in 8 bits."""
    folder = models_dir / "all-MiniLM-L6-v2"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing")
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    vocabulary = list(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    with LLM(folder) as llm:
        tokens = [llm.model.require_tokenizer().encode(text) for text in REAL_TEXTS]
        vectors = np.stack([each.outputs.data for each in llm.embed(list(REAL_TEXTS))])
    expected = np.stack([pool(oracle_states(model, ids), "mean") for ids in tokens])
    assert np.abs(vectors - expected).max() < 1e-5
    for kind, most in ((gguf.GGMLQuantizationType.F32, 1e-5), (gguf.GGMLQuantizationType.Q8_0, 0.01)):
        path = write_encoder(tmp_path / f"{kind.name}.gguf", model, "bert", vocabulary=vocabulary, kind=kind)
        with LLM(path) as llm:
            found = llm.embed(list(REAL_TEXTS))
        assert [each.prompt_token_ids for each in found] == tokens
        assert np.abs(np.stack([each.outputs.data for each in found]) - expected).max() < most
