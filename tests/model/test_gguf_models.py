"""Models through GGUF and back: every architecture, every format, against transformers and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_prompt import greedy_tokens, prompt_logits

from bifolio.errors import ConfigError, ModelFileError
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.folder_writer import folder_config, llama3_from_factors, write_folder
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.quant import QuantFormat
from bifolio.quant.formats import ENCODABLE_FORMATS
from helpers import tiny_folder
from moe_models import MOE_ARCHITECTURES
from tiny_models import ARCHITECTURES, tiny_transformers_model

pytestmark = pytest.mark.full  # transformers is slow to import
PROMPT = [1, 5, 17, 42, 8, 96, 33, 2, 71, 64, 11, 3]


def scaled_rope_model(name: str) -> Any:
    """Kinds of rope scaling that the common tiny models do not have."""
    import torch
    import transformers as tf

    common = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
              "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(3)
    if name == "gemma3-plain":  # attention scaled as llama.cpp does it, and the usual pattern of windows
        gemma = {**common, "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}
        return tf.AutoModelForCausalLM.from_config(tf.Gemma3TextConfig(**gemma)).eval()
    scalings: dict[str, dict[str, Any]] = {
        "linear": {"rope_type": "linear", "factor": 4.0},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 2.0,
                     "short_factor": [1.0 + i / 16 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]},
    }  # fmt: skip
    parameters = {"rope_theta": 10000.0, **scalings[name]}
    config_class = tf.Phi3Config if name == "longrope" else tf.Qwen2Config
    extra = {"original_max_position_embeddings": 64} if name == "longrope" else {}
    return tf.AutoModelForCausalLM.from_config(config_class(**common, **extra, rope_parameters=parameters)).eval()


def make_folder(name: str, folder: Path) -> Path:
    model = tiny_transformers_model(name) if name in ARCHITECTURES else scaled_rope_model(name)
    model.save_pretrained(folder)
    return folder


def transformers_logits(folder: Path) -> np.ndarray:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].float().numpy()


@pytest.mark.parametrize("name", [*ARCHITECTURES, "gemma3-plain", "linear", "yarn", "longrope"])
def test_folder_to_gguf_and_back_keeps_the_logits(name: str, tmp_path: Path) -> None:
    folder = make_folder(name, tmp_path / "folder")
    source = load_folder(folder)
    expected = prompt_logits(source.weights, PROMPT)

    write_gguf(tmp_path / "model.gguf", source, QuantFormat.F32)
    loaded = load_gguf(tmp_path / "model.gguf")
    np.testing.assert_allclose(prompt_logits(loaded.weights, PROMPT), expected, atol=1e-4, rtol=1e-4)
    assert loaded.config.bos_token_id is None or loaded.config.bos_token_id == source.config.bos_token_id

    write_folder(tmp_path / "back", loaded, QuantFormat.F32)
    back = load_folder(tmp_path / "back")
    np.testing.assert_allclose(prompt_logits(back.weights, PROMPT), expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(transformers_logits(tmp_path / "back"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
@pytest.mark.parametrize("format", ENCODABLE_FORMATS, ids=lambda format: format.name)
def test_every_format_holds_the_values_that_quantising_the_folder_gives(
    name: str, format: QuantFormat, tmp_path: Path
) -> None:
    source = load_folder(make_folder(name, tmp_path / "folder"))
    report = write_gguf(tmp_path / "model.gguf", source, format)
    loaded = load_gguf(tmp_path / "model.gguf")
    for old, new in zip(source.weights.layers, loaded.weights.layers, strict=True):
        assert new.down.parts[0].format is format
        expected = old.down.parts[0].converted(format).data
        assert np.array_equal(new.down.parts[0].data, expected)
    assert report.new_bytes == sum(tensor.new_bytes for tensor in report.tensors)
    assert report.new_bytes < (tmp_path / "model.gguf").stat().st_size


def test_quantised_rows_are_rearranged_without_requantising(tmp_path: Path) -> None:
    """A llama folder quantised on the way equals one that is quantised after it was rearranged."""
    source = load_folder(make_folder("llama", tmp_path / "folder"))
    write_gguf(tmp_path / "dense.gguf", source, QuantFormat.F32)
    write_gguf(tmp_path / "direct.gguf", source, QuantFormat.Q8_0)
    write_gguf(tmp_path / "later.gguf", load_gguf(tmp_path / "dense.gguf"), QuantFormat.Q8_0)
    direct, later = load_gguf(tmp_path / "direct.gguf"), load_gguf(tmp_path / "later.gguf")
    for one, other in zip(direct.weights.layers[0].qkv.parts, later.weights.layers[0].qkv.parts, strict=True):
        assert np.array_equal(one.data, other.data)


def test_an_existing_file_or_folder_is_kept(tmp_path: Path) -> None:
    source = load_folder(make_folder("qwen3", tmp_path / "folder"))
    (tmp_path / "model.gguf").write_bytes(b"precious")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("precious")
    with pytest.raises(ConfigError, match="--force"):
        write_gguf(tmp_path / "model.gguf", source, QuantFormat.F16)
    with pytest.raises(ConfigError, match="--force"):
        write_folder(tmp_path / "notes", source, QuantFormat.F16)
    with pytest.raises(ConfigError, match="not a model folder"):
        write_folder(tmp_path / "notes", source, QuantFormat.F16, overwrite=True)
    assert (tmp_path / "model.gguf").read_bytes() == b"precious"
    write_gguf(tmp_path / "model.gguf", source, QuantFormat.F16, overwrite=True)
    assert load_gguf(tmp_path / "model.gguf").config.architecture == "qwen3"
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "model.gguf", "notes"}


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    source = load_folder(make_folder("qwen3", tmp_path / "folder"))
    broken = np.full(source.config.hidden_size, np.nan, np.float32)
    object.__setattr__(source.weights.final_norm, "weight", broken)
    with pytest.raises(ModelFileError, match=r"output_norm\.weight holds NaN"):
        write_gguf(tmp_path / "model.gguf", source, QuantFormat.BF16)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_values_too_large_for_the_format_are_refused(tmp_path: Path) -> None:
    import torch

    model = tiny_transformers_model("qwen3")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 3] = 1e30
    model.save_pretrained(tmp_path / "folder")
    source = load_folder(tmp_path / "folder")
    for format in (QuantFormat.F16, QuantFormat.Q8_0, QuantFormat.Q4_1):
        with pytest.raises(ModelFileError, match=r"ffn_down\.weight holds values too large"):
            write_gguf(tmp_path / "model.gguf", source, format)
    write_gguf(tmp_path / "model.gguf", source, QuantFormat.BF16)


def test_folders_hold_dense_weights_only(tmp_path: Path) -> None:
    source = load_folder(make_folder("qwen3", tmp_path / "folder"))
    with pytest.raises(ConfigError, match=r"\.gguf"):
        write_folder(tmp_path / "out", source, QuantFormat.Q4_0)


def test_llama3_parameters_are_recovered_from_the_table(tmp_path: Path) -> None:
    source = load_folder(make_folder("llama3-rope", tmp_path / "folder"))
    write_gguf(tmp_path / "model.gguf", source, QuantFormat.F32)
    rope = load_gguf(tmp_path / "model.gguf").config.ropes[0]
    assert rope.scaling == "none"
    assert len(rope.frequency_factors) == 8
    recovered = llama3_from_factors(rope)
    assert (recovered.factor, recovered.original_max_position) == (8.0, 64)
    assert recovered.high_freq_factor == pytest.approx(4.0, rel=1e-3)
    assert folder_config(source.config) == source.config


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama3-rope", "qwen2", "qwen3", "gemma3-plain", "phi3", "yarn",
                                  *MOE_ARCHITECTURES])  # fmt: skip
def test_llama_cpp_gives_the_same_greedy_tokens(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python (extra: peers)")
    source = load_folder(make_folder(name, tmp_path / "folder"))
    write_gguf(tmp_path / "model.gguf", source, QuantFormat.F32)
    loaded = load_gguf(tmp_path / "model.gguf")
    peer = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=128, n_threads=1, verbose=False, logits_all=True)
    peer.eval(PROMPT)
    ours = prompt_logits(loaded.weights, PROMPT)
    # Its GELU is a table of halves, and its cache holds halves.
    np.testing.assert_allclose(ours, peer.scores[: len(PROMPT)], atol=0.05)
    theirs = [token for token, _ in zip(peer.generate(PROMPT, temp=0.0, top_k=1), range(8), strict=False)]
    assert greedy_tokens(loaded.weights, PROMPT, 8) == theirs


@pytest.mark.parametrize(
    ("controls", "ends"),
    [
        (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), {"<|im_end|>", "<|endoftext|>"}),
        (("<|assistant|>", "<|end|>"), {"<|end|>"}),
        (("<|start|>", "<|end|>", "<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),  # gpt-oss: several messages
        (("<|end|>", "<|calls|>", "<|flush|>"), {"<|calls|>", "<|flush|>"}),
        (("<|end|>", "<|return|>"), {"<|end|>", "<|return|>"}),
    ],
)
def test_control_tokens_of_known_names_end_an_answer(controls: tuple[str, ...], ends: set[str], tmp_path: Path) -> None:
    source = load_folder(tiny_folder())
    tokens = [f"t{number}" for number in range(source.config.vocab_size)]
    types = np.ones(len(tokens), np.int32)
    for place, control in enumerate(controls, 7):
        tokens[place], types[place] = control, 3
    tokens[3] = "<|eot_id|>"  # as plain text
    words = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    write_gguf(tmp_path / "m.gguf", source, QuantFormat.F32, extra={**words, "tokenizer.ggml.eos_token_id": 5})
    found = load_gguf(tmp_path / "m.gguf").config.eos_token_ids
    assert found[0] == 5
    assert {tokens[number] for number in found[1:]} == ends
