"""The parser of answers in which calls stand in marked blocks between plain text."""

from __future__ import annotations

from collections.abc import Callable

from bifolio.text.tools.events import Content, Part, Tools, partial_length
from bifolio.text.tools.readers import Reader

MAX_BROKEN = 64  # blocks that are no calls; further openings are text, which bounds the work of reading again
NewReader = Callable[[Tools], Reader]


class BlockParser:
    """Takes the blocks of calls out of an answer.

        text <opening> calls <closing> text ...

    A block that is not one or more whole calls of known tools is text, markers included, and is read again as such. Its
    parts are therefore returned when the block is complete; where a grammar guarantees the calls (`is_certain`) they
    are returned as they arrive. Spaces around calls are dropped.

    Without `closing` a block ends where its reader says. With `at_start` a block may begin at the start of the answer
    alone, without a marker, by one of these characters.
    """

    def __init__(
        self,
        tools: Tools,
        new_reader: NewReader,
        *,
        openings: tuple[str, ...] = (),
        closing: str | None = None,
        at_start: str = "",
        is_certain: bool = False,
    ) -> None:
        self._tools, self._new_reader = tools, new_reader
        self._openings, self._closing, self._at_start = openings, closing, at_start
        self._is_certain = is_certain
        self._held = ""  # text outside of blocks that is not certain
        self._space = ""  # at the end of the text so far
        self._is_first = True  # nothing but spaces was read
        self._has_calls = False
        self._reader: Reader | None = None  # of the block under way
        self._opening = ""
        self._block: list[str] = []  # its text
        self._has_sent = False  # parts of it were returned
        self._num_broken = 0
        self._tail = ""  # end of the block, not yet read: it may begin the closing marker
        self._pending: list[Part] = []  # parts of the block, held back

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        left: str | None = text
        while left is not None:
            left = self._outside(left, parts) if self._reader is None else self._inside(left, parts)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        while self._reader is not None:
            tail, self._tail = self._tail, ""
            self._feed(tail, parts)
            left = self._end_block(parts, "")
            if left is not None:
                parts += self.push(left)
        held, self._held = self._held, ""
        self._text(held, parts)
        if not self._has_calls and self._space:
            parts.append(Content(self._space))
        self._space = ""
        return parts

    # -- outside of blocks ---------------------------------------------------------------------------------------------
    def _outside(self, text: str, parts: list[Part]) -> str | None:
        """Pass text on up to the next block; the text behind its opening."""
        self._held += text
        if self._is_first and self._at_start:
            begun = self._held.lstrip()
            if not begun:
                return None
            if begun[0] in self._at_start:
                self._begin_block(self._held[: len(self._held) - len(begun)])
                self._held = ""
                return begun
        openings = self._openings if self._num_broken < MAX_BROKEN else ()
        found = [(at, opening) for opening in openings if (at := self._held.find(opening)) >= 0]
        if found:
            at, opening = min(found)
            before, after = self._held[:at], self._held[at + len(opening) :]
            self._held = ""
            self._text(before, parts)
            self._begin_block(opening)
            return after
        keep = partial_length(self._held, openings) if openings else 0
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        self._text(certain, parts)
        return None

    def _text(self, text: str, parts: list[Part]) -> None:
        """Plain text; spaces at its end wait, because a call may follow."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._is_first = False
            parts.append(Content(body))

    # -- in a block ----------------------------------------------------------------------------------------------------
    def _begin_block(self, opening: str) -> None:
        self._reader = self._new_reader(self._tools)
        self._opening, self._block, self._tail = opening, [], ""
        self._pending, self._has_sent, self._is_first = [], False, False

    def _inside(self, text: str, parts: list[Part]) -> str | None:
        """Read the block on; the text behind it when it has ended, None while it goes on."""
        closing, text = self._closing, self._tail + text
        self._tail = ""
        end = -1 if closing is None else text.find(closing)
        if closing is not None and end >= 0:
            self._feed(text[:end], parts)
            behind = text[end + len(closing) :]
            return (self._end_block(parts, closing) or "") + behind
        keep = 0 if closing is None else partial_length(text, (closing,))
        self._feed(text[: len(text) - keep], parts)
        self._tail = text[len(text) - keep :]
        reader = self._reader
        if reader is not None and (reader.is_broken or (reader.is_over and closing is None)):
            tail, self._tail = self._tail, ""
            return (self._end_block(parts, "") or "") + tail
        return None

    def _feed(self, text: str, parts: list[Part]) -> None:
        if self._reader is None or not text:
            return
        self._block.append(text)
        events = self._reader.feed(text)
        if self._is_certain:
            self._send(events, parts)
        else:
            self._pending += events

    def _send(self, events: list[Part], parts: list[Part]) -> None:
        if events:
            self._has_calls = self._has_sent = True
            self._space = ""
            parts += events

    def _end_block(self, parts: list[Part], closing: str) -> str | None:
        """Return the calls of the block, or its opening as text; the result is text to be read as plain text."""
        reader = self._reader
        if reader is None:
            return None
        self._reader = None
        self._pending += reader.close()
        rest = reader.rest
        if reader.is_complete and not reader.is_broken and not (closing and rest.strip()):
            self._send(self._pending, parts)
            return None if closing or not rest else rest
        if self._has_sent:  # a certain call that was cut: its beginning has been returned
            self._send(self._pending, parts)
            return None
        self._num_broken += 1
        self._text(self._opening, parts)
        return "".join(self._block) + closing
