"""Incremental detokenisation: token ids to text as they arrive, without splitting characters."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"  # decoded in place of bytes that do not form a character (yet)
_PROMPT_CONTEXT = 8  # prompt tokens before the first output token
_MAX_WINDOW = 32  # maximum ids decoded at a time; valid text rarely has no clean boundary in so many tokens
_CHUNK = 64  # ids that `push_all` decodes at a time
_SHORT_CONTEXT = 8  # ids of such a chunk that stay as the context of the next ids


class Decoder(Protocol):
    """The required interface of a tokenizer, implemented by `tokenizers.Tokenizer`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class KeepingDecoder:
    """A decoder that leaves out some special tokens and keeps the others in the text."""

    __slots__ = ("_decoder", "_dropped")

    def __init__(self, decoder: Decoder, dropped: frozenset[int]) -> None:
        self._decoder, self._dropped = decoder, dropped

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [token for token in ids if token not in self._dropped]
        return self._decoder.decode(ids, skip_special_tokens=False)


class ByteTokens(NamedTuple):
    """The tokens of a vocabulary that spell single bytes, as SentencePiece spells rare characters: `<0xE4>`."""

    values: Mapping[int, int]  # token id → byte
    letter: int  # one of them, which spells an ASCII letter


class IncrementalDetokenizer:
    """Decodes one sequence token by token; the concatenated results are the text of all tokens.

    The text of a token depends on its neighbours: a character may span several tokens, and many tokenizers drop a
    leading space. The tokens since the last clean boundary are therefore decoded together with the piece before it,
    and only the new text is returned:

        |<-- dropped -->|<-- context -->|<-- fresh -->|
                        ^ window                       decode(window) = ....emitted....|new|held back

    Trailing replacement characters are held back, because the next token may complete the character. The window is
    short, so the cost of a token does not grow with the text.

    Byte tokens never enter the window: a tokenizer replaces a whole run of them if one byte is invalid, so the text
    would depend on the part of the run in the window. Their bytes are decoded as a stream, in which a byte changes no
    character before it. A letter takes the place of the run in the window, as the context of the next token.
    """

    __slots__ = ("_bytes", "_context", "_decoder", "_emitted", "_pending", "_skip_special_tokens", "_window")

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        byte_tokens: ByteTokens | None = None,
    ) -> None:
        self._decoder = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._bytes = byte_tokens
        self._pending = b""  # the bytes of an incomplete character
        self._window: list[int] = []
        self._context = 0  # ids of the window before the last clean boundary
        self._emitted = 0  # characters of the window's text
        self.push_all(prompt_token_ids[-_PROMPT_CONTEXT:])

    def push(self, token_id: int) -> str:
        """Append a token and return the text that it completes, which may be empty."""
        return self.push_all((token_id,))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Append several tokens and return the text that they complete: that of `push` for each, at less cost."""
        if self._bytes is None or (not self._pending and self._bytes.values.keys().isdisjoint(token_ids)):
            return self._push_texts(token_ids)
        pieces = []
        for is_bytes, tokens in groupby(token_ids, self._bytes.values.__contains__):
            run, done = list(tokens), 0
            if is_bytes:
                pieces.append(self._push_bytes(run, self._bytes))
                continue
            while self._pending and done < len(run):
                pieces.append(self._after_pending(self._push_text(run[done])))
                done += 1
            pieces.append(self._push_texts(run[done:]))
        return "".join(pieces)

    def _push_bytes(self, token_ids: list[int], known: ByteTokens) -> str:
        """The characters that a run of byte tokens completes."""
        head = self._after_pending(self._decode(self._window)[self._emitted :])
        values = [known.values[token_id] for token_id in token_ids]
        if not self._emitted and not head and values[0] < 0x80:  # a tokenizer may drop the first space of a text
            head = self._decode([*self._window, token_ids[0]])
            del values[0]
        self._window, self._context, self._emitted = [known.letter], 1, 1
        data = self._pending + bytes(values)
        text, length = utf_8_decode(data, "replace", False)
        self._pending = data[length:]
        return head + text

    def _after_pending(self, text: str) -> str:
        """Text of the window after the character that it leaves incomplete. A skipped token has no text."""
        if text and self._pending:
            text, self._pending = REPLACEMENT + text, b""
        return text

    def _push_text(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = len(text.rstrip(REPLACEMENT))
        fresh = text[self._emitted : stable]
        self._emitted = max(self._emitted, stable)
        if fresh and stable == len(text):
            self._advance()
        elif len(self._window) > _MAX_WINDOW:
            fresh += self._shorten(text)
        return fresh

    def _push_texts(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._push_text(token_ids[0])
        return "".join(
            self._push_chunk(token_ids[start : start + _CHUNK]) for start in range(0, len(token_ids), _CHUNK)
        )

    def _push_chunk(self, token_ids: Sequence[int]) -> str:
        """Decode the tokens together if their text is clean, else one by one."""
        held = len(self._window)
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if len(text) <= self._emitted or REPLACEMENT in text:
            del self._window[held:]
            return "".join([self._push_text(token_id) for token_id in token_ids])
        fresh, tail = text[self._emitted :], self._decode(self._window[-_SHORT_CONTEXT:])
        if tail and text.endswith(tail) and REPLACEMENT not in tail:
            del self._window[:-_SHORT_CONTEXT]
            self._context, self._emitted = len(self._window), len(tail)
        else:
            self._advance()
        return fresh

    def finish(self) -> str:
        """Return the text held back, including replacement characters; no further tokens follow."""
        text = self._decode(self._window)
        fresh = self._after_pending(text[self._emitted :])
        self._emitted = max(self._emitted, len(text))
        if self._pending:
            fresh, self._pending = REPLACEMENT, b""
        return fresh

    def fork(self) -> IncrementalDetokenizer:
        """Copy the state for a forked sequence."""
        copy = object.__new__(IncrementalDetokenizer)
        copy._decoder = self._decoder
        copy._skip_special_tokens = self._skip_special_tokens
        copy._bytes, copy._pending = self._bytes, self._pending
        copy._window = self._window.copy()
        copy._context = self._context
        copy._emitted = self._emitted
        return copy

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens) if ids else ""

    def _advance(self) -> None:
        """Move the window to a clean boundary: the fresh tokens become the context of the next ones."""
        del self._window[: self._context]
        self._context = len(self._window)
        self._emitted = len(self._decode(self._window))

    def _shorten(self, text: str) -> str:
        """Bound a window without a clean boundary, caused by many special tokens or by bytes that are not text.

        Keep the second half of the window if it decodes to the same ending; otherwise the text is invalid and is
        returned as decoded, but for its last character, which the next token may complete.
        """
        held = text[self._emitted :]
        if not held:  # the last token has no text: drop it and keep the context
            del self._window[-1]
            return ""
        self._window = self._window[-_MAX_WINDOW // 2 :]
        self._context = 0
        shorter = self._decode(self._window)
        if shorter.endswith(held) and len(held) < _MAX_WINDOW // 2:
            self._emitted = len(shorter) - len(held)
            return ""
        self._emitted = len(shorter) - 1
        return held[:-1]
