"""jina-bert-v2: a folder, and GGUF files with the halves of the MLP joined and apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from encoder_models import TEXTS, word_pieces
from gguf_encoders import write_encoder
from jina_models import jina_model

from bifolio import LLM, PoolingParams
from bifolio.errors import UnsupportedModelError


def check(path: Path, kernels: str = "native") -> None:
    model, _ = jina_model()
    with LLM(path, kernels=kernels) as llm:
        found = llm.encode(list(TEXTS), PoolingParams(normalize=False))
    for text, result in zip(TEXTS, found, strict=True):
        expected = model.states(word_pieces().encode(text).ids)
        assert np.abs(result.outputs.data - expected).max() < 1e-5, text


@pytest.mark.parametrize("kernels", ["native", "reference", "torch"])
def test_a_folder(kernels: str) -> None:
    check(jina_model()[1], kernels)


@pytest.mark.parametrize("split", [False, True], ids=["joined", "split"])
def test_a_file(split: bool, tmp_path: Path) -> None:
    check(write_encoder(tmp_path / "m.gguf", jina_model()[0], "jina-bert-v2", split=split))


def test_another_mlp_is_refused(tmp_path: Path) -> None:
    import json
    import shutil

    folder = shutil.copytree(jina_model()[1], tmp_path / "m")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "feed_forward_type": "reglu"}))
    with pytest.raises(UnsupportedModelError, match="feed_forward_type is 'reglu'"):
        LLM(folder)
