"""WordPiece vocabularies of GGUF files ("bert"), and the tokens around texts and pairs of encoders.

Files mark the pieces that begin a word by SentencePiece's space, and leave those inside of words as they are; the
library marks the latter by "##".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.file_tokenizer import TokenType, Vocabulary

SPACE, INSIDE = "▁", "##"
LOWERCASE = "tokenizer.ggml.normalizer.lowercase"
ROBERTA_END = "</s>"  # stands twice between the texts of a pair


def with_pieces(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary in the spelling of the library."""
    return replace(vocabulary, tokens=[_piece(token) for token in vocabulary.tokens])


def _piece(token: str) -> str:
    if token.startswith(SPACE):
        return token[len(SPACE) :]
    return token if token.startswith("[") and token.endswith("]") else INSIDE + token


def stored_piece(token: str, type: int) -> str:
    """The spelling of a file, the reverse of `with_pieces`."""
    if token.startswith(INSIDE) and len(token) > len(INSIDE):
        return token[len(INSIDE) :]
    is_name = token.startswith("[") and token.endswith("]")
    return token if is_name or type == TokenType.UNUSED else SPACE + token


def word_pieces(metadata: Metadata, vocabulary: Vocabulary) -> Any:
    """Split at spaces and punctuation, then into the longest pieces; of uncased vocabularies in lower case."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = metadata.token_id("tokenizer.ggml.unknown_token_id", len(vocabulary.tokens))
    name = "[UNK]" if unknown is None else vocabulary.tokens[unknown]
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary.ids(), unk_token=name))
    is_cased = any("A" <= token[:1] <= "Z" for token in vocabulary.tokens)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=metadata.flag(LOWERCASE, not is_cased))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(INSIDE)
    return tokenizer


def is_encoder(metadata: Metadata) -> bool:
    """Whether tokens see those after them."""
    return not metadata.flag(".attention.causal", True)


def around_texts(metadata: Metadata, count: int) -> tuple[list[int], list[int]]:
    """The tokens before and after every text of an encoder; a file may refuse them."""
    before = _first(metadata, count, ("cls", "bos"), ("bos",))
    return before, _first(metadata, count, ("seperator", "eos"), ("sep", "eos"))


def _first(metadata: Metadata, count: int, names: Sequence[str], flags: Sequence[str]) -> list[int]:
    """The first of these special tokens that the file has, unless it refuses them by all flags that it has."""
    told = [metadata.flag(key) for key in (f"tokenizer.ggml.add_{flag}_token" for flag in flags) if metadata.has(key)]
    if told and not any(told):
        return []
    found = (metadata.token_id(f"tokenizer.ggml.{name}_token_id", count) for name in names)
    return [token for token in found if token is not None][:1]


def pair_processor(vocabulary: Vocabulary, before: Sequence[int], after: Sequence[int]) -> Any:
    """[CLS] a [SEP] b [SEP], or <s> a </s></s> b </s>; the second text has tokens of another type."""
    from tokenizers import processors

    starts, ends = ([vocabulary.tokens[token] for token in tokens] for tokens in (before, after))
    twice = ends if ends == [ROBERTA_END] else []
    return processors.TemplateProcessing(
        single=[*starts, "$A", *ends],
        pair=[*starts, "$A", *ends, *twice, "$B:1", *(f"{end}:1" for end in ends)],
        special_tokens=list(dict.fromkeys((vocabulary.tokens[token], token) for token in (*before, *after))),
    )
