"""The engines of the benchmark of vectors: equal texts, and equal vectors where their packages are installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.engines import PACKAGES, Ask, Opening, Unsupported, open_engine
from benchmarks.engines.vectors import Bifolio, Texts, words_of
from benchmarks.workload_list import WORKLOADS
from benchmarks.workloads import Trial


def test_words_are_pieces_that_tokenise_as_one() -> None:
    assert words_of(["[CLS]", "##ing", "the", "▁dog", "a", "Bee", "run", "café"]) == ["the", "dog", "run"]


def test_a_vocabulary_without_words_is_no_encoder_of_english() -> None:
    with pytest.raises(Unsupported, match="too few words"):
        Texts(["the"])


@pytest.fixture(scope="module")
def folder(models_dir: Path) -> Path:
    path = models_dir / "all-MiniLM-L6-v2"
    if not path.is_dir():
        pytest.skip(f"{path} is missing")
    return path


def test_a_request_has_a_token_for_each_of_its_words(folder: Path) -> None:
    engine = Bifolio(Opening(folder, {}))
    trial = Trial(engine, 1)
    done = engine.prepare([Ask(trial.tokens(16), 1)])()
    assert done.outputs == [[384]]
    (text,) = [" ".join(engine._words[number] for number in trial.tokens(16))]
    assert len(engine.llm.model.require_tokenizer().encode(text)) == 16 + 2
    assert WORKLOADS["texts16"].tiny().run(trial) > 0
    engine.close()


@pytest.mark.parametrize("name", ["sentence-transformers", "onnxruntime", "llama.cpp-vectors"])
def test_peers_compute_the_same_vectors(name: str, folder: Path) -> None:
    pytest.importorskip(PACKAGES[name])
    ours = Bifolio(Opening(folder, {}))
    try:
        peer = open_engine(name, Opening(folder, {}))
    except Unsupported as error:
        pytest.skip(str(error))
    assert isinstance(peer, Texts)
    assert peer._words == ours._words
    texts = [" ".join(ours._words[start : start + 20]) for start in (0, 500, 900)]
    np.testing.assert_allclose(np.asarray(peer.compute(texts)), np.stack(ours.compute(texts)), atol=2e-3)
    ours.close()
