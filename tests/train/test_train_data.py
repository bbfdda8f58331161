"""Text files, tokenizers, batches and the n-gram baseline."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio.errors import ConfigError, ModelFileError
from bifolio.train.data import (
    END_OF_TEXT,
    SequenceSource,
    encode_documents,
    evaluation_sequences,
    read_documents,
    tokenize,
)
from bifolio.train.ngram import NgramModel
from bifolio.train.settings import TrainSettings
from bifolio.train.tokenizer import character_tokenizer, make_tokenizer, save_tokenizer, train_bpe

TEXT = "The cat sat on the mat. The dog sat on the log.\n" * 40


def test_documents_of_plain_and_compressed_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"one{END_OF_TEXT}two\r\n{END_OF_TEXT}  \n", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt.xz").write_bytes(lzma.compress("drei ü".encode()))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert read_documents([tmp_path]) == ["one", "two\n", "drei ü"]
    assert read_documents([tmp_path / "sub" / "b.txt.xz", tmp_path / "a.txt"])[0] == "drei ü"


def test_unreadable_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="does not exist"):
        read_documents([tmp_path / "none.txt"])
    with pytest.raises(ConfigError, match="no text files"):
        read_documents([tmp_path])
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError, match=r"bad\.txt is not UTF-8 \(byte 0\)"):
        read_documents([tmp_path / "bad.txt"])
    whole = lzma.compress(TEXT.encode())
    (tmp_path / "cut.txt.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_documents([tmp_path / "cut.txt.xz"])


def test_bpe_writes_every_text_and_begins_documents() -> None:
    tokenizer = train_bpe([TEXT], 300)
    assert tokenizer.vocab_size <= 300
    text = "Größe 🦊 cat\n\n  sat"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text)[0] == tokenizer.token_id(END_OF_TEXT) == 0
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2
    with pytest.raises(ConfigError, match="257"):
        train_bpe([TEXT], 256)


def test_characters_are_one_token_each() -> None:
    text = "Hällo, 世界!\n"
    tokenizer = character_tokenizer([text * 3])
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    ascii_only = character_tokenizer(["hello world"])
    assert ascii_only.vocab_size == len(set("hello world"))
    assert ascii_only.encode(" de") == [0, 1, 2]  # in the order of their code points


@pytest.mark.full
def test_saved_tokenizers_are_read_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = train_bpe([TEXT], 300)
    save_tokenizer(tokenizer, tmp_path, 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("The cat sat.")["input_ids"] == tokenizer.encode("The cat sat.")
    assert theirs.eos_token == END_OF_TEXT
    assert make_tokenizer(str(tmp_path / "tokenizer.json"), [], 0).encode("mat") == tokenizer.encode("mat")
    with pytest.raises(ConfigError, match="neither"):
        make_tokenizer("wordpiece", [], 0)


def test_split_holds_out_whole_documents_by_seed() -> None:
    documents = [f"document {i} " + "x" * 50 for i in range(40)]
    tokenizer = character_tokenizer(documents)
    data = tokenize(documents, tokenizer, 0.1, seed=3)
    held_out = tokenizer.decode(data.held_out.tolist())
    inside = [d for d in documents if d in held_out]
    assert 3 <= len(inside) <= 5
    assert not any(d in tokenizer.decode(data.train.tolist()) for d in inside)
    assert data.digest == tokenize(documents, tokenizer, 0.1, seed=3).digest
    assert data.digest != tokenize(documents, tokenizer, 0.1, seed=4).digest


def test_one_document_holds_out_its_end() -> None:
    tokenizer = character_tokenizer([TEXT])
    data = tokenize([TEXT], tokenizer, 0.25, seed=0)
    assert tokenizer.decode([*data.train.tolist(), *data.held_out.tolist()]) == TEXT
    assert len(data.held_out) == len(TEXT) // 4


def test_separators_stand_around_documents() -> None:
    tokenizer = train_bpe([TEXT], 300)
    tokens = encode_documents(["cat", "dog"], tokenizer)
    expected = [0, *tokenizer.encode("cat", add_special_tokens=False), 0]
    assert tokens.tolist() == [*expected, *tokenizer.encode("dog", add_special_tokens=False), 0]


def test_batches_depend_on_seed_and_step_and_can_be_cut() -> None:
    source = SequenceSource(np.arange(1000, dtype=np.int32), 7, 5, "cpu")
    whole, targets = source.batch(3, 8, slice(0, 8))
    assert (targets == whole + 1).all()
    first, second = source.batch(3, 8, slice(0, 4))[0], source.batch(3, 8, slice(4, 8))[0]
    assert (np.concatenate([first, second]) == whole.numpy()).all()
    assert not (source.batch(4, 8, slice(0, 8))[0] == whole).all()
    with pytest.raises(ConfigError, match="context"):
        SequenceSource(np.arange(8, dtype=np.int32), 7, 0, "cpu")


def test_evaluation_sequences_are_spread_and_do_not_overlap() -> None:
    inputs, targets = evaluation_sequences(np.arange(101, dtype=np.int32), 10, 4)
    assert inputs[:, 0].tolist() == [0, 30, 60, 90]
    assert (targets == inputs + 1).all()
    assert len(evaluation_sequences(np.arange(101, dtype=np.int32), 10, 100)[0]) == 10


@pytest.mark.parametrize("order", [1, 2, 3])
def test_ngram_probabilities_sum_to_one(order: int) -> None:
    generator = np.random.default_rng(0)
    tokens = generator.choice(6, 300, p=[0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    model = NgramModel(tokens, 7, order)  # token 6 never occurs
    for context in ([0, 1], [5, 5], [6, 6]):
        history = context[len(context) - order + 1 :] if order > 1 else []
        total = sum(model.probabilities(np.asarray([*history, token]))[0] for token in range(7))
        assert total == pytest.approx(1.0)


def test_ngram_equals_a_plain_count_by_hand() -> None:
    """A bigram after a context seen four times: discounted counts and what they leave for the unigram."""
    tokens = np.asarray([0, 1, 0, 1, 0, 2, 0, 1, 3])
    model = NgramModel(tokens, 4, 2)
    discount = 3 / (3 + 2 * 1)  # bigrams: 01 x3, 10 x2, 02, 20, 13 → three once, one twice
    kinds_before = {0: 2, 1: 1, 2: 1, 3: 1}  # different tokens before each
    lower_discount = 3 / (3 + 2 * 1)  # three of them 1, one of them 2
    total = sum(kinds_before.values())
    unigram = (kinds_before[1] - lower_discount) / total + lower_discount * 4 / total / 4
    expected = (3 - discount) / 4 + discount * 2 / 4 * unigram
    assert model.probabilities(np.asarray([0, 1]))[0] == pytest.approx(expected)


def test_longer_ngrams_predict_real_structure_better() -> None:
    tokens = np.asarray(character_tokenizer([TEXT]).encode(TEXT))
    vocab = int(tokens.max()) + 1
    losses = [NgramModel(tokens[:1500], vocab, order).loss(tokens[1500:]) for order in (1, 2, 3, 4)]
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(ConfigError, match="63 bits"):
        NgramModel(tokens, 100_000, 4)


def test_settings_refuse_what_cannot_work() -> None:
    for bad, words in [({"preset": "huge"}, "preset"), ({"batch_size": 5, "accumulate": 2}, "accumulate"),
                       ({"eval_fraction": 0.0}, "--eval-fraction"), ({"steps": 0}, "steps"),
                       ({"learning_rate": -1.0}, "--learning-rate is -1"), ({"gguf": "q9"}, "q8_0")]:  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            TrainSettings(**bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="heads"):
        TrainSettings(preset="char", num_heads=5).model_config(65, None)


@pytest.mark.full
def test_learning_rate_warms_up_and_decays() -> None:
    settings = TrainSettings(steps=100, warmup=10, learning_rate=1.0, final_learning_rate=0.1)
    rates = [settings.learning_rate_at(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == max(rates) == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.full
def test_presets_have_the_promised_sizes() -> None:
    def count(preset: str, vocab_size: int) -> int:
        return TrainSettings(preset=preset).model_config(vocab_size, 0).num_parameters

    assert 8e6 <= count("stories", 4096) <= 15e6
    assert count("draft", 4096) <= 1.5e6
    assert count("shakespeare", 65) * 34 / 32 <= 1.9e6
    assert TrainSettings().shape().context >= 512


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_heads": 0}, "--num-heads is 0: pass a number of at least 1"),
        ({"num_kv_heads": -1}, "--num-kv-heads is -1: pass a number of at least 1"),
        ({"context": 0}, "--context is 0: pass a number of at least 1"),
        ({"beta1": 2.0}, "--beta1 is 2.0: pass a number of at least 0 and below 1"),
        ({"beta2": float("nan")}, "--beta2 is nan: pass a number of at least 0 and below 1"),
        ({"seed": -1}, "--seed is -1: pass a number of at least 0"),
        ({"clip": -0.5}, "--clip is -0.5: pass a number of at least 0"),
        ({"clip": float("inf")}, "--clip is inf: pass a number of at least 0"),
        ({"final_learning_rate": 1.5}, "--final-learning-rate is 1.5: pass a number of at least 0 and at most 1"),
        ({"eval_fraction": 0.0}, "--eval-fraction is 0.0: pass a number above 0 and below 1"),
        ({"num_heads": 7}, "--num-heads is 7, which does not divide a width of 384: pass a divisor"),
        ({"num_kv_heads": 4}, "--num-kv-heads is 4, which does not divide a number of heads of 6: pass a divisor"),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        TrainSettings(**values)
    assert str(refusal.value) == said


@pytest.mark.parametrize("value", [{"seed": -1}, {"learning_rate": 0.0}, {"steps": 0}])
def test_settings_of_heads_are_refused_by_name(value: dict[str, Any]) -> None:
    from bifolio.train.head_run import HeadSettings

    (name,) = value
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is "):
        HeadSettings("stories", **value)
