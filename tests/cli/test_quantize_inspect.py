"""`bifolio quantize` and `bifolio inspect` from the outside."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from bifolio.cli.main import build_app
from bifolio.errors import BifolioError
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.huggingface.hf_loader import load_folder
from cli_runner import CliRunner


def bifolio(*arguments: str | Path) -> str:
    """Standard output of a command that must succeed; the errors meant for people come out as exceptions."""
    result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments])
    if isinstance(result.exception, BifolioError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A random llama2.c model: 64 wide, 2 layers, 64 tokens, with a vocabulary of single letters beside it."""
    d, ffn, layers, kv, vocabulary = 64, 96, 2, 32, 300
    count = vocabulary * d + layers * (2 * d + 2 * d * d + 2 * kv * d + 3 * ffn * d) + d
    values = np.random.default_rng(0).standard_normal(count).astype(np.float32) * np.float32(0.1)
    (tmp_path / "m.bin").write_bytes(struct.pack("<7i", d, ffn, layers, 4, 2, vocabulary, 64) + values.tobytes())
    tokens = [b"<unk>", b"<s>", b"</s>", *(bytes([byte]) for byte in range(256))]
    tokens += [chr(ord("a") + i).encode() for i in range(26)] + [b" ", b"th", b"he", b"the", b"in", b"er", b"an"]
    tokens += [b"x%d" % i for i in range(vocabulary - len(tokens))]
    entries = b"".join(struct.pack("<fi", -float(i), len(token)) + token for i, token in enumerate(tokens))
    (tmp_path / "tokenizer.bin").write_bytes(struct.pack("<i", 8) + entries)
    return tmp_path / "m.bin"


def test_any_kind_of_model_becomes_any_other(source: Path, tmp_path: Path) -> None:
    output = bifolio("quantize", source, tmp_path / "a.gguf", "--format", "q4_0")
    assert "Q4_0" in output
    assert load_gguf(tmp_path / "a.gguf").weights.layers[0].down.parts[0].format.name == "Q4_0"
    bifolio("quantize", tmp_path / "a.gguf", tmp_path / "folder", "--format", "bf16")
    assert load_folder(tmp_path / "folder").weights.layers[0].down.parts[0].format.name == "BF16"
    bifolio("quantize", tmp_path / "folder", tmp_path / "b.gguf", "--format", "q8_0")
    bifolio("quantize", tmp_path / "b.gguf", tmp_path / "c.gguf", "--format", "f16")
    first, last = load_gguf(tmp_path / "a.gguf"), load_gguf(tmp_path / "c.gguf")
    ids = first.require_tokenizer().encode("the hen and the ant")
    assert last.require_tokenizer().encode("the hen and the ant") == ids
    assert last.require_tokenizer().decode(ids) == "the hen and the ant"
    assert last.config.eos_token_ids == first.config.eos_token_ids


def test_perplexity_before_and_after(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the hen and the ant in the inner den " * 8)
    output = bifolio("quantize", source, tmp_path / "a.gguf", "-f", "f32", "--eval", text)
    before, after = (float(part.split()[0]) for part in output.split("\nperplexity ")[1].split(","))
    assert before == pytest.approx(after, rel=1e-3)
    assert 10 < before < 10_000  # random weights: about as many choices as tokens


def test_an_existing_target_is_kept_without_force(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("precious")
    with pytest.raises(BifolioError, match="--force"):
        bifolio("quantize", source, tmp_path / "a.gguf", "--format", "q8_0")
    assert (tmp_path / "a.gguf").read_text() == "precious"
    bifolio("quantize", source, tmp_path / "a.gguf", "--format", "q8_0", "--force")
    assert load_gguf(tmp_path / "a.gguf").config.hidden_size == 64


def test_unknown_formats_and_quantised_folders_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BifolioError, match="q4_0"):
        bifolio("quantize", source, tmp_path / "a.gguf", "--format", "q5_9")
    with pytest.raises(BifolioError, match=r"\.gguf"):
        bifolio("quantize", source, tmp_path / "folder", "--format", "q4_0")


def test_inspect_shows_metadata_tensors_formats_and_plan(source: Path, tmp_path: Path) -> None:
    bifolio("quantize", source, tmp_path / "a.gguf", "--format", "q4_1")
    shown = bifolio("inspect", tmp_path / "a.gguf")
    for expected in ("llama.embedding_length", "blk.1.ffn_down.weight", "64 x 96", "Q4_1", "KV per token"):
        assert expected in shown
    record = json.loads(bifolio("inspect", tmp_path / "a.gguf", "--json"))
    assert record["metadata"]["llama.block_count"] == 2
    assert record["metadata"]["tokenizer.ggml.tokens"]["length"] == 300
    assert record["formats"]["Q4_1"]["tensors"] == 14
    assert record["total_bytes"] == sum(tensor["nbytes"] for tensor in record["tensors"])
    assert record["memory_plan"]["weight_bytes"] > 0


def test_inspect_reads_folders_and_llama2c_files(source: Path, tmp_path: Path) -> None:
    record = json.loads(bifolio("inspect", source, "--json"))
    assert (record["kind"], record["metadata"]["hidden_size"]) == ("llama2.c", 64)
    bifolio("quantize", source, tmp_path / "folder", "--format", "f16")
    record = json.loads(bifolio("inspect", tmp_path / "folder", "--json"))
    assert record["metadata"]["model_type"] == "llama"
    assert set(record["formats"]) == {"F16"}


def test_inspect_looks_into_files_it_cannot_run(data_dir: Path) -> None:
    shown = bifolio("inspect", data_dir / "vocab" / "ggml-vocab-falcon.gguf")
    assert "falcon.context_length" in shown
    assert "cannot run" in shown
