"""Files of several formats: which matrix gets which, what they hold, and importance matrices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from bifolio.cli.main import build_app
from bifolio.errors import ConfigError, ModelFileError
from bifolio.kernels.native import NativeKernels
from bifolio.measure.importance import column_sums
from bifolio.model.gguf.imatrix import read_importance, write_importance
from bifolio.model.gguf.mixes import MIXES, parse_mix
from bifolio.model.gguf.reader import open_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from helpers import make_runner, open_entry, run_chunks

pytestmark = pytest.mark.full

SEARCHED = ["q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs"]


def formats(path: Path) -> dict[str, str]:
    return {entry.name: entry.format.name for entry in open_gguf(path).entries.values() if len(entry.shape) > 1}


def test_names_of_mixes() -> None:
    assert parse_mix(" Q4_K_M ") is MIXES["q4_k_m"]
    assert parse_mix("q4_k") is MIXES["q4_k_m"]
    with pytest.raises(ConfigError, match=r"there is no format 'q9'.*q4_k_m"):
        parse_mix("q9")


@pytest.mark.full
@pytest.mark.parametrize("name", SEARCHED)
def test_files_hold_the_values_of_their_source(name: str, tmp_path: Path) -> None:
    source = load_model("stories")
    write_gguf(tmp_path / "m.gguf", source, parse_mix(name))
    file = open_gguf(tmp_path / "m.gguf")
    assert file.metadata["general.file_type"] == MIXES[name].file_type
    assert any(f.startswith(("Q4", "Q5", "Q6", "Q8", "IQ4")) for f in formats(tmp_path / "m.gguf").values())
    found = load_model(tmp_path / "m.gguf").weights
    for ours, theirs in zip(found.matrices(), source.weights.matrices(), strict=True):
        expected, values = theirs.dequantize(), ours.dequantize()  # type: ignore[union-attr]
        assert np.linalg.norm(values - expected) < 0.12 * np.linalg.norm(expected)


def test_the_layers_that_get_more_bits(tmp_path: Path) -> None:
    """By the rule of llama.cpp: the first and the last eighth, and every third layer between."""
    from bifolio.config import ModelConfig
    from bifolio.model.export import NamedTensor
    from bifolio.quant import QuantFormat, QuantizedTensor

    config = load_model("stories").config
    layers = 16
    wide = ModelConfig(**{**{f: getattr(config, f) for f in config.__dataclass_fields__}, "num_layers": layers,
                          "layers": ()})  # fmt: skip
    tensor = QuantizedTensor(QuantFormat.F32, np.zeros((2, 1024), np.uint8), (2, 256))

    def kinds(mix: str, role: str) -> list[str]:
        named = [NamedTensor(f"blk.{i}.{role}.weight", tensor, "matrix") for i in range(layers)]
        return [parse_mix(mix).format_of(source, wide, has_importance=False).name for source in named]

    more = [i for i, kind in enumerate(kinds("q4_k_m", "ffn_down")) if kind == "Q6_K"]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15]
    assert kinds("q4_k_m", "attn_v") == kinds("q4_k_m", "ffn_down")
    assert set(kinds("q4_k_m", "attn_q")) == {"Q4_K"}
    assert Counter(kinds("q5_k_m", "ffn_down")) == {"Q6_K": 8, "Q5_K": 8}
    assert kinds("q4_k_s", "attn_v") == ["Q5_K"] * 4 + ["Q4_K"] * 12
    assert kinds("q4_k_s", "ffn_down") == ["Q5_K"] * 2 + ["Q4_K"] * 14
    assert set(kinds("q6_k", "ffn_down")) == {"Q6_K"}
    assert kinds("iq4_xs", "ffn_down") == ["Q5_K"] * 2 + ["IQ4_XS"] * 14
    short = QuantizedTensor(QuantFormat.F32, np.zeros((2, 384), np.uint8), (2, 96))
    for mix, fallback in {"q4_k_m": "Q5_0", "q5_k_s": "Q5_1", "q6_k": "Q8_0", "iq4_xs": "IQ4_NL"}.items():
        source = NamedTensor("blk.2.attn_q.weight", short, "matrix")
        assert parse_mix(mix).format_of(source, wide, has_importance=False).name == fallback


def test_importance_is_the_mean_square_of_the_inputs(tmp_path: Path) -> None:
    """The first layer reads normed embeddings, which can be computed from the weights alone."""
    model = load_model("stories")
    text = "Once upon a time there was a little girl who liked to play in the garden with her dog. " * 40
    columns, windows = column_sums(model, NativeKernels(1, activations="int16"), text, window=64, max_windows=3)
    assert windows == 3
    target = tmp_path / "i.gguf"
    write_importance(target, columns.sums, columns.counts, dataset="t", chunks=windows, chunk_size=64)
    found = read_importance(target)
    weights = model.weights
    tokens = model.require_tokenizer().encode(text)[: 3 * 64]
    x = weights.embedding.dequantize_rows(np.array(tokens))  # type: ignore[union-attr]
    norm = weights.layers[0].attention_norm
    normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + norm.eps) * norm.weight
    np.testing.assert_allclose(found["blk.0.attn_q.weight"], (normed**2).mean(axis=0), rtol=1e-3)
    assert np.array_equal(found["blk.0.attn_k.weight"], found["blk.0.attn_q.weight"])
    names = {f"blk.{i}.{part}.weight" for i in range(model.config.num_layers)
             for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}  # fmt: skip
    assert set(found) == names
    reader = gguf.GGUFReader(target)  # as other programs read it
    assert {t.name for t in reader.tensors} == {n + end for n in names for end in (".in_sum2", ".counts")}


def test_a_file_that_is_no_importance_matrix_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", load_model("stories"), parse_mix("q8_0"))
    with pytest.raises(ModelFileError, match="no importance matrix"):
        read_importance(tmp_path / "m.gguf")


@pytest.mark.full
@pytest.mark.parametrize("name", ["q4_k_m", "q6_k", "iq4_xs"])
def test_llama_cpp_reads_the_file(name: str, tmp_path: Path) -> None:
    """Logits over a short text agree up to the rounding of activations."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = tmp_path / "m.gguf"
    write_gguf(path, load_model("stories"), parse_mix(name))
    text = "Once upon a time there was a little girl who liked to play in the garden."
    model = load_model(path)
    tokens = model.require_tokenizer().encode(text)
    theirs = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
    theirs.eval(tokens)
    expected = np.asarray(theirs.scores[: len(tokens)])
    runner, blocks = make_runner(model, kernels=NativeKernels(1, activations="int16"))
    found = run_chunks(runner, open_entry(runner, blocks), tokens, 64)
    agree = (found.argmax(axis=1) == expected.argmax(axis=1)).mean()
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)
    assert agree > 0.9


@pytest.mark.full
def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "t.txt"
    text.write_text("Lily and Tom went to the park. They saw a big tree and a small bird. " * 60)
    app = build_app(["imatrix", "quantize"])
    importance, target = tmp_path / "i.gguf", tmp_path / "m.gguf"
    app(["imatrix", "stories", str(text), str(importance), "--window", "64", "--windows", "2", "--threads", "1"])
    assert "2 windows of 64 tokens" in capsys.readouterr().out
    app(["quantize", "stories", str(target), "--format", "q4_k_m", "--imatrix", str(importance)])
    plain = tmp_path / "p.gguf"
    app(["quantize", "stories", str(plain), "--format", "q4_k_m"])
    assert formats(plain) == formats(target)
    assert plain.read_bytes() != target.read_bytes()
