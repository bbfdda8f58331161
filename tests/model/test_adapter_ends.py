"""Adapters that change the head or the embedding, against PEFT: low-rank changes, and modules that are saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_adapter_files import as_gguf, logits

from adapter_files import adapter_tensors, end_folder, gguf_adapter, peft_adapter
from bifolio.errors import ModelFileError
from bifolio.kernels.interface import Adapter, AdapterUse
from bifolio.model.adapters.adapter import read_adapter
from bifolio.model.adapters.merge import merged
from bifolio.model.adapters.sites import head_site
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat
from helpers import cpu_kernel_names, make_kernels, random_prompt, tiny_folder, tiny_model, transformers_logits

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


def test_an_adapter_of_llama_cpp_changes_both_ends(tmp_path: Path) -> None:
    """`token_embd.weight.lora_a` is stored by token; the head of a tied model is changed by its own matrices alone."""
    folder = tiny_folder(tie_word_embeddings=True)
    path = end_folder(folder, "head", "table")
    model, tensors = load_model(folder), adapter_tensors(folder)
    stored = open_safetensors(path / "adapter_model.safetensors").tensors
    named = {name.removeprefix("base_model.model."): np.array(tensor.dequantize()) for name, tensor in stored.items()}
    own = as_gguf(tensors, {"self_attn.q_proj": 4, "self_attn.k_proj": 2}) | {
        "output.weight.lora_a": named["lm_head.lora_A.weight"],
        "output.weight.lora_b": named["lm_head.lora_B.weight"],
        "token_embd.weight.lora_a": np.ascontiguousarray(named["model.embed_tokens.lora_embedding_A"].T),
        "token_embd.weight.lora_b": named["model.embed_tokens.lora_embedding_B"],
    }
    file = gguf_adapter(tmp_path / "adapter.gguf", own, alpha=8.0)
    expected = logits(model, read_adapter(path, model.config))
    assert np.abs(logits(model, read_adapter(file, model.config)) - expected).max() < 1e-4
    write_gguf(tmp_path / "base.gguf", model, QuantFormat.F32)
    base = load_model(tmp_path / "base.gguf")
    assert np.abs(logits(base, read_adapter(file, base.config)) - expected).max() < 1e-4
    assert np.abs(logits(model, None) - expected).max() > 0.1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kinds", [("own head",), ("own table", "head"), ("table",)])
def test_a_merged_model_has_the_ends_of_the_adapter(kinds: tuple[str, ...], tied: bool, tmp_path: Path) -> None:
    folder = tiny_folder(tie_word_embeddings=tied)
    model = load_model(folder)
    adapter = read_adapter(end_folder(folder, *kinds), model.config)
    expected, whole = logits(model, adapter), merged(model, adapter)
    write_folder(tmp_path / "folder", whole, QuantFormat.F32)
    write_gguf(tmp_path / "file.gguf", whole, QuantFormat.F32)
    for other in (whole, load_model(tmp_path / "folder"), load_model(tmp_path / "file.gguf")):
        assert np.abs(logits(other, None) - expected).max() < 1e-3


def test_a_quantised_base_takes_whole_matrices() -> None:
    """The numbers of a saved head do not depend on the format of the base, and those in bf16 are kept."""
    folder = tiny_folder()
    model = load_model(folder)
    adapter = read_adapter(end_folder(folder, "own head"), model.config)
    (part,) = adapter.weights.products[head_site(model.config.num_layers)]
    narrow = part.up.converted(QuantFormat.BF16)
    for name in cpu_kernel_names():
        kernels = make_kernels(name)
        x = np.random.default_rng(0).standard_normal((5, model.config.hidden_size)).astype(np.float32)
        head = kernels.prepare_linear(model.weights.head)
        own = kernels.prepare_adapter(Adapter({3: (replace(part, up=narrow),)}))
        batch = AdapterUse((own,), np.array([0, -1, 0, 0, -1], np.int32))
        found = kernels.to_host(
            kernels.adapt(kernels.linear(kernels.from_host(x), head), kernels.from_host(x), 3, batch)
        )
        assert np.abs(found[[0, 2, 3]] - x[[0, 2, 3]] @ narrow.dequantize().T).max() < 1e-3
        plain = kernels.to_host(kernels.linear(kernels.from_host(x), head))
        assert np.array_equal(found[[1, 4]], plain[[1, 4]])


# -- damaged and foreign files -----------------------------------------------------------------------------------------
OF_HEAD, OF_TABLE = "base_model.model.lm_head.", "base_model.model.model.embed_tokens."
WRONG: dict[str, tuple[tuple[str, ...], dict[str, np.ndarray | None], dict[str, Any], str]] = {
    "another vocabulary": (("own head",), {OF_HEAD + "weight": np.ones((60, 32))}, {}, r"lm_head.weight has the shape"),
    "another width": (("own table",), {OF_TABLE + "weight": np.ones((61, 7))}, {}, r"tokens.weight has the shape"),
    "NaN in a head": (("own head",), {OF_HEAD + "weight": np.full((61, 32), np.nan)}, {}, r"head.weight has numbers"),
    "a missing head": ((), {}, {"modules_to_save": ["lm_head"]}, r"'lm_head', but lm_head.weight is missing"),
    "a missing table": ((), {}, {"modules_to_save": ["embed_tokens"]}, "embed_tokens.weight is missing"),
    "saved and low-rank": (("own head", "head"), {}, {}, "'lm_head' is saved as a whole and changed by low-rank"),
    "a saved norm": (("own head",), {"base_model.model.model.norm.weight": np.ones(32)}, {}, "norm' is saved as a"),
    "a norm to save": ((), {}, {"modules_to_save": ["norm"]}, "modules_to_save names 'norm'"),
    "a bias": (("own head",), {OF_HEAD + "bias": np.ones(61)}, {}, "'lm_head.bias' is saved as a whole"),
    "half a table": (("table",), {OF_TABLE + "lora_embedding_B": None}, {}, "lacks lora_embedding_B"),
    "a table of another size": (
        ("table",), {OF_TABLE + "lora_embedding_A": np.ones((4, 60))}, {}, "use the adapter's own base"),
    "NaN in a table": (("table",), {OF_TABLE + "lora_embedding_A": np.full((4, 61), np.nan)}, {}, "not finite"),
    "a table with other ranks": (
        ("table",), {OF_TABLE + "lora_embedding_A": np.ones((3, 61))}, {}, "do not belong together"),
    "a table as a matrix": (("table",), {OF_TABLE + "lora_A.weight": np.ones((4, 32))}, {}, "embedding and a matrix"),
    "a target that is not named": (("head",), {}, {"target_modules": ["q_proj"]}, "target_modules does not name"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ends_are_refused_by_name(name: str) -> None:
    kinds, tensors, config, message = WRONG[name]
    base = tiny_folder()
    path = end_folder(base, *kinds, **config)
    stored = open_safetensors(path / "adapter_model.safetensors").tensors
    values = {key: np.array(tensor.dequantize()) for key, tensor in stored.items()}
    values |= {key: value.astype(np.float32) for key, value in tensors.items() if value is not None}
    values = {key: value for key, value in values.items() if tensors.get(key, value) is not None}
    (path / "adapter_model.safetensors").unlink()
    write_safetensors(path / "adapter_model.safetensors", values)
    with pytest.raises(ModelFileError, match=message):
        read_adapter(path, load_model(base).config)


def test_copies_of_the_base_are_not_read() -> None:
    """PEFT writes the base's own table and head beside low-rank changes of them."""
    base = tiny_folder()
    config = load_model(base).config
    path = end_folder(base, "head", tensors={OF_HEAD + "base_layer.weight": np.ones((61, 32), np.float32)})
    with pytest.raises(ModelFileError):
        read_adapter(
            end_folder(base, "head", tensors={OF_HEAD + "base_layer.weight": np.ones((9, 32), np.float32)}), config
        )
    assert read_adapter(path, config).digest == read_adapter(end_folder(base, "head"), config).digest
