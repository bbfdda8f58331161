"""GGUF files of llama.cpp's own converter, which are the files that people download, give transformers' logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_rows import ROWS, row_model, save_row
from whole_prompt import prompt_logits

from bifolio.model.gguf.loader import load_gguf
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.quant import QuantFormat
from helpers import fresh_folder, random_prompt, tiny_model, transformers_logits
from moe_models import MOE_ARCHITECTURES

pytestmark = pytest.mark.slow
CHECKOUT = os.environ.get("BIFOLIO_LLAMA_CPP", "")
OLDER = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt2")  # families without a row
EVERY_FOURTH = {"layer_types": ("linear_attention",) * 3 + ("full_attention",), "num_hidden_layers": 4}
EVERY_SIXTH = ("sliding_attention",) * 5 + ("full_attention", "sliding_attention")
# Values that the architecture implies in a GGUF file, beside those of `Row.peer`.
IMPLIED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma3": {"num_hidden_layers": 7, "layer_types": EVERY_SIXTH, "query_pre_attn_scalar": 24},
    "falcon": {"ffn_hidden_size": 256},
    "glm": {"rms_norm_eps": 1e-5},
    "gptneox": {"rotary_emb_base": 10000.0},
    "hunyuan_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "phi": {"num_key_value_heads": 4, "intermediate_size": 256},
    "qwen35": EVERY_FOURTH,
    "qwen35moe": EVERY_FOURTH,
    "qwen3next": EVERY_FOURTH,
}
# Fields of config.json that real folders have and transformers does not write.
WRITTEN: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "gpt2": {"n_ctx": 128},
    "glm4moelite": {"first_k_dense_replace": 1},
    "gptneox": {"rotary_pct": 0.5},
    "hunyuan_moe": {"moe_intermediate_size": [96] * 4, "moe_topk": [3] * 4, "num_shared_expert": [1] * 4},
    "qwen35": {"full_attention_interval": 4},
    "qwen35moe": {"full_attention_interval": 4},
    "qwen3next": {"full_attention_interval": 4},
}
# The converter reorders whole heads of Bamba, of which a part is rotated, and does not find the layers of Nemotron-H
# under the names that transformers gives them.
WRONG = {"bamba", "nemotron_h", "nemotron_h with experts"}
# transformers names the plain MLPs of Kimi-Linear as experts: its folder is written again, as released ones are.
AGAIN = {"kimi_linear"}
KINDS = {"full_attention": "attention", "linear_attention": "mamba"}  # as released folders name the layers
FAMILIES = (*ROWS, *OLDER, *MOE_ARCHITECTURES, "glm4moelite")
NAMES = [name for name in FAMILIES if name not in WRONG and (name not in ROWS or ROWS[name].peer is not None)]


@cache
def converted() -> dict[str, tuple[Any, Path]]:
    """The model and the folder of each family, converted by one process."""
    made = {name: new_folder(name) for name in NAMES}
    script = Path(__file__).with_name("convert_by_llama_cpp.py")
    folders = [str(folder) for _, folder in made.values()]
    subprocess.run([sys.executable, str(script), CHECKOUT, *folders], check=True, capture_output=True, timeout=280)
    return made


def new_folder(name: str) -> tuple[Any, Path]:
    if name in ROWS:
        overrides = {**(ROWS[name].peer or {}), **IMPLIED.get(name, {})}
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in overrides.items()}
        model, folder = row_model(name, **values), fresh_folder(name)
        save_row(name, model, folder)
        if name in AGAIN:
            write_folder(folder / "again", load_folder(folder), QuantFormat.F32)
            folder /= "again"
    else:
        model, folder = tiny_model(name, **IMPLIED.get(name, {}))
    config = json.loads((folder / "config.json").read_text()) | WRITTEN.get(name, {})
    if name.startswith("granitehybrid"):
        config["layer_types"] = [KINDS.get(kind, kind) for kind in config["layer_types"]]
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"t{number}": number for number in range(97)}
    bpe = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": words, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(bpe))
    (folder / "tokenizer_config.json").write_text("{}")
    return model, folder


@pytest.mark.skipif(not CHECKOUT, reason="needs a checkout of llama.cpp: set BIFOLIO_LLAMA_CPP to its folder")
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_converter_gives_transformers_logits(name: str) -> None:
    model, folder = converted()[name]
    if (folder / "failure.txt").exists():
        pytest.skip((folder / "failure.txt").read_text())
    prompt = random_prompt(13)
    theirs = transformers_logits(model, prompt)
    ours = prompt_logits(load_gguf(folder / "model.gguf").weights, prompt)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
