"""Incremental detokenisation against whole-text decoding by `tokenizers`, for the two families of tokenizers."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.text.detokenizer import IncrementalDetokenizer
from bifolio.text.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again and again",
    "Grüße aus Köln! Ça va? こんにちは世界 привет мир 你好 안녕하세요",
    "🙂🙃👩‍👩‍👧‍👦🏳️‍🌈 emoji and  double  spaces\n\n\ttabs",
] * 20


@cache
def byte_level():
    """A byte-level BPE with few merges, so that characters are often spread over tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def byte_fallback():
    """A tokenizer as SentencePiece models are converted: metaspace, unknown characters as byte tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    letters = [chr(code) for code in range(33, 127)] + list("éüß世界")
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *letters]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("a", "n"), ("an", "d"), ("▁", "▁"), ("i", "n")]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def new_detokenizer(tokenizer, prompt: list[int] | None = None, skip: bool = True) -> IncrementalDetokenizer:
    return Tokenizer(tokenizer).new_detokenizer(prompt or [], skip)


FAMILIES = pytest.mark.parametrize("make", [byte_level, byte_fallback])


def push_all(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@FAMILIES
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(deadline=None, max_examples=150)
def test_pieces_make_the_whole_text(make, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text).ids
    pieces = push_all(new_detokenizer(tokenizer), ids)
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@FAMILIES
@given(
    prompt=st.text(st.sampled_from("the and 世é🙂x "), max_size=30),
    text=st.text(st.sampled_from("the and 世é🙂x \n"), max_size=40),
)
@settings(deadline=None, max_examples=150)
def test_text_after_a_prompt_keeps_its_first_space(make, prompt: str, text: str) -> None:
    tokenizer = make()
    prompt_ids, ids = tokenizer.encode(prompt).ids, tokenizer.encode(text).ids
    pieces = push_all(new_detokenizer(tokenizer, prompt_ids), ids)
    assert tokenizer.decode(prompt_ids) + "".join(pieces) == tokenizer.decode(prompt_ids + ids)


@pytest.mark.full
@given(ids=st.lists(st.integers(2, 419), max_size=120))
@settings(deadline=None, max_examples=200)
def test_any_bytes_give_the_text_of_all_tokens(ids: list[int]) -> None:
    """Random tokens are mostly invalid UTF-8; a byte-level decoder's text must come out all the same."""
    tokenizer = byte_level()
    assert "".join(push_all(new_detokenizer(tokenizer), ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 360), max_size=120))
@settings(deadline=None, max_examples=100)
def test_broken_byte_fallback_never_fails(ids: list[int]) -> None:
    pieces = push_all(new_detokenizer(byte_fallback()), ids)
    assert len(pieces) == len(ids) + 1  # one for each token, and what finishing shows
    "".join(pieces).encode()  # text that can be sent: no half of a surrogate pair


def test_a_character_in_four_tokens_comes_with_the_last() -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert push_all(new_detokenizer(tokenizer), ids) == ["", "", "", "🙂", ""]


def test_an_incomplete_end_is_shown_on_finish() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ab𝄞").ids[:-1]
    pieces = push_all(new_detokenizer(tokenizer), ids)
    assert "".join(pieces[:-1]) == "ab"
    assert set(pieces[-1]) == {"\ufffd"}


@FAMILIES
def test_special_tokens_are_skipped_or_shown(make) -> None:
    tokenizer = make()
    end = 0 if make is byte_level else tokenizer.token_to_id("</s>")
    ids = [*tokenizer.encode("the").ids, end, *tokenizer.encode(" and").ids]
    for skip in (True, False):
        pieces = push_all(new_detokenizer(tokenizer, skip=skip), ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


class CountingDecoder:
    """Remembers the longest input, to see that the work per token is bounded."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.longest = 0

    def decode(self, ids, skip_special_tokens=True):
        self.longest = max(self.longest, len(ids))
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class StraddlingDecoder:
    """Two tokens, of which the second always ends one character and begins the next."""

    def decode(self, ids, skip_special_tokens=True):
        return b"".join([b"a\xe4\xb8", b"\x96\xe4\xb8"][i] for i in ids).decode("utf-8", "replace")


def test_characters_that_straddle_every_token_are_not_held_back_for_long() -> None:
    decoder = CountingDecoder(StraddlingDecoder())
    pieces = push_all(IncrementalDetokenizer(decoder), [0] + [1] * 300)
    assert pieces == ["a", *["世"] * 300, "\ufffd"]
    assert decoder.longest <= 64


@pytest.mark.parametrize("kind", ["text", "specials", "broken bytes"])
def test_work_per_token_is_bounded(kind: str) -> None:
    tokenizer = byte_level()
    byte = {value: tokenizer.token_to_id(char) for value, char in enumerate(_byte_alphabet())}
    ids = {
        "text": tokenizer.encode("the quick brown fox 世界 " * 40).ids,
        "specials": [byte[ord("a")]] + [0] * 500 + tokenizer.encode(" dog").ids,
        "broken bytes": [byte[0xF0]] * 500,
    }[kind]
    decoder = CountingDecoder(tokenizer)
    text = "".join(push_all(IncrementalDetokenizer(decoder), ids))
    assert text == tokenizer.decode(ids)
    assert decoder.longest <= 64


def _byte_alphabet() -> list[str]:
    """The character by which byte-level BPE writes each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def test_forks_are_independent() -> None:
    original = IncrementalDetokenizer(StraddlingDecoder())
    assert original.push(0) == "a"
    twin = original.fork()
    assert original.push(1) == "世"
    assert (twin.finish(), original.push(1)) == ("\ufffd", "世")


@pytest.mark.full
@FAMILIES
@given(
    ids=st.lists(st.integers(2, 360), max_size=150),
    cuts=st.lists(st.integers(1, 90), min_size=150, max_size=150),
    text=st.text(st.sampled_from("the and 世é🙂x \n"), max_size=120),
)
@settings(deadline=None, max_examples=100)
def test_tokens_together_give_the_text_of_tokens_one_by_one(make, ids: list[int], cuts: list[int], text: str) -> None:
    tokenizer = make()
    prompt = tokenizer.encode("the and").ids
    for tokens in (ids, tokenizer.encode(text).ids):
        alone, together = new_detokenizer(tokenizer, prompt), new_detokenizer(tokenizer, prompt)
        start, pieces = 0, []
        for cut in cuts:
            pieces.append(together.push_all(tokens[start : start + cut]))
            start += cut
        whole = "".join([*pieces, together.finish()])
        assert whole == "".join(push_all(alone, tokens))
