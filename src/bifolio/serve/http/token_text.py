"""The bytes of single tokens, for logprobs: exact where the text of a lone token is not (half a character, a space)."""

from __future__ import annotations

import re
from functools import cache

from bifolio.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Token id → bytes and printable text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        """The token's text; bytes that are no character are written as OpenAI does: `bytes:\\xe4\\xbd`."""
        return self._lookup(token_id)[0]

    def raw(self, token_id: int) -> bytes:
        return self._lookup(token_id)[1]

    def _lookup(self, token_id: int) -> tuple[str, bytes]:
        found = self._known.get(token_id)
        if found is None:
            raw = self._bytes(token_id)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            found = self._known[token_id] = (text, raw)
        return found

    def _bytes(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return f"<{token_id}>".encode()
        spelling = self._tokenizer.token(token_id)
        if token_id in self._tokenizer.added_ids:
            return spelling.encode()
        if self._tokenizer.is_byte_level:
            letters = _byte_letters()
            return bytes(letters[letter] for letter in spelling if letter in letters)
        if match := _BYTE.fullmatch(spelling):
            return bytes([int(match[1], 16)])
        return spelling.replace("\u2581", " ").encode()


@cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}
