"""The parser of answers in which calls stand in marked blocks between plain text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bifolio.text.tools.buffer import Buffer, Marks
from bifolio.text.tools.events import Content, Part, Tools
from bifolio.text.tools.readers import Reader

# Blocks that are no calls are read again as text. After this number of them, or of characters in them that were read
# twice, openings are text, which bounds the work.
MAX_BROKEN = 64
MAX_AGAIN = 1 << 18
_FIRST_CHARS, _MOST_CHARS = 64, 4096  # of a block that are read at a time: more than a closing marker
NewReader = Callable[[Tools], Reader]


class BlockParser:
    """Takes the blocks of calls out of an answer.

        text <opening> calls <closing> text ...

    A block that is not one or more whole calls of known tools is text, markers included, and is read again as such. Its
    parts are therefore returned when the block is complete; where a grammar guarantees the calls (`is_certain`) they
    are returned as they arrive. Spaces around calls are dropped.

    Without `closing` a block ends where its reader says. With `at_start` a block may begin at the start of the answer
    alone, without a marker, by one of these characters. `unmarked` are readers of calls that a model writes without the
    markers of its template, by the text that opens their block at the start of a line ("": `at_start`); such a block
    ends where its reader says, and no grammar guarantees it.
    """

    def __init__(
        self,
        tools: Tools,
        new_reader: NewReader,
        *,
        openings: tuple[str, ...],
        closing: str | None = None,
        at_start: str = "",
        unmarked: Mapping[str, NewReader] | None = None,
        is_certain: bool = False,
    ) -> None:
        self._tools, self._new_reader = tools, new_reader
        self._unmarked = unmarked or {}
        self._openings, self._at_start = Marks(*openings, *filter(None, self._unmarked)), at_start
        self._usual_closing = None if closing is None else Marks(closing)
        self._closing = self._usual_closing  # of the block in flight
        self._is_certain = is_certain
        self._buffer = Buffer()
        self._space: list[str] = []  # at the end of the text so far
        self._is_first = True  # nothing but spaces was read
        self._is_line_start = True  # nothing but spaces was read in this line
        self._has_calls = False
        self._reader: Reader | None = None  # of the block in flight
        self._opening = ""
        self._block: list[str] = []  # its text
        self._after: list[str] = []  # the part of its text after the calls
        self._chars = _FIRST_CHARS  # of it that are read next
        self._has_sent = False  # parts of it were returned
        self._pending: list[Part] = []  # parts of it, held back
        self._num_broken, self._num_again = 0, 0

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._buffer.append(text)
        self._read(parts)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        self._read(parts)
        while self._reader is not None:
            self._feed(self._buffer.take(), parts)
            self._end_block(parts, "")
            self._read(parts)
        self._text(self._buffer.take(), parts)
        if not self._has_calls and self._space:
            parts.append(Content("".join(self._space)))
        self._space = []
        return parts

    def _read(self, parts: list[Part]) -> None:
        while self._outside(parts) if self._reader is None else self._inside(self._reader, parts):
            pass

    # -- outside of blocks ---------------------------------------------------------------------------------------------
    def _outside(self, parts: list[Part]) -> bool:
        """Pass text on up to the next block; whether there is one."""
        if self._is_first and self._at_start:
            self._text(self._buffer.take_spaces(), parts)
            mark = self._buffer.peek()
            if mark and mark in self._at_start:
                self._begin_block("")
                return True
        if self._num_broken >= MAX_BROKEN or self._num_again > MAX_AGAIN:
            self._text(self._buffer.take(), parts)
            return False
        text, opening = self._buffer.take_before(self._openings)
        self._text(text, parts)
        if opening in self._unmarked and not self._is_line_start:
            self._text(opening, parts)
        elif opening:
            self._begin_block(opening)
        return bool(opening)

    def _text(self, text: str, parts: list[Part]) -> None:
        """Plain text; spaces at its end wait, because a call may follow."""
        body = text.rstrip()
        line = text[text.rfind("\n") + 1 :]
        self._is_line_start = (self._is_line_start or len(line) < len(text)) and not line.strip()
        if body:
            self._is_first = False
            parts.append(Content("".join([*self._space, body])))
            self._space = []
        if len(text) > len(body):
            self._space.append(text[len(body) :])

    # -- in a block ----------------------------------------------------------------------------------------------------
    def _begin_block(self, opening: str) -> None:
        self._reader = self._unmarked.get(opening, self._new_reader)(self._tools)
        self._closing = None if opening in self._unmarked else self._usual_closing
        self._opening, self._block, self._after, self._chars = opening, [], [], _FIRST_CHARS
        self._pending, self._has_sent, self._is_first = [], False, False

    def _inside(self, reader: Reader, parts: list[Part]) -> bool:
        """Read the block on; whether more can be read.

        A block of unknown length is read in growing steps, so that little is read in vain when it ends or breaks.
        """
        if self._closing is None:
            text, closing = self._buffer.take(self._chars), ""
        else:
            text, closing = self._buffer.take_before(self._closing, self._chars)
        self._chars = min(2 * self._chars, _MOST_CHARS)
        self._feed(text, parts)
        if closing or (reader.is_broken and not self._has_sent) or (reader.is_over and self._closing is None):
            self._end_block(parts, closing)
            return True
        return bool(text) and len(self._buffer) > 0

    def _feed(self, text: str, parts: list[Part]) -> None:
        if self._reader is None or not text:
            return
        self._block.append(text)
        if self._reader.is_over or self._reader.is_broken:
            self._after.append(text)
            return
        events = self._reader.feed(text)
        if self._is_certain:
            self._send(events, parts)
        else:
            self._pending += events

    def _send(self, events: list[Part], parts: list[Part]) -> None:
        if events:
            self._has_calls = self._has_sent = True
            self._space = []
            parts += events

    def _end_block(self, parts: list[Part], closing: str) -> None:
        """Return the calls of the block, or its opening as text; text after the calls is read on."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        self._pending += reader.close()
        rest = "".join([reader.buffer.rest, *self._after])
        if reader.is_complete and not reader.is_broken and not (closing and rest.strip()):
            self._send(self._pending, parts)
            if not closing:
                self._buffer.unread(rest if self._closing is None else rest.lstrip())
            return
        if self._has_sent:  # a certain call that was cut or broke: its beginning was returned, the rest is dropped
            self._send(self._pending, parts)
            return
        block = "".join(self._block)
        self._num_broken += 1
        self._num_again += len(block) - (len(rest) if reader.is_broken else 0)
        self._text(self._opening, parts)
        self._buffer.unread(block + closing)
