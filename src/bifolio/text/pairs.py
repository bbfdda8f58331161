"""Texts and pairs of texts as tokens of an encoder: special tokens around each, and cut where a caller asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bifolio.text.tokenizer import Tokenizer


class EncodedText(NamedTuple):
    """The tokens of a text, or of a pair."""

    token_ids: list[int]
    second_start: int = 0  # first token of the second text, where the model tells the two apart; 0: it does not


class PairTemplate(NamedTuple):
    """The text around a query and a document, of rerankers that read both as one prompt."""

    before: str
    between: str
    after: str

    @classmethod
    def of_text(cls, text: str, query: str, document: str) -> PairTemplate | None:
        """Cut a text at the places of the query and the document; None if it does not have both in this order."""
        before, has_query, rest = text.partition(query)
        between, has_document, after = rest.partition(document)
        return cls(before, between, after) if has_query and has_document else None

    def filled(self, query: str, document: str) -> str:
        return self.before + query + self.between + document + self.after


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], most: int | None = None) -> list[EncodedText]:
    """Each text with its special tokens. `most`: longer ones are cut at their end, the special tokens stay."""
    found = tokenizer.encode_batch(texts)
    if most is None:
        return [EncodedText(ids) for ids in found]
    return [
        EncodedText(ids if len(ids) <= most else _cut(tokenizer, text, most))
        for text, ids in zip(texts, found, strict=True)
    ]


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], most: int | None = None) -> list[EncodedText]:
    """Each pair as one sequence. `most`: of longer ones the text is cut that is the longer one."""
    encoded = tokenizer.encodings(pairs, True)
    found = []
    for pair, encoding in zip(pairs, encoded, strict=True):
        if most is not None and len(encoding.ids) > most:
            encoding = _cut_pair(tokenizer, pair, most)
        types = encoding.type_ids
        found.append(EncodedText(encoding.ids, types.index(1) if 1 in types else 0))
    return found


def encode_prompts(
    tokenizer: Tokenizer, template: PairTemplate, pairs: Sequence[tuple[str, str]], most: int | None = None
) -> list[EncodedText]:
    """Each pair as a prompt. `most`: of longer ones the document is cut at its end, the text after it stays."""
    found = tokenizer.encode_batch([template.filled(*pair) for pair in pairs], add_special_tokens=False)
    if most is None:
        return [EncodedText(ids) for ids in found]
    after = tokenizer.encode(template.after, add_special_tokens=False)[:most]
    return [EncodedText(ids if len(ids) <= most else ids[: most - len(after)] + after) for ids in found]


def _cut(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    backend = tokenizer.backend
    room = max(most - backend.num_special_tokens_to_add(False), 0)
    (plain,) = tokenizer.encodings([text], False)
    plain.truncate(room)
    ids: list[int] = backend.post_process(plain, None, True).ids
    return ids[:most]


def _cut_pair(tokenizer: Tokenizer, pair: tuple[str, str], most: int):  # type: ignore[no-untyped-def]
    backend = tokenizer.backend
    room = max(most - backend.num_special_tokens_to_add(True), 0)
    first, second = tokenizer.encodings(list(pair), False)
    lengths = [len(first.ids), len(second.ids)]
    while sum(lengths) > room:
        longer = int(lengths[1] >= lengths[0])
        lengths[longer] = max(min(lengths[longer] - 1, max(room - lengths[1 - longer], lengths[1 - longer] - 1)), 0)
    first.truncate(lengths[0])
    second.truncate(lengths[1])
    return backend.post_process(first, second, True)
