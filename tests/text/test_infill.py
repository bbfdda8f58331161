"""Prompts with a gap: the order of every family, context of other files, and marks that files declare."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.file_tokenizer import TokenType, Vocabulary
from bifolio.model.gguf.loader import open_gguf_model
from bifolio.model.gguf.reader import open_gguf
from bifolio.model.gguf.tokenizer import sentencepiece_tokenizer, special_tokens, tokenizer_from_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.quant.formats import QuantFormat
from bifolio.text.infill import SPELLINGS, ContextFile, InfillTokens, Spelling, infill_tokens
from bifolio.text.tokenizer import Tokenizer
from helpers import tiny_loaded, tiny_tokenizer
from infill_models import QWEN, infill_tokenizer, names_of

ORDERS = {
    "<|fim_prefix|>": "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>",
    "<fim_prefix>": "<fim_prefix>A<fim_suffix>B<fim_middle>",
    "<fim-prefix>": "<fim-prefix>A<fim-suffix>B<fim-middle>",
    "<｜fim▁begin｜>": "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>",
    "▁<PRE>": "▁<PRE>A▁<SUF>B▁<MID>",
    "<PRE>": "<PRE>A<SUF>B<MID>",
    "<|code_prefix|>": "<|code_prefix|>A<|code_suffix|>B<|code_middle|>",
    "<|prefix|>": "<|prefix|>A<|suffix|>B<|middle|>",
    "<[fim-prefix]>": "<[fim-suffix]>B<[fim-prefix]>A<[fim-middle]>",
    "[PREFIX]": "[SUFFIX]B[PREFIX]A",
}


def marked(spelling: Spelling = QWEN) -> tuple[Tokenizer, InfillTokens]:
    tokenizer = Tokenizer(infill_tokenizer(spelling))
    found = infill_tokens(tokenizer, {})
    assert found is not None
    return tokenizer, found


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.prefix)
def test_the_order_of_each_family(spelling: Spelling) -> None:
    tokenizer, marks = marked(spelling)
    prompt = marks.prompt(tokenizer, "A", "B")
    assert text_of(tokenizer, prompt) == ORDERS[spelling.prefix]
    assert {tokenizer.token_id(name) for name in names_of(spelling)} == set(marks.ends)
    tokens = tokenizer.encode("A")
    assert marks.prompt(tokenizer, tokens, "B") == prompt


def test_a_vocabulary_without_marks() -> None:
    assert infill_tokens(Tokenizer(tiny_tokenizer()), {}) is None


def test_spelled_marks_in_a_text_are_text() -> None:
    tokenizer, marks = marked()
    text = "x = '<|fim_suffix|>'\n"
    prompt = marks.prompt(tokenizer, text, "<|endoftext|>")
    assert prompt.count(marks.suffix) == prompt.count(marks.prefix) == prompt.count(marks.middle or 0) == 1
    assert 0 not in prompt
    assert text_of(tokenizer, prompt) == f"<|fim_prefix|>{text}<|fim_suffix|><|endoftext|><|fim_middle|>"


def test_the_start_of_a_text_comes_before_the_marks() -> None:
    from tokenizers import processors

    backend = infill_tokenizer(QWEN)
    start = ("<|endoftext|>", 0)
    backend.post_processor = processors.TemplateProcessing(single=[start[0], "$A"], special_tokens=[start])
    tokenizer = Tokenizer(backend)
    marks = infill_tokens(tokenizer, {})
    assert marks is not None
    assert marks.prompt(tokenizer, "A", "B")[:2] == [0, marks.prefix]
    assert marks.prompt(tokenizer, "A", "B", add_special_tokens=False)[0] == marks.prefix


def test_other_files_come_first() -> None:
    files = [ContextFile("a.py", "one\n"), ContextFile("b.py", "two\n")]
    tokenizer, marks = marked()
    tokens, is_cut = marks.prompt_with_context(tokenizer, "A", "B", files, 500)
    assert text_of(tokenizer, tokens) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\none\n<|file_sep|>b.py\ntwo\n<|file_sep|>filename\n"
        "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>"
    )
    assert not is_cut
    tokenizer, marks = marked(SPELLINGS[3])
    tokens, _ = marks.prompt_with_context(tokenizer, "A", "B", files, 500)
    snippets = "\n\n--- snippet ---\n\none\n\n\n--- snippet ---\n\ntwo\n"
    assert text_of(tokenizer, tokens) == f"{snippets}<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>"


@pytest.mark.parametrize("room", range(3, 60, 4))
def test_a_prompt_that_is_too_long_loses_the_text_far_from_the_gap(room: int) -> None:
    tokenizer, marks = marked()
    before, after, file = "0123456789" * 3, "abcdefghijklmnopqrst", ContextFile("f", "c")
    tokens, is_cut = marks.prompt_with_context(tokenizer, before, after, [file], room)
    text = text_of(tokenizer, tokens)
    assert is_cut
    assert len(tokens) == room
    head, _, rest = text.partition("<|fim_prefix|>")
    prefix, _, suffix = rest.removesuffix("<|fim_middle|>").partition("<|fim_suffix|>")
    assert before.endswith(prefix)
    assert after.startswith(suffix)
    assert not head or (prefix, suffix) == (before, after)
    assert len(tokenizer.encode(prefix)) >= len(tokenizer.encode(suffix)) - 1


def test_marks_that_the_files_declare() -> None:
    tokenizer = Tokenizer(tiny_tokenizer())
    names = {name: tokenizer.token(5 + number) for number, name in enumerate(("prefix", "suffix", "middle"))}
    marks = infill_tokens(tokenizer, {f"{name}_token": text for name, text in names.items()})
    assert marks is not None
    assert marks.prompt(tokenizer, [60], "") == [5, 60, 6, 7]


def test_keys_of_a_gguf_file(tmp_path: Path) -> None:
    """The writer declares the marks that a folder declares, and older files declare them by other keys."""
    model = tiny_loaded(tokenizer=True)
    tokenizer = model.require_tokenizer()
    declared = {"prefix_token": 5, "suffix_token": 6, "middle_token": 7, "fim_sep_token": 8}
    named = replace(model, special_tokens={name: tokenizer.token(number) for name, number in declared.items()})
    write_gguf(tmp_path / "new.gguf", named, QuantFormat.F32)
    keys = {f"tokenizer.ggml.{name}_id": number for name, number in declared.items() if name != "fim_sep_token"}
    write_gguf(tmp_path / "old.gguf", model, QuantFormat.F32, extra=keys)
    metadata = open_gguf(tmp_path / "new.gguf").metadata
    assert [metadata[f"tokenizer.ggml.fim_{key}_token_id"] for key in ("pre", "suf", "mid", "sep")] == [5, 6, 7, 8]
    for name, file_mark in (("new", 8), ("old", None)):
        marks = open_gguf_model(tmp_path / f"{name}.gguf").text.infill
        assert marks is not None
        assert (marks.prefix, marks.suffix, marks.middle, marks.file) == (5, 6, 7, file_mark)


def test_a_text_after_the_marks_has_no_space_that_the_tokenizer_adds() -> None:
    names = ["<unk>", "<s>", "▁", "a", "b", "▁a", "▁b", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", "☺"]
    types = np.full(len(names), TokenType.NORMAL, np.int32)
    types[0], types[1], types[7:11] = TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL
    tokenizer = sentencepiece_tokenizer(Vocabulary(names, types, -np.arange(len(names), dtype=np.float32)), bos=1)
    marks = infill_tokens(tokenizer, {})
    assert marks is not None
    assert marks.prompt(tokenizer, "a b", "b a") == [1, 7, 5, 6, 8, 4, 5, 9]
    assert marks.ends == (7, 8, 9, 10)


def test_the_vocabulary_of_starcoder() -> None:
    path = Path(os.environ.get("BIFOLIO_TEST_DATA", "missing")) / "vocab/ggml-vocab-starcoder.gguf"
    if not path.is_file():
        pytest.skip("the vocabulary of StarCoder is not here")
    file = open_gguf(path)
    tokenizer = tokenizer_from_gguf(file)
    marks = infill_tokens(tokenizer, special_tokens(Metadata(file.metadata, path), tokenizer.vocab_size))
    assert marks is not None
    assert (marks.prefix, marks.middle, marks.suffix) == (1, 2, 3)
    prompt = marks.prompt(tokenizer, "def f(x):\n    ", "\n    return y")
    assert text_of(tokenizer, prompt) == "<fim_prefix>def f(x):\n    <fim_suffix>\n    return y<fim_middle>"
