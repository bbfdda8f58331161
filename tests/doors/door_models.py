"""The small models that the doors open: one or more for each family, with a tokenizer, as a folder and as a GGUF file.

`oracle_logits` scores tokens: by transformers, which made the model (RWKV-7: by the formulas of its paper), or, for
models from a store, by the reference kernels, which `test_family_rows.py` compares with transformers.

A store is a folder of models that were written elsewhere, so that a machine needs neither transformers (or an older
one) nor the gguf package:

    scripts/door-models [FOLDER [ROW ...]]      # default: all rows in tests/doors/models, which git ignores

The doors of a GPU read it there, or from BIFOLIO_DOOR_MODELS. Its weights are rounded to bf16, so that a GPU rounds
none of them again.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import rwkv_oracle
from family_rows import ROWS, row_model, save_row
from whole_prompt import prompt_logits

from adapter_files import peft_adapter
from bifolio.model.families import all_families, family_of_hf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.huggingface.safetensors_file import write_safetensors
from bifolio.quant import QuantFormat
from bifolio.quant.formats import bf16_to_f32, f32_to_bf16
from helpers import ARCHITECTURES, fresh_folder, tiny_model, tiny_tokenizer, transformers_logits

OTHER_NAMES = {"llama3-rope": "llama", "smollm2": "llama", "deepseek3": "deepseek2"}  # small models of `helpers`
CHANGED = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "wqkv", "Wqkv", "query_key_value", "c_attn", "q_a_proj",
           "q_b_proj", "kv_a_proj_with_mqa", "in_proj"}  # fmt: skip  # by adapters, in models that have them
COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # buffers that readers compute from sizes
BY_FORMULAS = "rwkv7"  # transformers lacks it: the oracle is `rwkv_oracle`
STORE = Path(os.environ.get("BIFOLIO_DOOR_MODELS") or Path(__file__).with_name("models"))


class DoorModel(NamedTuple):
    """The files of a small model."""

    name: str
    folder: Path
    gguf: Path | None  # None: GGUF cannot describe the family
    is_stored: bool = False
    adapter: Path | None = None  # a folder of PEFT; the model is then the base with it


def family_of_row(name: str) -> str:
    """The family of a row, or of a small model of `helpers`."""
    if name in ROWS:
        return family_of_hf(ROWS[name].real["model_type"]).name
    return OTHER_NAMES.get(name, name)


ROW_FAMILIES = {name: family_of_row(name) for name in (*ROWS, *ARCHITECTURES)}
HYBRID = {  # checked by test_doors.py
    "bailing_hybrid", "bamba", "falcon_h1", "granitehybrid", "jamba", "kimi_linear", "lfm2", "lfm2moe", "lfm3",
    "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen35", "qwen35moe", "qwen3next", "recurrent_gemma",
    "rwkv7", "zamba2",
}  # fmt: skip


def first_rows() -> dict[str, str]:
    """Family -> its first row."""
    found: dict[str, str] = {}
    for name, family in ROW_FAMILIES.items():
        found.setdefault(family, name)
    return found


def has_gguf(name: str) -> bool:
    """Whether GGUF files describe the family of a row."""
    (family,) = (family for family in all_families() if family.name == ROW_FAMILIES[name])
    return family.written_as != ""


@cache
def oracle_model(name: str) -> Any:
    """The small model in transformers, with the vocabulary of a tokenizer; skips where transformers is too old."""
    vocab = tiny_tokenizer().get_vocab_size()
    options = {"vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 0}
    if "vocab_size_per_layer_input" in (ROWS[name].tiny if name in ROWS else ()):
        options["vocab_size_per_layer_input"] = vocab
    return row_model(name, **options) if name in ROWS else tiny_model(name, **options)[0]


@cache
def formulas() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The weights of RWKV-7, rounded to bf16, and its sizes."""
    sizes = {**rwkv_oracle.SIZES, "vocab_size": tiny_tokenizer().get_vocab_size()}
    tensors = rwkv_oracle.random_tensors(sizes)
    return {name: bf16_to_f32(f32_to_bf16(value)) for name, value in tensors.items()}, sizes


@cache
def adapted_model(name: str) -> tuple[Any, Path]:
    """The small model with an adapter of PEFT, and the folder of the adapter."""
    pytest.importorskip("peft")
    base = oracle_model(name)
    names = {path.rpartition(".")[2] for path, _ in base.named_modules()}
    return peft_adapter(base, target_modules=sorted(names & CHANGED), task_type="CAUSAL_LM")


def with_adapter(model: DoorModel) -> DoorModel:
    """The model with its adapter; skips where the model is one of a store, which has none."""
    if model.is_stored:
        pytest.skip("the store has no adapters: tests/gpu/test_gpu_adapters.py has them on a GPU")
    return model._replace(adapter=adapted_model(model.name)[1])


@cache
def door_model(name: str, *, use_store: bool = False) -> DoorModel:
    """The files of a row's model: those of the store, or fresh ones."""
    stored = STORE / name.replace(" ", "-")
    if use_store and stored.is_dir():
        gguf = stored / "model.gguf"
        if not gguf.exists():
            gguf = fresh_folder(stored.name).with_suffix(".gguf")
        return DoorModel(name, stored, gguf if has_gguf(name) else None, is_stored=True)
    return write_model(name, fresh_folder(name.replace(" ", "-")))


def write_model(name: str, folder: Path) -> DoorModel:
    if name == BY_FORMULAS:
        tensors, sizes = formulas()
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(sizes))
    elif name in ROWS:
        save_row(name, oracle_model(name), folder)
    else:
        oracle_model(name).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return DoorModel(name, folder, folder.with_suffix(".gguf") if has_gguf(name) else None)


def gguf_file(model: DoorModel, format: QuantFormat = QuantFormat.F32) -> Path:
    """The model's GGUF file, written once."""
    assert model.gguf is not None
    if not model.gguf.exists():
        write_gguf(model.gguf, load_folder(model.folder), format)
    return model.gguf


@cache
def oracle_logits(model: DoorModel, token_ids: tuple[int, ...]) -> np.ndarray:
    """f32[t, vocab]."""
    if model.is_stored:
        return prompt_logits(load_folder(model.folder).weights, list(token_ids))
    if model.name == BY_FORMULAS:
        return rwkv_oracle.Oracle(*formulas()).all_logits(list(token_ids))
    scored = oracle_model(model.name) if model.adapter is None else adapted_model(model.name)[0]
    return transformers_logits(scored, token_ids)


# -- the store -------------------------------------------------------------------------------------------------------
def write_store(target: Path, names: Sequence[str]) -> None:
    """Write models with weights rounded to bf16; the reference kernels give the oracle's logits for each."""
    probe = tuple(range(3, 60))
    shutil.rmtree(target, ignore_errors=True)
    for name in names:
        folder = target / name.replace(" ", "-")
        folder.mkdir(parents=True)
        if name != BY_FORMULAS:
            _round_weights(oracle_model(name))
        model = write_model(name, folder)
        loaded, expected = load_folder(folder), oracle_logits(model, probe)
        difference = np.abs(prompt_logits(loaded.weights, list(probe)) - expected).max()
        assert difference < 1e-3, (name, difference)
        if has_gguf(name):
            write_gguf(folder / "model.gguf", loaded, QuantFormat.F16)
        _store_in_bf16(folder)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{len(names)} models, {size / 2**20:.1f} MiB in {target}")


def _round_weights(model: Any) -> None:
    import torch

    with torch.no_grad():
        for field, value in model.state_dict().items():  # other buffers, such as frequencies, are not in files
            if value.is_floating_point() and not field.endswith(COMPUTED):
                value.copy_(value.bfloat16().float())


def _store_in_bf16(folder: Path) -> None:
    """The tensors of a folder in half the bytes, without a change of value."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {key: value.bfloat16() if value.is_floating_point() else value for key, value in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))


if __name__ == "__main__":
    write_store(Path(sys.argv[1]) if len(sys.argv) > 1 else STORE, sys.argv[2:] or tuple(ROW_FAMILIES))
