"""Folders that are missing something, cut short or not what they say: each a named error that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio.config import ModelConfig, RopeConfig, layers_of
from bifolio.errors import ConfigError, ModelFileError, RequestError, UnsupportedModelError
from bifolio.model.huggingface.config import config_from_hf
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.huggingface.safetensors_file import write_safetensors
from bifolio.model.loader import load_model
from helpers import END_OF_TEXT, TINY, make_runner, open_entry, run_chunks, tiny_folder, tiny_tensors, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "model")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"does not exist: pass a model folder, a \.gguf file or the name"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match=r"no model is called 'nosuchmodel'.*known names"):
        load_model("nosuchmodel")


def test_a_file_of_an_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "model.xyz").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"pass a folder with config\.json"):
        load_model(tmp_path / "model.xyz")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelFileError, match="safetensors"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1000, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", '{"model_type": }', "[" * 100_000])
def test_config_json_that_is_not_an_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_model(folder)


def test_an_index_that_names_missing_or_foreign_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
    )
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002.*fetch the whole model again"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(ModelFileError, match="outside the folder"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(ModelFileError, match="weight_map"):
        load_model(folder)


def test_a_broken_tokenizer_is_found_when_it_is_asked_for(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    model = load_model(folder)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is not a usable tokenizer"):
        model.require_tokenizer()


def test_a_folder_without_a_tokenizer_runs_on_token_ids(folder: Path) -> None:
    model = load_model(folder)
    assert model.tokenizer is None
    with pytest.raises(RequestError, match="pass prompts as lists of token ids"):
        model.require_tokenizer()


# -- tensors --------------------------------------------------------------------------------------------------------


def test_a_missing_tensor(folder: Path) -> None:
    tensors = tiny_tensors(TINY)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (60, 32)),
        ("model.layers.0.self_attn.k_proj.weight", (32, 16)),
        ("model.layers.1.mlp.down_proj.weight", (32, 47)),
        ("model.norm.weight", (33,)),
        ("lm_head.weight", (61, 8, 4)),
    ],
)
def test_a_tensor_of_the_wrong_shape(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = {**tiny_tensors(TINY), name: np.zeros(shape, np.float32)}
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelFileError, match=rf"{name}.*the files do not belong together"):
        load_model(folder)


def test_a_type_that_is_not_read(folder: Path) -> None:
    import safetensors.numpy

    tensors = tiny_tensors(TINY)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].astype(np.float64)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match="type F64; bifolio reads F32, F16, BF16"):
        load_model(folder)


def test_tensors_that_nobody_asks_for_do_no_harm(folder: Path, tmp_path: Path) -> None:
    import safetensors.numpy

    expected = load_folder(folder)
    tensors = {**tiny_tensors(TINY), "extra.positions": np.arange(7)}
    larger = shutil.copytree(folder, tmp_path / "larger")  # the file of `expected` stays mapped
    safetensors.numpy.save_file(tensors, larger / "model.safetensors")
    found = load_folder(larger)
    for ours, theirs in zip(found.weights.layers, expected.weights.layers, strict=True):
        np.testing.assert_array_equal(ours.qkv.parts[0].dequantize(), theirs.qkv.parts[0].dequantize())


def test_names_without_the_base_prefix_are_understood(folder: Path) -> None:
    expected = load_folder(folder)
    tensors = {name.removeprefix("model."): value for name, value in tiny_tensors(TINY).items()}
    write_safetensors(folder / "model.safetensors", tensors)
    found = load_folder(folder)
    for ours, theirs in zip(found.weights.layers, expected.weights.layers, strict=True):
        np.testing.assert_array_equal(ours.qkv.parts[0].dequantize(), theirs.qkv.parts[0].dequantize())


def test_a_folder_by_numpy_and_one_by_safetensors_give_the_same_logits(folder: Path, tmp_path: Path) -> None:
    import safetensors.numpy

    other = shutil.copytree(folder, tmp_path / "other")
    safetensors.numpy.save_file(tiny_tensors(TINY), other / "model.safetensors")
    logits = []
    for path in (folder, other):
        runner, blocks = make_runner(load_folder(path))
        logits.append(run_chunks(runner, open_entry(runner, blocks), [5, 6, 7], 3))
    np.testing.assert_array_equal(*logits)


# -- configurations ---------------------------------------------------------------------------------------------------


def test_an_unsupported_architecture_is_refused_with_the_nearest_names(folder: Path) -> None:
    edit_config(folder, model_type="lama")
    with pytest.raises(UnsupportedModelError, match=r"'lama' is not supported; .*similar: llama.*docs/models.md"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": ...}, UnsupportedModelError, "None is not supported"),
        ({"hidden_act": "relu6"}, UnsupportedModelError, "activation 'relu6'"),
        ({"rope_scaling": {"rope_type": "quantum", "factor": 2.0}}, UnsupportedModelError, "rope scaling 'quantum'"),
        ({"vocab_size": ...}, ModelFileError, "vocab_size"),
        (
            {"vocab_size": "many"},
            ModelFileError,
            "vocab_size is .many.: .* integer from 1 .* in a llama model",
        ),
        ({"num_attention_heads": 0}, ModelFileError, "num_attention_heads is 0: it must be an integer from 1"),
        ({"num_key_value_heads": 3}, ModelFileError, "cannot share 3 key/value heads"),
        ({"num_hidden_layers": -1}, ModelFileError, "num_hidden_layers is -1: it must be an integer from 1"),
        ({"rope_theta": -1}, ModelFileError, "rope_theta is -1: it must be a positive number"),
        ({"rope_theta": float("inf")}, ModelFileError, "rope_theta is inf: it must be a number"),
        ({"head_dim": 7}, ModelFileError, "even number of rotated dimensions"),
        ({"layer_types": 3}, ModelFileError, "layer_types is 3: it must be a list of texts in a qwen2 model"),
        ({"rope_scaling": [1]}, ModelFileError, r"rope_scaling is \[1\]: it must be an object"),
    ],
)
def test_a_configuration_that_cannot_be(folder: Path, changes: dict[str, Any], error: type, message: str) -> None:
    if "layer_types" in changes:
        changes = {**changes, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}
    edit_config(folder, **changes)
    with pytest.raises(error, match=message):
        load_model(folder)


def test_model_config_checks_its_lists() -> None:
    sizes = ("llama", 10, 16, 2, 2, 1, 8, 16, 32)
    rope = (RopeConfig(rotary_dim=8),)
    with pytest.raises(ConfigError, match="needs a rope"):
        ModelConfig(*sizes)
    with pytest.raises(ConfigError, match="layers has 3 entries for 2 layers"):
        ModelConfig(*sizes, ropes=rope, layers=layers_of(3, window=(1, 2, 3)))
    with pytest.raises(ConfigError, match="window has 3 entries for 2 layers"):
        layers_of(2, window=(1, 2, 3))
    with pytest.raises(ConfigError, match="does not exist"):
        ModelConfig(*sizes, ropes=rope, layers=layers_of(2, rope=(0, 1)))


def test_gemma_inside_a_multimodal_configuration() -> None:
    text = {**TINY, "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 8,
            "rope_local_base_freq": 10000.0, "sliding_window": 16}  # fmt: skip
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    assert config_from_hf(whole) == config_from_hf(text)


# -- what lies beside the weights -----------------------------------------------------------------------------------


def test_generation_defaults_and_ends_of_text(folder: Path) -> None:
    generation = {"eos_token_id": [2, 9], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = load_folder(folder)
    assert model.config.eos_token_ids == (2, 9)
    assert model.generation_config["temperature"] == 0.6


def test_chat_templates_and_special_tokens(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m", tokenizer=True, chat_template="from json")
    model = load_folder(folder)
    assert model.chat_template == "from json"
    assert model.special_tokens == {"eos_token": END_OF_TEXT}
    (folder / "chat_template.jinja").write_text("from a file")
    assert load_folder(folder).chat_template == "from a file"
    named = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
             "bos_token": {"content": "<s>"}}  # fmt: skip
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    model = load_folder(folder)
    assert (model.chat_template, model.special_tokens) == ("d", {"bos_token": "<s>"})


def test_the_tokenizer_is_that_of_the_folder(tmp_path: Path) -> None:
    model = load_folder(tiny_folder(tmp_path / "m", tokenizer=True))
    text = "Prefill reads 你好 🙂"
    ids = model.require_tokenizer().encode(text)
    assert ids == tiny_tokenizer().encode(text).ids
    assert model.require_tokenizer().decode(ids) == text
