"""Tokenizers rebuilt from GGUF metadata against llama.cpp's ids and the tokenizers package."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import ModelFileError, RequestError, UnsupportedModelError
from bifolio.kernels.native import library
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.file_tokenizer import FileTokenizer
from bifolio.model.gguf.pretokenizers import PRE_TOKENIZERS
from bifolio.model.gguf.reader import Value, open_gguf
from bifolio.model.gguf.tokenizer import TOKENIZER_JSON, byte_level_pre_tokenizer, joined_pairs, tokenizer_from_gguf
from bifolio.model.gguf.tokenizer import tokenizer_from_metadata as rebuild
from bifolio.model.gguf.vocabulary import PROBES, tokenizer_metadata
from bifolio.text.tokenizer import Tokenizer

VOCABULARIES = ["falcon", "gpt-2", "llama-spm", "starcoder"]
SEPARATOR = "\n__ggml_vocab_test__\n"


def metadata_of(entries: dict[str, Value]) -> Metadata:
    return Metadata({"general.architecture": "llama", **entries}, Path("test.gguf"))


def config_for(vocab_size: int, **changes: int) -> ModelConfig:
    return ModelConfig("llama", vocab_size, 64, 1, 4, 4, 16, 64, 128, ropes=(RopeConfig(10000.0, 16),), **changes)


def random_unicode(generator: random.Random) -> str:
    """Any characters that can be encoded, with a weakness for ASCII, spaces and neighbours."""
    ranges = [(32, 126), (32, 126), (9, 13), (0xA0, 0x24F), (0x370, 0x5FF), (0x900, 0xDFF), (0x2000, 0x2FFF),
              (0x3040, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xFFFD), (0x1F300, 0x1FAFF), (0, 0x10FFFF)]  # fmt: skip
    text = []
    for _ in range(generator.randrange(1, 24)):
        low, high = generator.choice(ranges)
        point = generator.randint(low, high)
        text.append(" " if 0xD800 <= point <= 0xDFFF else chr(point) * generator.choice([1, 1, 1, 2, 5]))
    return "".join(text)


def spelled_bytes(tokenizer: Tokenizer) -> set[int]:
    """The bytes that a byte-level vocabulary has a token for: those of Falcon and StarCoder lack a few rare ones."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return {byte for byte, text in spelling.items() if tokenizer.token_id(text) is not None}


def allowed_texts(name: str, tokenizer: Tokenizer, count: int) -> list[str]:
    """Random texts that the vocabulary can express."""
    generator = random.Random(name)
    texts = [random_unicode(generator) for _ in range(count)]
    if name == "llama-spm":  # SentencePiece spells a space as this character, so it cannot tell them apart
        return [text.replace("▁", "_") for text in texts]
    missing = set(range(256)) - spelled_bytes(tokenizer)
    return ["".join(char for char in text if missing.isdisjoint(char.encode())) for text in texts]


@pytest.mark.full
@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_those_of_llama_cpp_on_every_test_line(name: str, data_dir: Path) -> None:
    path = data_dir / "vocab" / f"ggml-vocab-{name}.gguf"
    tokenizer = tokenizer_from_gguf(open_gguf(path))
    texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{path}.out").read_text().split("\n")
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(token) for token in line.split()], text


@pytest.mark.full
@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_to_ids_to_text_is_the_identity_on_random_unicode(name: str, data_dir: Path) -> None:
    tokenizer = tokenizer_from_gguf(open_gguf(data_dir / "vocab" / f"ggml-vocab-{name}.gguf"))
    texts = allowed_texts(name, tokenizer, 10_000)
    encoded = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    decoded = tokenizer.backend.decode_batch([item.ids for item in encoded], skip_special_tokens=False)
    wrong = [(text, back) for text, back in zip(texts, decoded, strict=True) if text != back]
    assert wrong == []


@pytest.mark.full
@pytest.mark.parametrize("name", VOCABULARIES)
def test_native_code_encodes_and_decodes_like_the_tokenizers_package(name: str, data_dir: Path) -> None:
    native = tokenizer_from_gguf(open_gguf(data_dir / "vocab" / f"ggml-vocab-{name}.gguf"))
    assert isinstance(native, FileTokenizer)
    package = Tokenizer(native.backend)
    for fact in ("vocab_size", "special_tokens", "added_ids", "is_byte_level"):
        assert getattr(native, fact) == getattr(package, fact)
    generator = random.Random(name)
    added = [native.token(token) for token in sorted(native.added_ids)]
    middles = [generator.choice([*added, "", "<"]) for _ in range(400)]
    texts = [random_unicode(generator) + middle + random_unicode(generator) for middle in middles]
    texts += [*PROBES, "a" * 3000, "\u2581\u2581 x"]
    ids = native.encode_batch(texts)
    assert ids == package.encode_batch(texts)
    assert native.encode_batch(texts, add_special_tokens=False) == package.encode_batch(texts, add_special_tokens=False)
    ids += [[generator.randrange(native.vocab_size + 3) for _ in range(generator.randrange(9))] for _ in range(400)]
    for skip in (True, False):
        assert [native.decode(each, skip) for each in ids] == [package.decode(each, skip) for each in ids]
    for token_id in generator.sample(range(native.vocab_size + 3), 300):
        assert native.token(token_id) == package.token(token_id)
        assert native.token_id(native.token(token_id)) == package.token_id(package.token(token_id))


def test_text_that_is_no_unicode_is_refused(data_dir: Path) -> None:
    for name in ("llama-spm", "gpt-2"):
        tokenizer = tokenizer_from_gguf(open_gguf(data_dir / "vocab" / f"ggml-vocab-{name}.gguf"))
        with pytest.raises(RequestError, match="half of a surrogate pair"):
            tokenizer.encode("\ud800")


def test_sentencepiece_adds_begin_of_text_and_finds_special_tokens(data_dir: Path) -> None:
    tokenizer = tokenizer_from_gguf(open_gguf(data_dir / "vocab" / "ggml-vocab-llama-spm.gguf"))
    assert tokenizer.encode("Hello") == [1, 15043]
    assert tokenizer.encode("a</s>b") == [1, 263, 2, 289]
    assert tokenizer.decode([1, 15043, 2]) == "Hello"


def test_llama_cpp_agrees_on_random_text(data_dir: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python (extra: peers)")
    for name in VOCABULARIES:
        path = data_dir / "vocab" / f"ggml-vocab-{name}.gguf"
        tokenizer = tokenizer_from_gguf(open_gguf(path))
        peer = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        for text in allowed_texts(name, tokenizer, 500):
            theirs = peer.tokenize(text.encode(), add_bos=False, special=False)
            assert tokenizer.encode(text, add_special_tokens=False) == theirs, (name, text)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_all_of_the_text(name: str) -> None:
    pre_tokenizer = byte_level_pre_tokenizer(name)
    for text in PROBES:
        pieces = pre_tokenizer.pre_tokenize_str(text)
        assert "".join(text[start:end] for _, (start, end) in pieces) == text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", " 12345", " US", "'S"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " US", "'S"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " US", "'S"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " US", "'", "S"]),
        ("falcon", ["It", "'", "s", " ", "123", "45", " US", "'", "S"]),
        ("seed-coder", ["It", "'s", " ", "1", "2", "3", "4", "5", " US", "'S"]),
        ("tiny_aya", ["It's", " ", "12", "345", " US'S"]),
        ("deepseek-coder", ["It", "'", "s", " ", "1", "2", "3", "4", "5", " US", "'", "S"]),
        ("glm4", ["It", "'s", " ", "123", "45", " US", "'S"]),
        ("lfm2", ["It", "'s", " ", "123", "45", " US", "'S"]),
        ("minicpm5", ["It", "'s", " ", "123", "45", " US", "'S"]),
        ("qwen35", ["It", "'s", " ", "1", "2", "3", "4", "5", " US", "'S"]),
    ],
)
def test_pre_tokenizers_cut_where_their_models_do(name: str, expected: list[str]) -> None:
    text = "It's 12345 US'S"
    pieces = [text[start:end] for _, (start, end) in byte_level_pre_tokenizer(name).pre_tokenize_str(text)]
    expected = expected if name != "gpt-2" else [*expected[:-1], "'", "S"]
    assert pieces == expected


@pytest.mark.parametrize(("name", "num_pieces"), [("qwen2", 6), ("qwen35", 2), ("exaone-moe", 1)])
def test_marks_belong_to_the_letters_before_them(name: str, num_pieces: int) -> None:
    pieces = byte_level_pre_tokenizer(name).pre_tokenize_str("\u0939\u093f\u0928\u094d\u0926\u0940 \u0938\u0947")
    assert len(pieces) == num_pieces


def test_chinese_characters_are_words_of_their_own() -> None:
    """Against the pattern that Kimi-K2 and Kimi-Linear were published with, in another library."""
    regex = pytest.importorskip("regex")
    ends = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    upper, lower = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    start = r"[^\r\n\p{L}\p{N}]?"
    published = "|".join([
        r"[\p{Han}]+", start + upper + "*" + lower + "+" + ends, start + upper + "+" + lower + "*" + ends,
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    ])  # fmt: skip
    generator, ours = random.Random(1), byte_level_pre_tokenizer("kimi-k2")
    for number in range(300):
        letters = "aB \n'sD12.\u4e2d\u6587\u3005\u3007\u2e80\u00e9\u0301\u304b" if number % 2 else ""
        text = "".join(generator.choices(letters, k=30)) if letters else random_unicode(generator)
        text = "".join(c for c in text if unicodedata.category(c) != "Cn")  # libraries differ in the newest characters
        pieces = [text[start:end] for _, (start, end) in ours.pre_tokenize_str(text)]
        assert pieces == regex.findall(published, text, regex.V1), text


def byte_level_bpe(pre: str) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE(ignore_merges=PRE_TOKENIZERS[pre].ignore_merges))
    backend.pre_tokenizer = byte_level_pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([*PROBES] * 3, trainer)
    return Tokenizer(backend)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm", "falcon", "deepseek-llm", "deepseek-coder"])
def test_a_byte_level_tokenizer_is_written_under_the_name_of_its_pre_tokenizer(pre: str) -> None:
    tokenizer = byte_level_bpe(pre)
    config = config_for(tokenizer.vocab_size + 5)
    entries, notes = tokenizer_metadata(tokenizer, config, {"bos_token": "<s>", "eos_token": "</s>"})
    assert notes == []
    assert entries["tokenizer.ggml.pre"] == pre
    assert len(entries["tokenizer.ggml.tokens"]) == config.vocab_size  # type: ignore[arg-type]
    rebuilt = rebuild(metadata_of(entries))
    generator = random.Random(1)
    for _ in range(300):
        text = random_unicode(generator)
        assert rebuilt.encode(text) == tokenizer.encode(text)


@pytest.mark.full
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_llama_cpp_reads_the_pre_tokenizers_of_families_alike(pre: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python (extra: peers)")
    import gguf

    tokenizer = byte_level_bpe(pre)
    entries, _ = tokenizer_metadata(tokenizer, config_for(tokenizer.vocab_size), {"bos_token": "<s>"})
    writer = gguf.GGUFWriter(tmp_path / "vocab.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(entries["tokenizer.ggml.tokens"])
    writer.add_token_types(np.asarray(entries["tokenizer.ggml.token_type"]).tolist())
    writer.add_token_merges(entries["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    rebuilt = tokenizer_from_gguf(open_gguf(tmp_path / "vocab.gguf"))
    try:
        peer = llama_cpp.Llama(str(tmp_path / "vocab.gguf"), vocab_only=True, verbose=False)
    except ValueError:
        pytest.skip(f"this release of llama.cpp does not know the pre-tokenizer {pre}")
    for text in PROBES:
        if r"\p{M}]*[\p{Ll}" in PRE_TOKENIZERS[pre].patterns[0]:  # llama.cpp leaves the marks out of these patterns
            text = "".join(letter for letter in text if not unicodedata.category(letter).startswith("M"))
        theirs = peer.tokenize(text.encode(), add_bos=False, special=True)
        assert rebuilt.encode(text, add_special_tokens=False) == theirs, text


def test_what_gguf_cannot_describe_is_stored_whole() -> None:
    from tokenizers import normalizers

    tokenizer = byte_level_bpe("gpt-2")
    tokenizer.backend.normalizer = normalizers.Lowercase()
    entries, notes = tokenizer_metadata(tokenizer, config_for(tokenizer.vocab_size), {})
    assert "tokenizer.json is stored in the file" in notes[0]
    assert TOKENIZER_JSON in entries
    assert rebuild(metadata_of(entries)).encode("HELLO World") == tokenizer.encode("HELLO World")


def test_a_tokenizer_of_whole_words_is_stored_whole() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    entries, _ = tokenizer_metadata(Tokenizer(backend), config_for(3), {})
    assert entries["tokenizer.ggml.model"] == "no_vocab"
    assert rebuild(metadata_of(entries)).encode("b a c") == [1, 0, 2]


@pytest.mark.full
def test_sentencepiece_survives_being_written(data_dir: Path) -> None:
    tokenizer = tokenizer_from_gguf(open_gguf(data_dir / "vocab" / "ggml-vocab-llama-spm.gguf"))
    entries, notes = tokenizer_metadata(tokenizer, config_for(32000, bos_token_id=1), {"unk_token": "<unk>"})
    assert notes == []
    assert entries["tokenizer.ggml.model"] == "llama"
    assert entries["tokenizer.ggml.add_bos_token"] is True
    rebuilt = rebuild(metadata_of(entries))
    generator = random.Random(2)
    for _ in range(300):
        text = random_unicode(generator)
        assert rebuilt.encode(text) == tokenizer.encode(text)


def test_unigram_survives_being_written() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>")
    backend.train_from_iterator([probe for probe in PROBES if probe.isascii()] * 20, trainer)
    tokenizer = Tokenizer(backend)
    entries, _ = tokenizer_metadata(tokenizer, config_for(tokenizer.vocab_size), {"unk_token": "<unk>"})
    assert entries["tokenizer.ggml.model"] == "t5"
    rebuilt = rebuild(metadata_of(entries))
    assert rebuilt.encode("Hello, two spaces and lines") == tokenizer.encode("Hello, two spaces and lines")


def test_damaged_vocabularies_are_refused() -> None:
    tokens: dict[str, Value] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'x'"):
        rebuild(metadata_of(tokens | {"tokenizer.ggml.pre": "x"}))
    with pytest.raises(UnsupportedModelError, match="tokenizer 'plamo2'"):
        rebuild(metadata_of(tokens | {"tokenizer.ggml.model": "plamo2"}))
    with pytest.raises(ModelFileError, match="1 entries for 2 tokens"):
        rebuild(metadata_of(tokens | {"tokenizer.ggml.token_type": np.array([1], np.int32)}))
    with pytest.raises(ModelFileError, match="no tokens"):
        rebuild(metadata_of({"tokenizer.ggml.model": "gpt2"}))
    with pytest.raises(ModelFileError, match="cannot be built"):
        rebuild(metadata_of({TOKENIZER_JSON: "{}"}))


def test_empty_and_repeated_tokens_keep_ids_distinct() -> None:
    entries: dict[str, Value] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "", "a", "b"]}
    tokenizer = rebuild(metadata_of(entries))
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("ab") == [0, 3]


def test_the_native_pairs_are_those_of_plain_python() -> None:
    tokens = ["a", "b", "ab", "abab", "é", "aé", "éa", "aéa", "▁", "▁a", "aab", "aa"]
    order = np.random.default_rng(0).permutation(len(tokens)).astype(np.int32)[:11]
    expected = joined_pairs(tokens, order)
    assert len(expected) > 5
    assert library().join_pairs(tokens, order) == expected


def test_listed_merges_over_replaced_spaces_are_those_of_the_tokenizers_package() -> None:
    """The kind of tokenizer that Gemma 4 files have: merges, spaces as ▁, bytes for unknown characters."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    letters = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeh\n"]
    merges = [("a", "b"), ("▁", "ab"), ("c", "ab"), ("\n", "\n"), ("▁ab", "c"), ("▁", "▁")]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    theirs = Backend(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    theirs.normalizer = normalizers.Replace(" ", "▁")
    theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    types = [3, 3, 3, 2, *[6] * 256, *[1] * (len(tokens) - 260)]
    entries: dict[str, Value] = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 2,
    }
    ours = rebuild(metadata_of(entries))
    for text in ("ab abc\n\ncab  é", " ab", "", "abcabab 好\n"):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.encode(text) == [2, *expected]
        assert ours.decode(expected) == text
