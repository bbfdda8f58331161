"""`tokenizer.model` of a folder against the sentencepiece library."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.errors import BifolioError, ModelFileError, UnsupportedModelError
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.huggingface.sentencepiece_file import read_tokenizer
from helpers import CORPUS, tiny_folder

LLAMA = {"model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "normalization_rule_name": "identity",
         "remove_extra_whitespaces": False, "split_digits": True}  # fmt: skip
LETTERS = "abcdefghij THE once upon a time  \n\t0123 äöü你好мир🙂.,!?▁"
TEXTS = [*CORPUS, "", " ", "  two  spaces ", "a\n\nb", "▁meta", "🙂🙂", "Grüße\tund 12345"]


@cache
def trained(**options: Any) -> bytes:
    library = pytest.importorskip("sentencepiece", reason="the library that defines the results")
    file = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=file, minloglevel=2, hard_vocab_limit=False, **options
    )
    return file.getvalue()


def written(folder: Path, content: bytes) -> Path:
    (folder / "tokenizer.model").write_bytes(content)
    return folder / "tokenizer.model"


def oracle(content: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=content)


@pytest.mark.parametrize("options", [LLAMA, {**LLAMA, "add_dummy_prefix": False}, {"vocab_size": 120}],
                         ids=["bpe", "bpe without a space in front", "unigram"])  # fmt: skip
def test_texts_are_encoded_as_the_library_does(options: dict[str, Any], tmp_path: Path) -> None:
    content = trained(**options)
    tokenizer, theirs = read_tokenizer(written(tmp_path, content), {"add_bos_token": False}), oracle(content)
    rng = random.Random(0)
    texts = TEXTS + ["".join(rng.choices(LETTERS, k=rng.randrange(40))) for _ in range(200)]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text), text
        if theirs.unk_id() not in ids:
            assert tokenizer.decode(ids) == theirs.decode(ids), text


def test_a_folder_without_tokenizer_json_reads_it(tmp_path: Path) -> None:
    content = trained(**LLAMA)
    size = oracle(content).get_piece_size()
    folder = tiny_folder(tmp_path / "m", vocab_size=size + 3)
    written(folder, content)
    added = {str(size + 1): {"content": "<|user|>", "special": True}, str(size + 2): {"content": "<tool>"}}
    settings = {"add_bos_token": True, "bos_token": "<s>", "eos_token": {"content": "<|user|>"}, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "added_tokens_decoder": added}))
    tokenizer = load_folder(folder).require_tokenizer()
    plain = tokenizer.encode("Once upon", add_special_tokens=False)
    assert plain == oracle(content).encode("Once upon")
    assert tokenizer.encode("Once upon") == [1, *plain, size + 1]
    assert tokenizer.encode("<|user|>", add_special_tokens=False) == [size + 1]
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [size + 2]
    assert tokenizer.decode([size + 1, *plain]) == "Once upon"
    assert tokenizer.vocab_size == size + 3


def test_models_that_change_the_text_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, trained(model_type="bpe", vocab_size=120))
    with pytest.raises(UnsupportedModelError, match="a SentencePiece BPE model that normalises text"):
        read_tokenizer(path, {})
    with pytest.raises(UnsupportedModelError, match="models of words or characters"):
        read_tokenizer(written(tmp_path, trained(model_type="char", vocab_size=60)), {})


@pytest.mark.parametrize("content", [b"", b"\x00", b"\xff" * 40, b"\x0a\x05abc", b"version https://git-lfs.github.com"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.model is not a usable SentencePiece model"):
        read_tokenizer(written(tmp_path, content), {})


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_files_end_in_a_clear_error(data: st.DataObject) -> None:
    content = bytearray(trained(**LLAMA))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    path = written(scratch_folder(), bytes(content))
    message = "tokenizer.model"
    try:
        read_tokenizer(path, {}).encode("Once upon a time")
    except BifolioError as error:
        message = str(error)
    assert "tokenizer.model" in message


@cache
def scratch_folder() -> Path:
    return tiny_folder()
