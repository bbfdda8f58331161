"""A tokenizer that takes the longest token at each byte of a text: that of RWKV World.

Tokens are bytes, of which each has one of its own, so that every text has tokens. Special tokens are found by their
spelling before; no text is encoded as the other tokens without bytes.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from bifolio.errors import ModelFileError, RequestError
from bifolio.text.detokenizer import Decoder
from bifolio.text.tokenizer import Tokenizer
from bifolio.text.utf8 import surrogate_problem

LONGEST = 1 << 10  # bytes of a token


class LongestMatchTokenizer(Tokenizer):
    """Encodes and decodes by tables of bytes."""

    def __init__(self, pieces: Mapping[int, bytes], special: Mapping[int, str], vocab_size: int) -> None:
        """`pieces`: the bytes of tokens by id; `special`: the spelling of special tokens."""
        self.pieces, self.special, self.vocab_size = dict(pieces), dict(special), vocab_size
        self._ids: dict[bytes, int] = {}
        lengths: dict[bytes, set[int]] = {}
        for number, piece in self.pieces.items():
            if not 0 < len(piece) <= LONGEST:
                raise ModelFileError(f"token {number} of the tokenizer has {len(piece)} bytes, not 1 to {LONGEST}")
            self._ids.setdefault(piece, number)
            if len(piece) > 1:
                lengths.setdefault(piece[:2], set()).add(len(piece))
        missing = [byte for byte in range(256) if bytes([byte]) not in self._ids]
        if missing:
            raise ModelFileError(f"the tokenizer has no token of the byte {missing[0]}")
        self._lengths = {start: tuple(sorted(found, reverse=True)) for start, found in lengths.items()}
        self._special_ids = {spelling: number for number, spelling in self.special.items()}
        spellings = sorted(self._special_ids, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, spellings)) + ")") if spellings else None

    @cached_property
    def _library_object(self) -> Any:
        return library_tokenizer(self)

    @property
    def backend(self) -> Any:
        """The same tokenizer for other libraries, which take a time that grows with the square of a text's length."""
        return self._library_object

    @property
    def decoder(self) -> Decoder:
        return self

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text; none are added around it."""
        try:
            return [self._encoded(text) for text in texts]
        except UnicodeEncodeError as error:  # lone surrogates
            raise RequestError(surrogate_problem(texts) or f"the tokenizer refuses this text: {error}") from error

    def encode_packed(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        return array("i", self.encode(text))

    def _encoded(self, text: str) -> list[int]:
        if self._split is None:
            return self._matched(text.encode())
        ids: list[int] = []
        for part in self._split.split(text):
            special = self._special_ids.get(part)
            ids += self._matched(part.encode()) if special is None else [special]
        return ids

    def _matched(self, data: bytes) -> list[int]:
        """The longest token at each place."""
        known, lengths, ids, place = self._ids, self._lengths, [], 0
        while place < len(data):
            size = 1
            for length in lengths.get(data[place : place + 2], ()):
                if data[place : place + length] in known:
                    size = length
                    break
            ids.append(known[data[place : place + size]])
            place += size
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = {} if skip_special_tokens else self.special
        try:
            found = [special[number].encode() if number in special else self.pieces.get(number, b"") for number in ids]
        except TypeError:
            raise RequestError("the tokenizer cannot decode these tokens: pass integers") from None
        return b"".join(found).decode(errors="replace")

    def token(self, token_id: int) -> str:
        """The spelling of a special token, or the bytes of a token as printable characters."""
        if token_id in self.special:
            return self.special[token_id]
        piece = self.pieces.get(token_id)
        return f"<{token_id}>" if piece is None else printable(piece)

    @cached_property
    def _spellings(self) -> dict[str, int]:
        return {printable(piece): number for piece, number in self._ids.items()} | self._special_ids

    def token_id(self, token: str) -> int | None:
        return self._spellings.get(token)

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(self._special_ids)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.special)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        return frozenset(self.special)

    @cached_property
    def is_byte_level(self) -> bool:
        return True


def _characters() -> list[str]:
    """The printable character of each byte, as byte-level vocabularies spell them (GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


CHARACTERS = _characters()


def printable(piece: bytes) -> str:
    return "".join([CHARACTERS[byte] for byte in piece])


def library_tokenizer(tokenizer: LongestMatchTokenizer) -> Any:
    """An equal `tokenizers` object: WordPiece takes the longest token, too, here of a whole text as bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

    ids = {printable(piece): number for number, piece in tokenizer.pieces.items()}
    unused = set(range(tokenizer.vocab_size)) - set(ids.values()) - set(tokenizer.special)
    ids |= {f"[UNUSED {number}]": number for number in unused}
    ids |= {spelling: number for number, spelling in tokenizer.special.items()}
    model = {
        "type": "WordPiece", "unk_token": tokenizer.token(0), "continuing_subword_prefix": "",
        "max_input_chars_per_word": 1 << 40, "vocab": ids,
    }  # fmt: skip
    description = {"version": "1.0", "added_tokens": [], "model": model}
    made = Tokenizer.from_str(json.dumps(description))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokenizer.special.values()])
    return made
