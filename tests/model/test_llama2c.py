"""llama2.c files: the published story, and damaged headers."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from whole_prompt import greedy_tokens, prompt_logits

from bifolio.errors import ModelFileError
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.llama2c import load_llama2c, read_tokenizer
from bifolio.quant import QuantFormat

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine."


def write_model(path: Path, *, tied: bool = True, with_rope: bool = True) -> dict[str, np.ndarray]:
    """A file as llama2.c's exporter lays it out: dim 32, hidden 48, 2 layers, 4 heads, 2 kv heads, 40 tokens, 16."""
    d, ffn, layers, kv, vocabulary, context, head_dim = 32, 48, 2, 16, 40, 16, 8
    generator = np.random.default_rng(0)
    shapes = {"emb": (vocabulary, d), "an": (layers, d), "wq": (layers, d, d), "wk": (layers, kv, d),
              "wv": (layers, kv, d), "wo": (layers, d, d), "fn": (layers, d), "w1": (layers, ffn, d),
              "w2": (layers, d, ffn), "w3": (layers, ffn, d), "norm": (d,)}  # fmt: skip
    if with_rope:
        shapes["rope"] = (2, context, head_dim // 2)
    if not tied:
        shapes["head"] = (vocabulary, d)
    arrays = {name: generator.standard_normal(shape).astype(np.float32) * 0.2 for name, shape in shapes.items()}
    header = struct.pack("<7i", d, ffn, layers, 4, 2, vocabulary if tied else -vocabulary, context)
    path.write_bytes(header + b"".join(array.tobytes() for array in arrays.values()))
    return arrays


def test_stories15m_tells_its_story(models_dir: Path) -> None:
    model = load_llama2c(models_dir / "stories15M.bin")
    tokenizer = model.require_tokenizer()
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("Once upon a time") == [1, 9038, 2501, 263, 931]
    ids = tokenizer.encode(STORY)
    chosen = prompt_logits(model.weights, ids[:-1]).argmax(axis=-1).tolist()
    assert chosen == ids[1:]  # each greedy step, seen in one pass
    assert greedy_tokens(model.weights, ids, 3) == tokenizer.encode(" One day, she", add_special_tokens=False)[1:4]


def test_tokens_are_those_of_the_same_vocabulary_in_gguf(models_dir: Path, data_dir: Path) -> None:
    """The stories were trained with Llama's tokens, which llama.cpp's test files hold as well."""
    tokenizer = read_tokenizer(models_dir / "stories15M.tokenizer.bin", 32000)
    path = data_dir / "vocab" / "ggml-vocab-llama-spm.gguf"
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    for text, line in zip(texts, Path(f"{path}.out").read_text().split("\n"), strict=False):
        ids = [int(token) for token in line.split()]
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_taken_from_its_place(tied: bool, tmp_path: Path) -> None:
    arrays = write_model(tmp_path / "m.bin", tied=tied)
    model = load_llama2c(tmp_path / "m.bin")
    config, weights = model.config, model.weights
    assert (config.hidden_size, config.num_kv_heads, config.vocab_size) == (32, 2, 40)
    assert config.tie_embeddings is tied
    assert np.array_equal(weights.embedding.dequantize(), arrays["emb"])
    for index, layer in enumerate(weights.layers):
        matrices = [*layer.qkv.parts, *layer.output.parts, *layer.up.parts, *layer.down.parts]
        for tensor, name in zip(matrices, ("wq", "wk", "wv", "wo", "w1", "w3", "w2"), strict=True):
            assert np.array_equal(tensor.dequantize(), arrays[name][index]), name
        assert np.array_equal(layer.attention_norm.weight, arrays["an"][index])
        assert np.array_equal(layer.mlp_norm.weight, arrays["fn"][index])
    assert np.array_equal(weights.final_norm.weight, arrays["norm"])
    assert np.array_equal(weights.head.parts[0].dequantize(), arrays["emb" if tied else "head"])


def test_through_gguf_the_logits_stay_the_same(tmp_path: Path) -> None:
    write_model(tmp_path / "m.bin", tied=False)
    model = load_llama2c(tmp_path / "m.bin")
    write_gguf(tmp_path / "m.gguf", model, QuantFormat.F32)
    ids = [1, 5, 9, 20, 33]
    logits = prompt_logits(load_gguf(tmp_path / "m.gguf").weights, ids)
    np.testing.assert_allclose(logits, prompt_logits(model.weights, ids), atol=1e-5)


def test_the_tables_of_rope_may_be_absent(tmp_path: Path) -> None:
    write_model(tmp_path / "m.bin", with_rope=False)
    assert load_llama2c(tmp_path / "m.bin").config.max_position == 16


@pytest.mark.parametrize(("index", "value"), [(0, 0), (0, 33), (1, -1), (2, 2**31 - 1), (3, 5), (4, 3), (5, 0), (6, 0)])
def test_sizes_that_do_not_fit_are_refused(index: int, value: int, tmp_path: Path) -> None:
    write_model(tmp_path / "m.bin")
    content = bytearray((tmp_path / "m.bin").read_bytes())
    content[4 * index : 4 * index + 4] = struct.pack("<i", value)
    (tmp_path / "m.bin").write_bytes(content)
    with pytest.raises(ModelFileError):
        load_llama2c(tmp_path / "m.bin")


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m.bin", with_rope=False)
    content = (tmp_path / "m.bin").read_bytes()
    for length in (0, 10, 28, 1000, len(content) - 1):
        (tmp_path / "cut.bin").write_bytes(content[:length])
        with pytest.raises(ModelFileError):
            load_llama2c(tmp_path / "cut.bin")


def test_damaged_tokenizers_are_refused(models_dir: Path, tmp_path: Path) -> None:
    whole = (models_dir / "stories15M.tokenizer.bin").read_bytes()
    for content in (whole[:1000], whole[:-1], whole[:8] + struct.pack("<i", -5) + whole[12:], b"\0"):
        (tmp_path / "t.bin").write_bytes(content)
        with pytest.raises(ModelFileError):
            read_tokenizer(tmp_path / "t.bin", 32000)


def test_the_tokenizer_lies_beside_the_model(models_dir: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "m.bin")
    assert load_llama2c(tmp_path / "m.bin").tokenizer is None
    shutil.copy(models_dir / "stories15M.tokenizer.bin", tmp_path / "tokenizer.bin")
    assert load_llama2c(tmp_path / "m.bin").require_tokenizer().vocab_size == 40
