"""Opening a model without its weights: configuration and text are there, and no tensor is decoded."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio import LLM
from bifolio.cli.main import build_app
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.kernels.native import NativeKernels
from bifolio.model.gguf.reader import open_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model, open_model, open_text_model
from bifolio.model.model_file import ModelFile
from bifolio.quant import QuantFormat, tensor
from bifolio.quant.formats import decode_blocks
from cli_runner import CliRunner
from exotic_weights import exotic_tensor, k_quant_llama, write_llama
from helpers import tiny_folder
from tiny_models import ARCHITECTURES, tiny_transformers_model


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding a block, or assembling weights, fails from here on."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(tensor, "decode_blocks", refuse)
    monkeypatch.setattr(ModelFile, "load", refuse)


def llama2c_file(path: Path) -> Path:
    d, ffn, layers, kv, vocabulary = 16, 24, 2, 8, 40
    count = vocabulary * d + layers * (2 * d + 2 * d * d + 2 * kv * d + 3 * ffn * d) + d
    path.write_bytes(struct.pack("<7i", d, ffn, layers, 4, 2, vocabulary, 16) + bytes(4 * count))
    return path


def inspect(path: Path) -> dict[str, Any]:
    result = CliRunner().invoke(build_app(), ["inspect", str(path), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("kind", ["folder", "gguf", "k-quants", "llama2.c"])
def test_opening_and_inspecting_decode_no_tensor(kind: str, tmp_path: Path, no_decoding: None) -> None:
    path = {
        "folder": lambda: tiny_folder(tmp_path / "m", tokenizer=True),
        "gguf": lambda: Path("stories"),
        "k-quants": lambda: k_quant_llama(tmp_path / "k.gguf"),
        "llama2.c": lambda: llama2c_file(tmp_path / "m.bin"),
    }[kind]()
    model = open_text_model("stories" if kind == "gguf" else path)
    assert not isinstance(model, LoadedModel)
    assert not hasattr(model, "weights")
    assert model.config.num_layers >= 2
    if kind in ("folder", "gguf"):
        assert model.require_tokenizer().decode(model.require_tokenizer().encode("Once", add_special_tokens=False))
    plan = inspect(path)["memory_plan"]
    assert plan["num_parameters"] == model.config.num_parameters
    assert plan["weight_bytes"] > 0


def test_a_text_model_says_what_the_loaded_model_says(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m", tokenizer=True, chat_template="{{ messages }}")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": [3]}))
    write_gguf(tmp_path / "m.gguf", load_model(folder), QuantFormat.F32)
    for path in (folder, tmp_path / "m.gguf"):
        text, loaded = open_text_model(path), load_model(path)
        assert (text.path, text.config, text.chat_template) == (loaded.path, loaded.config, loaded.chat_template)
        assert (text.generation_config, text.special_tokens) == (loaded.generation_config, loaded.special_tokens)
        assert text.require_tokenizer().encode("a text") == loaded.require_tokenizer().encode("a text")
        assert text.config.eos_token_ids[-1] == 3
        assert loaded.weights.config == text.config


def test_loading_decodes_norms_and_biases_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, ...]] = []

    def watched(blocks: Any, format: QuantFormat) -> Any:
        decoded.append(blocks.shape)
        return decode_blocks(blocks, format)

    path = k_quant_llama(tmp_path / "k.gguf")
    monkeypatch.setattr(tensor, "decode_blocks", watched)
    load_model(path)
    assert decoded == [(256, 4)] * 5  # two norms a layer, and the last one


def test_inspecting_k_quants_shows_formats_bytes_and_conversions(tmp_path: Path) -> None:
    path = k_quant_llama(tmp_path / "k.gguf", tied=False)
    record = inspect(path)
    assert {name: group["tensors"] for name, group in record["formats"].items()} == {
        "Q6_K": 4, "Q4_K": 10, "Q5_0": 2, "F32": 5,
    }  # fmt: skip
    entries = open_gguf(path).entries.values()
    assert record["total_bytes"] == sum(entry.nbytes for entry in entries)
    assert record["memory_plan"]["notes"] == []  # the native kernels take them all as they are
    llm = LLM(path, kernels=NativeKernels(1), num_blocks=16)
    assert record["memory_plan"]["weight_bytes"] == llm.plan.weight_bytes


@pytest.mark.full
def test_inspecting_k_quants_needs_no_gguf_package(tmp_path: Path) -> None:
    path = k_quant_llama(tmp_path / "k.gguf")
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from bifolio.cli.main import build_app; build_app()(['inspect', sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Q4_K" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_views_are_the_tensors_of_the_network(name: str, tmp_path: Path) -> None:
    model = tiny_transformers_model(name)
    model.save_pretrained(tmp_path / "folder")
    opened = open_model(tmp_path / "folder")
    moe = opened.text.config.moe
    biases = 0  # of the choice of experts: transformers counts them as buffers
    if moe is not None and moe.selection_bias:
        biases = moe.num_experts * sum(not layer.dense for layer in opened.text.config.layers)
    assert sum(view.size for view in opened.views()) == opened.text.config.num_parameters + biases
    write_gguf(tmp_path / "m.gguf", opened.load(), QuantFormat.F16)
    opened = open_model(tmp_path / "m.gguf")
    assert sum(view.size for view in opened.views()) == opened.text.config.num_parameters + biases
    assert {view.format for view in opened.views() if len(view.shape) == 2} <= {QuantFormat.F16, QuantFormat.F32}


def test_a_missing_tensor_shows_when_weights_or_views_are_wanted(tmp_path: Path) -> None:
    sizes = {"embedding_length": 32, "block_count": 1, "feed_forward_length": 32, "context_length": 64,
             "attention__head_count": 4, "attention__layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    path = write_llama(tmp_path / "m.gguf", {"token_embd.weight": np.zeros((8, 32), np.float32)}, **sizes)
    opened = open_model(path)
    assert opened.text.config.hidden_size == 32
    with pytest.raises(ModelFileError, match=r"'blk\.0\.attn_norm\.weight' is missing"):
        opened.load()
    assert "is missing" in inspect(path)["memory_plan"]["error"]


def test_a_type_that_cannot_be_decoded_is_listed_but_not_loaded(tmp_path: Path) -> None:
    sizes = {"embedding_length": 256, "block_count": 1, "feed_forward_length": 256, "context_length": 64,
             "attention__head_count": 4, "attention__layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    path = write_llama(tmp_path / "m.gguf", {"token_embd.weight": exotic_tensor("Q8_K", 8, 256)}, **sizes)
    record = inspect(path)
    assert record["tensors"][0]["format"] == "Q8_K"
    assert "cannot be decoded" in record["memory_plan"]["error"]
    with pytest.raises(UnsupportedModelError, match=r"'token_embd.weight' has type Q8_K, which cannot be decoded"):
        load_model(path)
