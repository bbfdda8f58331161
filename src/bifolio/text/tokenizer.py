"""Text ↔ token ids: a thin wrapper that imports `tokenizers` on first use."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from string import ascii_letters
from typing import Any

from bifolio.errors import ModelFileError, RequestError
from bifolio.text.detokenizer import ByteTokens, Decoder, IncrementalDetokenizer, KeepingDecoder
from bifolio.text.tokenizer_bounds import check_tokenizer_file
from bifolio.text.utf8 import surrogate_problem


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`, whose post-processor adds begin-of-text tokens."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @property
    def backend(self) -> Any:
        """The `tokenizers` object."""
        return self._backend

    @property
    def decoder(self) -> Decoder:
        """Decodes one sequence after the other, on the calling thread."""
        decoder: Decoder = self.backend
        return decoder

    def new_detokenizer(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool, kept: frozenset[int] = frozenset()
    ) -> IncrementalDetokenizer:
        """A detokenizer of the tokens after a prompt. Special tokens that are `kept` are never skipped."""
        decoder = self.decoder
        if kept and skip_special_tokens:
            decoder = KeepingDecoder(decoder, self.special_ids - kept)
        return IncrementalDetokenizer(decoder, prompt_token_ids, skip_special_tokens, self.byte_tokens)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        import tokenizers

        check_tokenizer_file(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            backend.no_padding()  # for batches of training: a prompt is neither padded nor cut without a word
            backend.no_truncation()
            return cls(backend)
        except BaseException as error:  # plain Exception for every kind of bad file, and panics of its Rust code
            if not is_library_error(error):
                raise
            raise ModelFileError(f"{path} is not a usable tokenizer: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_packed(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        """Token ids of a text of any length, packed.

        A list has an object of 32 bytes for each id. If other threads allocated theirs in between, a few small objects
        would keep the pages of a million ids with the process. The list here lives in one expression, inside of which
        the interpreter does not switch threads.
        """
        (encoding,) = self.encodings([text], add_special_tokens)
        return array("i", encoding.ids)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""
        return [encoding.ids for encoding in self.encodings(texts, add_special_tokens)]

    def encodings(self, texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool) -> list[Any]:
        """Texts, or pairs, as the library encodes them. Releases the GIL, as `encode` of the library does not."""
        try:
            found: list[Any] = self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not is_library_error(error):
                raise
            plain = [part for text in texts for part in ([text] if isinstance(text, str) else text)]
            problem = surrogate_problem(plain) or f"the tokenizer refuses this text: {_first_line(error)}"
            raise RequestError(problem) from error
        return found

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Token ids of texts one after the other, without added tokens.

        A part that is marked is the spelling of a special token as plain text: its first letter is encoded by itself.
        """
        texts: list[str] = []
        for text, is_literal in parts:
            texts += [text[:1], text[1:]] if is_literal else [text]
        encoded = self.encode_batch([text for text in texts if text], add_special_tokens=False)
        return [token for ids in encoded for token in ids]

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The spellings that are encoded as one special token wherever they occur."""
        return frozenset(token.content for token in self.backend.get_added_tokens_decoder().values() if token.special)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The special tokens."""
        return frozenset(number for number, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """The tokens that stand for their own spelling: special ones and those that users defined."""
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens spell bytes as printable characters, as those of GPT-2 do."""
        decoder = self.backend.decoder
        if decoder is None:
            return False
        state = json.loads(decoder.__getstate__())
        return any(part.get("type") == "ByteLevel" for part in [state, *state.get("decoders", [])])

    @cached_property
    def byte_tokens(self) -> ByteTokens | None:
        """The tokens that the decoder turns into single bytes; None if there are none."""
        names = [(f"<0x{byte:{digits}}>", byte) for digits in ("02x", "02X") for byte in range(256)]
        found = ((self.token_id(name), byte) for name, byte in names)
        values = {token_id: byte for token_id, byte in found if token_id is not None}
        letter = next((token_id for token_id, byte in values.items() if chr(byte) in ascii_letters), None)
        if letter is None or self.decode([letter]) != chr(values[letter]):
            return None
        return ByteTokens(values, letter)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens. Releases the GIL."""
        try:
            (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise RequestError(f"the tokenizer cannot decode these tokens: {_first_line(error)}") from error
        return str(text)

    def token(self, token_id: int) -> str:
        """The token's entry in the vocabulary (not always printable text)."""
        text: str | None = self.backend.id_to_token(token_id)
        return f"<{token_id}>" if text is None else text

    def token_id(self, token: str) -> int | None:
        found: int | None = self.backend.token_to_id(token)
        return found


def is_library_error(error: BaseException) -> bool:
    """Whether a library raised it: an Exception, or a panic of Rust code, which is a BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
