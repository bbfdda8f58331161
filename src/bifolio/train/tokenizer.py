"""Tokenizers trained on the text: byte-level BPE, or one token for each character.

Both are byte-level BPE models, which every reader of `tokenizer.json` and of GGUF files supports.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bifolio.errors import ConfigError
from bifolio.text.tokenizer import Tokenizer
from bifolio.train.data import END_OF_TEXT

MAX_TRAINING_CHARACTERS = 64 << 20  # more text has little effect on the merges
PIECE_CHARACTERS = 1 << 16


def make_tokenizer(kind: str, documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of kind 'bpe' or 'char', or load a tokenizer.json."""
    if kind == "bpe":
        return train_bpe(documents, vocab_size)
    if kind == "char":
        return character_tokenizer(documents)
    path = Path(kind)
    if not path.is_file():
        raise ConfigError(f"the tokenizer {kind!r} is neither 'bpe' nor 'char' nor a tokenizer.json file")
    return Tokenizer.from_file(path)


def train_bpe(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE with the GPT-2 pre-tokenizer; it encodes every text. Token 0 separates documents."""
    from tokenizers import models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise ConfigError(f"a byte-level vocabulary needs at least {len(alphabet) + 1} tokens, not {vocab_size}")
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_pieces(documents), trainer)
    _begin_with_end_of_text(backend)
    return Tokenizer(backend)


def character_tokenizer(documents: Sequence[str]) -> Tokenizer:
    """One token for each character of the text, in the order of their code points.

    A multi-byte character is merged from its bytes, so its prefixes are tokens too. Characters that the text does not
    contain cannot be encoded. With several documents, the last token is the separator.
    """
    from tokenizers import models

    characters = sorted(set().union(*documents))
    spelled = [_byte_spelling(character) for character in characters]
    vocabulary = {letter: 0 for spelling in spelled for letter in spelling}
    merges: dict[tuple[str, str], None] = {}
    for spelling in spelled:
        for i in range(1, len(spelling)):
            merges[(spelling[:i], spelling[i])] = None
            vocabulary[spelling[: i + 1]] = 0
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    backend = _byte_level(models.BPE(vocab=ids, merges=list(merges)))
    if len(documents) > 1:
        backend.add_special_tokens([END_OF_TEXT])
        _begin_with_end_of_text(backend)
    return Tokenizer(backend)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write `tokenizer.json` and the configuration files that transformers needs."""
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    raw: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    raw["clean_up_tokenization_spaces"] = False
    if tokenizer.token_id(END_OF_TEXT) is not None:
        raw |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def _byte_level(model: Any) -> Any:
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return backend


def _begin_with_end_of_text(backend: Any) -> None:
    """Add a separator before every prompt, as before every document."""
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B",
        special_tokens=[(END_OF_TEXT, backend.token_to_id(END_OF_TEXT))],
    )


def _byte_spelling(character: str) -> str:
    """The byte-level BPE form of a character: a printable letter for each of its bytes."""
    from tokenizers import pre_tokenizers

    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in splitter.pre_tokenize_str(character))


def _pieces(documents: Iterable[str]) -> Iterator[str]:
    """Split documents into pieces, so that a long document is processed by all threads of the trainer."""
    total = 0
    for document in documents:
        for start in range(0, len(document), PIECE_CHARACTERS):
            yield document[start : start + PIECE_CHARACTERS]
        total += len(document)
        if total > MAX_TRAINING_CHARACTERS:
            return
