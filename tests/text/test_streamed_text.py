"""The text of a sequence does not depend on how its tokens are grouped: real vocabularies and small ones."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_detokenizer import byte_fallback, byte_level

from bifolio.model.gguf.reader import open_gguf
from bifolio.model.gguf.tokenizer import tokenizer_from_gguf
from bifolio.text.tokenizer import Tokenizer

REAL = ["falcon", "gpt-2", "llama-spm", "starcoder"]
SMALL = {"byte fallback": byte_fallback, "byte level": byte_level}
# Characters that vocabularies spell in bytes (private use, Bamum, Cuneiform, emoji), and plain ones.
RARE = "\uee8e\uee96\U00016510\U0001652c\U00012b33\ua5a1\ua5a5\U0001f9d1\u200d\U0001f680é世\ufffd\n\t ab c."
RARE_TEXT = st.text(st.sampled_from(RARE) | st.characters(exclude_categories=["Cs"]), max_size=60)
CUTS = st.lists(st.integers(1, 40) | st.sampled_from([1, 2, 34, 64, 65]), min_size=1, max_size=12)


@cache
def real(folder: Path, name: str) -> Tokenizer:
    return tokenizer_from_gguf(open_gguf(folder / "vocab" / f"ggml-vocab-{name}.gguf"))


@cache
def small(name: str) -> Tokenizer:
    return Tokenizer(SMALL[name]())


def check(tokenizer: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int], skip: bool = True) -> str:
    """The text of the tokens, after a check that it is the same one by one and in groups, after every group."""
    alone, together = tokenizer.new_detokenizer(prompt, skip), tokenizer.new_detokenizer(prompt, skip)
    single, grouped, start, turn = "", "", 0, 0
    while start < len(ids):
        group = ids[start : start + cuts[turn % len(cuts)]]
        single += "".join([alone.push(token_id) for token_id in group])
        grouped += together.push_all(group)
        assert grouped == single
        start, turn = start + len(group), turn + 1
    single, grouped = single + alone.finish(), grouped + together.finish()
    assert grouped == single
    return grouped


def check_at_random(tokenizer: Tokenizer, seed: int, num_texts: int) -> None:
    """Texts with rare characters, and tokens drawn at random, half of them byte tokens where there are any."""
    rng = random.Random(seed)
    single_bytes = list(tokenizer.byte_tokens.values) if tokenizer.byte_tokens else []
    for _ in range(num_texts):
        cuts = [rng.choice([1, 2, 3, 34, 64, 65, rng.randint(1, 90)]) for _ in range(rng.randint(1, 6))]
        text = "".join(rng.choice(RARE) if rng.random() < 0.8 else chr(rng.randint(1, 0xD7FF)) for _ in range(40))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert check(tokenizer, ids, cuts, []) == tokenizer.decode(ids)
        ids = [
            rng.choice(single_bytes) if single_bytes and rng.random() < 0.5 else rng.randrange(tokenizer.vocab_size)
            for _ in range(150)
        ]
        for skip in (True, False):
            found = check(tokenizer, ids, cuts, ids[-rng.randint(1, 12) :], skip)
            assert single_bytes or tokenizer.decode(ids, skip).endswith(found[-40:])


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL)
@given(text=RARE_TEXT, cuts=CUTS)
@settings(deadline=None, max_examples=100)
def test_any_grouping_gives_the_text_of_the_tokenizer(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = small(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert check(tokenizer, ids, cuts, []) == tokenizer.decode(ids)


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL)
@given(ids=st.lists(st.integers(0, 360), max_size=150), cuts=CUTS, num_prompt=st.integers(0, 12), skip=st.booleans())
@settings(deadline=None, max_examples=100)
def test_any_grouping_of_any_tokens_gives_one_text(
    name: str, ids: list[int], cuts: list[int], num_prompt: int, skip: bool
) -> None:
    """Mostly bytes that are no text, after a prompt that may end inside of a character."""
    check(small(name), ids[num_prompt:], cuts, ids[:num_prompt], skip)


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL)
def test_small_vocabularies_at_random(name: str) -> None:
    check_at_random(small(name), seed=1, num_texts=20)


@pytest.mark.full
@pytest.mark.parametrize("name", REAL)
def test_real_vocabularies_at_random(name: str, data_dir: Path) -> None:
    check_at_random(real(data_dir, name), seed=2, num_texts=60)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    found = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in data]
    return [token_id for token_id in found if token_id is not None]


def test_a_run_of_bytes_longer_than_the_window_is_text_in_any_groups() -> None:
    tokenizer = small("byte fallback")
    text = "\uee8ec \U00016510\U00016520\ua5a1\U0001652c\U00012b33\uee96\ua5a5\U00016515\U00012b51"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cuts in ([len(ids) - 4, 2, 2], [33, 1], [1], [len(ids)], [5, 40]):
        assert check(tokenizer, ids, cuts, []) == text


def test_characters_before_an_invalid_byte_stay_and_the_byte_is_replaced() -> None:
    tokenizer = small("byte fallback")
    (a,) = byte_ids(tokenizer, b"a")
    start = tokenizer.token_id("<s>")
    assert start is not None
    ids = byte_ids(tokenizer, "世界".encode() + b"\xe4\xb8")
    for cuts in ([1], [2], [7], [100]):
        assert check(tokenizer, [*ids, a], cuts, []) == "世界\ufffda"
        assert check(tokenizer, [*ids, start, *byte_ids(tokenizer, b"\x96")], cuts, []) == "世界世"
        assert check(tokenizer, [*ids, start, a], cuts, [], skip=False) == "世界\ufffd<s>a"
        assert check(tokenizer, ids, cuts, []) == "世界\ufffd"


def test_a_space_in_bytes_is_kept_after_other_text_and_dropped_first_as_by_the_tokenizer() -> None:
    tokenizer = small("byte fallback")
    ids = byte_ids(tokenizer, b"  x")
    assert check(tokenizer, ids, [1], []) == check(tokenizer, ids, [3], []) == tokenizer.decode(ids) == " x"
    assert check(tokenizer, ids, [2], ids) == "  x"


def test_a_character_after_many_invalid_bytes_is_shown() -> None:
    tokenizer = small("byte level")
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str("🙂")[0][0]
    lead, *others = [tokenizer.token_id(letter) for letter in pieces]
    for count in range(1, 80):
        ids = [token_id for token_id in [*[lead] * count, *others] if token_id is not None]
        assert check(tokenizer, ids, [1], []) == tokenizer.decode(ids)


def test_work_for_tokens_together_is_linear() -> None:
    """The tokenizer decodes a bounded number of ids for each token, also in text with byte tokens and special ones."""
    tokenizer = small("byte fallback")
    ids = tokenizer.encode("the and 世x \n\U00016510 and " * 40, add_special_tokens=False)
    start = tokenizer.token_id("<s>")
    assert start is not None
    for tokens in (ids, [*ids[:10], *[start] * 1000], byte_ids(tokenizer, b"\xf0") * 1000):
        decoder = CountingDecoder(tokenizer)
        detokenizer = tokenizer.new_detokenizer([], True)
        detokenizer._decoder = decoder
        detokenizer.push_all(tokens)
        assert decoder.num_decoded <= 40 * len(tokens)


class CountingDecoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, ids, skip_special_tokens=True):
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
