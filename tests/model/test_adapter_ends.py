"""Adapters that change the head or the embedding, against PEFT: low-rank changes, and modules that are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_adapter_files import logits

from adapter_files import peft_adapter
from bifolio.model.adapters.adapter import read_adapter
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat
from helpers import cpu_kernel_names, make_kernels, random_prompt, tiny_model, transformers_logits

PROMPT = random_prompt(11, vocab_size=61)
HEAD, TABLE = "lm_head", "embed_tokens"
RECIPES: dict[str, dict[str, Any]] = {
    "a saved head": {"target_modules": ["q_proj"], "modules_to_save": [HEAD]},
    "a saved embedding": {"target_modules": ["q_proj"], "modules_to_save": [TABLE]},
    "both saved": {"target_modules": ["v_proj"], "modules_to_save": [HEAD, TABLE]},
    "a low-rank head": {"target_modules": ["q_proj", HEAD]},
    "a low-rank embedding": {"target_modules": ["q_proj", TABLE], "use_rslora": True},
    "both low-rank": {"target_modules": [HEAD, TABLE]},
    "by pattern": {"target_modules": [HEAD, TABLE], "rank_pattern": {HEAD: 3}, "alpha_pattern": {TABLE: 2}},
    "one of each": {"target_modules": [TABLE], "modules_to_save": [HEAD]},
}
CASES = [(recipe, tied, ties) for recipe in RECIPES for tied in (False, True) for ties in (False, True)]


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "tied", "ties"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_logits_equal_those_of_peft(recipe: str, tied: bool, ties: bool, tmp_path: Path) -> None:
    """Of tied and untied models, with and without `ensure_weight_tying`, on a folder and on a GGUF file."""
    pytest.importorskip("peft")
    if tied and ties and recipe in ("one of each", "by pattern"):
        pytest.skip("PEFT's own tied matrices differ")
    original, folder = tiny_model("llama", tie_word_embeddings=tied)
    adapted, path = peft_adapter(original, ensure_weight_tying=ties, **RECIPES[recipe])
    expected = transformers_logits(adapted, PROMPT)
    model = load_model(folder)
    adapter = read_adapter(path, model.config)
    error = np.abs(logits(model, None) - expected).max()
    for name in cpu_kernel_names():
        found = logits(model, adapter, make_kernels(name))
        assert np.abs(found - expected).max() < 2e-4 < error / 100, name
    write_gguf(tmp_path / "base.gguf", model, QuantFormat.F32)
    file = load_model(tmp_path / "base.gguf")
    assert np.abs(logits(file, read_adapter(path, file.config)) - expected).max() < 2e-4
