"""A tokenizer whose vocabulary stays in the mapped file. Native code encodes and decodes (`native/tokens.h`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from bifolio.errors import RequestError
from bifolio.model.gguf.reader import StringArray
from bifolio.text.detokenizer import Decoder
from bifolio.text.tokenizer import Tokenizer
from bifolio.text.utf8 import surrogate_problem


class TokenType(IntEnum):
    """Token types with their numbers in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file by id, all distinct."""

    tokens: list[str]
    types: np.ndarray  # i32[tokens]  TokenType
    scores: np.ndarray  # f32[tokens]

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def of_type(self, *types: TokenType) -> list[str]:
        return [self.tokens[index] for index in np.flatnonzero(np.isin(self.types, types))]


class FileTokenizer(Tokenizer):
    """Encodes and decodes like the `tokenizers` object of the same file, which is built on first use of `backend`."""

    def __init__(
        self,
        codec: Any,
        tokens: StringArray,
        types: np.ndarray,  # i32[tokens]  TokenType
        around: tuple[list[int], list[int]],  # tokens before and after every text
        split: Any | None,  # the pre-tokenizer of a byte-level vocabulary
        build: Callable[[], Any],
    ) -> None:
        self._codec, self._tokens, self._types = codec, tokens, types
        self._before, self._after = around
        self._split, self._build = split, build
        self.vocab_size = len(tokens)

    @cached_property
    def _library_object(self) -> Any:
        return self._build()

    @property
    def backend(self) -> Any:
        return self._library_object

    @property
    def decoder(self) -> Decoder:
        return self

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text. Releases the GIL while pieces are merged."""
        try:
            encoded = (
                self._codec.encode_texts(list(texts)) if self._split is None else [self._words(text) for text in texts]
            )
        except UnicodeEncodeError as error:  # lone surrogates
            raise RequestError(surrogate_problem(texts) or f"the tokenizer refuses this text: {error}") from error
        return [[*self._before, *ids, *self._after] for ids in encoded] if add_special_tokens else encoded

    def _words(self, text: str) -> list[int]:
        """A byte-level vocabulary: the text between added tokens is split into words, which are merged."""
        ids: list[int] = []
        for part in self._codec.cut_at_added(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                assert self._split is not None
                ids += self._codec.encode_words([word for word, _ in self._split.pre_tokenize_str(part)])
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            return str(self._codec.decode(list(ids), skip_special_tokens))
        except TypeError:
            raise RequestError("the tokenizer cannot decode these tokens: pass integers from 0 to 2**31 - 1") from None

    def token(self, token_id: int) -> str:
        return self._tokens[token_id] if 0 <= token_id < self.vocab_size else f"<{token_id}>"

    def token_id(self, token: str) -> int | None:
        found = int(self._codec.find(token))
        return None if found < 0 else found

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(self._tokens[int(i)] for i in np.flatnonzero(np.isin(self._types, SPECIAL)))

    @cached_property
    def added_ids(self) -> frozenset[int]:
        return frozenset(np.flatnonzero(np.isin(self._types, (*SPECIAL, TokenType.USER_DEFINED))).tolist())

    @property
    def is_byte_level(self) -> bool:
        return self._split is not None
