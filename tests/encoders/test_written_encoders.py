"""Encoders that `bifolio quantize` writes: the vectors and scores of their folders, under the names of llama.cpp."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from encoder_models import ENCODERS, TEXTS, add_modules, encoder_model
from gguf_encoders import MEAN, write_encoder
from jina_models import jina_model
from test_decoders import QUERY, changed, decoder, reranker

from bifolio import LLM
from bifolio.errors import UnsupportedModelError
from bifolio.model.gguf.tokenizer import TOKENIZER_JSON
from bifolio.model.gguf.writer import WriteReport, write_gguf
from bifolio.model.loader import load_model
from bifolio.quant import QuantFormat

PAIRS = ("Who sleeps?", ["The fox sleeps.", "A dog runs in the garden."])
WRITTEN = [*(name for name in ENCODERS if name != "mpnet"), "jina"]
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def folder_of(name: str, head: str = "", **options: Any) -> tuple[Any, Path]:
    return jina_model() if name == "jina" else encoder_model(name, head, **options)


def written(folder: Path, target: Path, kind: QuantFormat = QuantFormat.F32) -> WriteReport:
    return write_gguf(target, load_model(folder), kind)


def vectors(path: Path) -> np.ndarray:
    with LLM(path) as llm:
        return np.stack([result.outputs.data for result in llm.embed(list(TEXTS), use_tqdm=False)])


@pytest.mark.parametrize("name", WRITTEN)
def test_vectors_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = folder_of(name)[1]
    report = written(folder, tmp_path / "m.gguf")
    assert not report.notes
    assert TOKENIZER_JSON not in gguf.GGUFReader(tmp_path / "m.gguf").fields  # its entries describe the vocabulary
    assert np.abs(vectors(tmp_path / "m.gguf") - vectors(folder)).max() < 1e-6


def test_a_bert_tells_its_number_of_token_types(tmp_path: Path) -> None:
    model, folder = folder_of("bert")
    written(folder, tmp_path / "m.gguf")
    count = gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.ggml.token_type_count"]  # else llama.cpp refuses it
    assert count.contents() == model.config.type_vocab_size


@pytest.mark.parametrize("kind", [QuantFormat.Q8_0, QuantFormat.F16])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_fewer_bits_give_nearly_the_same_vectors(name: str, kind: QuantFormat, tmp_path: Path) -> None:
    folder = folder_of(name, **SIZES)[1]
    report = written(folder, tmp_path / "m.gguf", kind)
    assert report.new_bytes < 0.7 * report.old_bytes
    ours, exact = vectors(tmp_path / "m.gguf"), vectors(folder)
    assert (ours * exact).sum(-1).min() > 0.99
    assert np.abs(ours - exact).max() > 0


@pytest.mark.parametrize(
    ("name", "architecture", "offset"),
    [("bert", "bert", 0), ("xlm-roberta", "bert", 1), ("modernbert", "modern-bert", 0)],
)
def test_tensors_and_entries_are_those_of_other_writers(
    name: str, architecture: str, offset: int, tmp_path: Path
) -> None:
    model, folder = encoder_model(name)
    written(folder, tmp_path / "ours.gguf")
    write_encoder(tmp_path / "theirs.gguf", model, architecture, MEAN, offset=offset)
    ours, theirs = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("ours", "theirs"))
    tensors = {tensor.name: tensor.data for tensor in ours.tensors}
    expected = {tensor.name: tensor.data for tensor in theirs.tensors}
    assert tensors.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(tensors[key].reshape(-1), values.reshape(-1), rtol=1e-6, err_msg=key)
    for key, field in theirs.fields.items():
        if not key.startswith(("GGUF.", "general.")) and not key.endswith((".sliding_window_pattern", ".token_type")):
            assert key in ours.fields, key
            own, other = ours.fields[key].contents(), field.contents()
            if key == "tokenizer.ggml.tokens":  # places without a token have any name
                other = [token.replace("[unused", "[PAD") for token in other]
            assert own == (pytest.approx(other) if isinstance(other, float) else other), key


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "modernbert"])
def test_scores_are_those_of_the_folder(name: str, labels: int, tmp_path: Path) -> None:
    options = {"classifier_pooling": "mean"} if name == "modernbert" else {}  # llama.cpp knows no other
    folder = encoder_model(name, "SequenceClassification", num_labels=labels, **options)[1]
    written(folder, tmp_path / "m.gguf")
    found = []
    for path in (folder, tmp_path / "m.gguf"):
        with LLM(path) as llm:
            names = llm.model.pooling.head.labels  # type: ignore[union-attr]
            if labels == 1:
                found.append((names, [result.outputs.score for result in llm.score(*PAIRS, use_tqdm=False)]))
            else:
                results = llm.classify(list(TEXTS), use_tqdm=False)
                found.append((names, [p for result in results for p in result.outputs.probs]))
    assert found[0][0] == found[1][0]
    assert np.abs(np.subtract(found[0][1], found[1][1])).max() < 1e-6


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_the_pooling_is_written_and_lost_settings_are_named(mode: str, tmp_path: Path) -> None:
    shutil.copytree(encoder_model("bert")[1], tmp_path / "m")
    add_modules(tmp_path / "m", mode, max_length=40)
    report = written(tmp_path / "m", tmp_path / "m.gguf")
    assert report.notes == ("GGUF files have no entries for the length of texts: pass them with requests",)
    assert np.abs(vectors(tmp_path / "m.gguf") - vectors(tmp_path / "m")).max() < 1e-6


def test_an_embedding_model_of_decoders_keeps_its_pooling(tmp_path: Path) -> None:
    folder = changed(decoder("Qwen3Model", tied=True)[1], tmp_path / "m")
    add_modules(folder, "lasttoken")
    written(folder, tmp_path / "m.gguf")
    assert np.abs(vectors(tmp_path / "m.gguf") - vectors(folder)).max() < 1e-6


def test_a_reranker_of_decoders_keeps_its_prompt_and_its_answers(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Judge."}, "default_prompt_name": "query"}
    folder = reranker(tmp_path / "m", 90, config_sentence_transformers=prompts)
    written(folder, tmp_path / "m.gguf")
    found = []
    for path in (folder, tmp_path / "m.gguf"):
        with LLM(path) as llm:
            found.append([result.outputs.score for result in llm.score(QUERY, list(TEXTS), use_tqdm=False)])
    assert np.abs(np.subtract(*found)).max() < 1e-6


def test_models_that_files_cannot_describe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="architecture 'mpnet' cannot be written"):
        written(encoder_model("mpnet")[1], tmp_path / "m.gguf")
    from bifolio.model.huggingface.folder_writer import write_folder

    with pytest.raises(UnsupportedModelError, match=r"write a \.gguf file"):
        write_folder(tmp_path / "copy", load_model(encoder_model("bert")[1]), QuantFormat.BF16)
    assert not list(tmp_path.iterdir())
