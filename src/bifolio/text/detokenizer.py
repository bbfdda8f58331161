"""Token ids to text while they arrive, without ever splitting a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"  # what decoders put where bytes do not make a character (yet)
_PROMPT_CONTEXT = 8  # tokens of the prompt in front of the first token
_MAX_WINDOW = 32  # ids decoded at a time, at most; text without a clean boundary for so long is rare and broken


class Decoder(Protocol):
    """What is needed of a tokenizer; a `tokenizers.Tokenizer` has it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Decodes one sequence token by token; what all calls return together is the text of all tokens.

    A token's text depends on its neighbours: a character may be spread over tokens, and many tokenizers drop the space
    at the start of whatever they decode. So the tokens since the last clean boundary are decoded together with
    the piece before it, and only what is new is returned:

        |<-- forgotten -->|<-- context -->|<-- fresh -->|
                          ^ window                       decode(window) = ....emitted....|new|held back

    Text that ends in a replacement character is held back from there: the next token may complete the character.
    The window is short, so the cost of a token does not grow with the text.
    """

    __slots__ = ("_context", "_decoder", "_emitted", "_skip_special_tokens", "_window")

    def __init__(
        self, tokenizer: Decoder, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._decoder = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-_PROMPT_CONTEXT:])
        self._context = len(self._window)  # how many ids of the window come before the last clean boundary
        self._emitted = len(self._decode(self._window).rstrip(REPLACEMENT))  # characters of the window's text

    def push(self, token_id: int) -> str:
        """The text that this token completes; often a word, sometimes nothing."""
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

    def finish(self) -> str:
        """The text held back so far, replacement characters included: no more tokens will come."""
        text = self._decode(self._window)
        fresh = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return fresh

    def fork(self) -> IncrementalDetokenizer:
        """An independent copy, for a sequence that continues in several ways."""
        twin = object.__new__(IncrementalDetokenizer)
        twin._decoder = self._decoder
        twin._skip_special_tokens = self._skip_special_tokens
        twin._window = self._window.copy()
        twin._context = self._context
        twin._emitted = self._emitted
        return twin

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens) if ids else ""

    def _advance(self) -> None:
        """A clean boundary: what was fresh becomes the context of what follows."""
        del self._window[: self._context]
        self._context = len(self._window)
        self._emitted = len(self._decode(self._window))

    def _shorten(self, text: str) -> str:
        """Bound the window where no clean boundary comes: many special tokens, or bytes that are not text.

        The second half of the window replaces it, if it ends in the same text; if not, the text is broken and is given
        out as it stands.
        """
        held = text[self._emitted :]
        if not held:  # the last token has no text: without it, the context in front stays
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
