"""Incremental detokenisation: token ids to text as they arrive, without splitting characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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


class IncrementalDetokenizer:
    """Decodes one sequence token by token; the concatenated results are the text of all tokens.

    The text of a token depends on its neighbours: a character may span several tokens, and many tokenizers drop a
    leading space. The tokens since the last clean boundary are therefore decoded together with the piece before it,
    and only the new text is returned:

        |<-- dropped -->|<-- context -->|<-- fresh -->|
                        ^ window                       decode(window) = ....emitted....|new|held back

    Trailing replacement characters are held back, because the next token may complete the character. The window is
    short, so the cost of a token does not grow with the text.
    """

    __slots__ = ("_context", "_decoder", "_emitted", "_skip_special_tokens", "_window")

    def __init__(
        self, tokenizer: Decoder, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._decoder = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-_PROMPT_CONTEXT:])
        self._context = len(self._window)  # ids of the window before the last clean boundary
        self._emitted = len(self._decode(self._window).rstrip(REPLACEMENT))  # characters of the window's text

    def push(self, token_id: int) -> str:
        """Append a token and return the text that it completes, which may be empty."""
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

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Append several tokens and return the text that they complete: that of `push` for each, at less cost."""
        if len(token_ids) == 1:
            return self.push(token_ids[0])
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
            return "".join([self.push(token_id) for token_id in token_ids])
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
        fresh = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return fresh

    def fork(self) -> IncrementalDetokenizer:
        """Copy the state for a forked sequence."""
        copy = object.__new__(IncrementalDetokenizer)
        copy._decoder = self._decoder
        copy._skip_special_tokens = self._skip_special_tokens
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
        returned as decoded.
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
        self._emitted = len(shorter)
        return held
