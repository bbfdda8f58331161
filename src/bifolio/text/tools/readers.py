"""Readers of calls in one block of text: the scanner of JSON values, and calls written as JSON objects."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import Any

from bifolio.text.strict_json import StrictJsonText, strict_text, write_json
from bifolio.text.tools.buffer import Buffer
from bifolio.text.tools.events import Arguments, Call, Part, Tools

_NOTABLE = re.compile(r'["\\{}\[\]]')
_SCALAR_END = re.compile(r"[,;}\])\s]")
MAX_NAME_CHARS = 512  # of the name of a tool or an argument, with all that stands around it
MAX_JSON_DEPTH = 256  # brackets inside each other


class ValueScanner:
    """Finds the end of one JSON value in text that arrives in pieces."""

    __slots__ = ("_depth", "_in_string", "_is_escaped", "_is_scalar", "_started")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = self._is_scalar = self._started = False

    @property
    def is_too_deep(self) -> bool:
        """Whether the scan ended at a bracket inside of too many others."""
        return self._depth > MAX_JSON_DEPTH

    def scan(self, buffer: Buffer) -> int | None:
        """The position after the value, which continues at the front; None if the text ends before."""
        at, length = buffer.at, len(buffer.text)
        if not self._started and at < length:
            self._started = True
            self._is_scalar = buffer.text[at] not in '{["'
        if self._is_scalar:
            found = buffer.search(_SCALAR_END, at)
            return None if found is None else found.start()
        while at < length:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = buffer.search(_NOTABLE, at)
            if found is None:
                return None
            at = found.end()
            mark = found.group()
            if self._in_string:
                self._in_string = mark != '"'
                self._is_escaped = mark == "\\"
            elif mark == '"':
                self._in_string = True
            else:
                self._depth += (mark in "{[") - (mark in "}]")
            if not self._in_string and (self._depth <= 0 or self.is_too_deep):
                return at
        return None


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is; None if it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not _is_too_deep(text) else None


def _is_too_deep(text: str) -> bool:
    if text.count("{") + text.count("[") <= MAX_JSON_DEPTH:
        return False
    buffer, scanner = Buffer(), ValueScanner()
    buffer.append(text)
    buffer.take_spaces()
    scanner.scan(buffer)
    return scanner.is_too_deep


class Reader(ABC):
    """Reads the calls of one block. Subclasses read one element in `_step` and say whether another may follow."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.buffer = Buffer()
        self.events: list[Part] = []
        self.num_calls = 0
        self.is_broken = False  # the text is no call
        self.is_complete = False  # the text so far is one or more whole calls
        self.is_over = False  # unread text is no part of the block

    def feed(self, text: str) -> list[Part]:
        """Read on; the new parts."""
        self.buffer.append(text)
        while not self.is_broken and not self.is_over and self._step():
            pass
        events, self.events = self.events, []
        return events

    def close(self) -> list[Part]:
        """No further text belongs to the block; the last parts."""
        return []

    @abstractmethod
    def _step(self) -> bool:
        """Read one element; whether another may follow."""

    # -- elements ------------------------------------------------------------------------------------------------------
    def _fail(self) -> bool:
        self.is_broken = True
        return False

    def _expect(self, tag: str) -> bool:
        """Skip a tag and spaces before it; False if it has not come. Fails if something else comes."""
        if not self.buffer.peek():
            return False
        is_there = self.buffer.starts(tag)
        if is_there:
            self.buffer.skip(len(tag))
        return is_there or (False if is_there is None else self._fail())

    def _until(self, mark: str) -> str | None:
        """A name before a mark, which is skipped; None if it has not come. Fails if the name is too long."""
        most = MAX_NAME_CHARS + len(mark)
        end = self.buffer.find(mark, most)
        if end < 0:
            self.is_broken = len(self.buffer) >= most
            return None
        name = self.buffer.take(end)
        self.buffer.skip(len(mark))
        return name

    def _string(self) -> str | None:
        """A JSON string; None if it is not complete. Fails if it is too long for a name."""
        most = MAX_NAME_CHARS + 2
        end = self.buffer.string_end(most)
        if end < 0:
            self.is_broken = len(self.buffer) >= most
            return None
        try:
            return str(json.loads(self.buffer.take(end)))
        except ValueError:
            self.is_broken = True
            return None

    def _begin_call(self, name: str) -> bool:
        if name not in self.tools:
            return self._fail()
        self.num_calls += 1
        self.is_complete = False
        self.events.append(Call(name))
        return True


class ArgumentReader(Reader):
    """A reader that writes the arguments of a call one after the other, as one JSON object."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._keys: set[str] = set()  # of the arguments so far
        self._value: list[str] = []  # pieces of the present value

    def _begin_call(self, name: str) -> bool:
        self._keys = set()
        return super()._begin_call(name)

    def _argument(self, key: str, value: str | None) -> bool:
        """An argument whose value is JSON; None fails, as a second one with this key does."""
        if value is None or key in self._keys:
            return self._fail()
        lead = ", " if self._keys else "{"
        self._keys.add(key)
        self.events.append(Arguments(f"{lead}{write_json(key)}: {value}"))
        return True

    def _end_arguments(self) -> None:
        self.events.append(Arguments("}" if self._keys else "{}"))

    def _take_value(self, end: int) -> None:
        """Take a piece of the value, up to this position."""
        self._value.append(self.buffer.take(end - self.buffer.at))

    def _whole_value(self) -> str:
        value, self._value = "".join(self._value), []
        return value


class JsonValueReader(Reader):
    """A reader with one JSON value in flight, which is returned as arguments or kept until the name is known."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._scanner: ValueScanner | None = None
        self._raw: list[str] = []  # pieces of the value
        self._strict: StrictJsonText | None = None  # of a value that is sent as it arrives

    def _value(self, sends: bool) -> str | None:
        """Continue a value; its whole text when it has ended. `sends`: its pieces are arguments of the last call."""
        if self._scanner is None:
            self._scanner, self._raw = ValueScanner(), []
            self._strict = StrictJsonText() if sends else None
        end = self._scanner.scan(self.buffer)
        self._raw.append(self.buffer.take(None if end is None else end - self.buffer.at))
        if self._strict is not None:
            self.events.append(Arguments(self._strict.push(self._raw[-1])))
        if end is None or (self._scanner.is_too_deep and not self._fail()):
            return None
        self._scanner = self._strict = None
        return "".join(self._raw)

    def close(self) -> list[Part]:
        """The rest of a value that was cut."""
        strict, self._strict = self._strict, None
        return [] if strict is None else [Arguments(strict.finish())]


class Place(Enum):
    """The element that a reader of JSON calls expects."""

    START = auto()
    ITEM = auto()
    KEY = auto()
    COLON = auto()
    OPENING = auto()  # of a value
    VALUE = auto()
    AFTER = auto()  # an object


class JsonCallsReader(JsonValueReader):
    """Reads `{"name": ..., "arguments": {...}}`, one object, objects with separators, or a list of them."""

    def __init__(self, tools: Tools, separators: str = ",") -> None:
        super().__init__(tools)
        self._separators = separators  # between objects that are not in a list
        self._place = Place.START
        self._in_list = False
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # complete
        self._has_value = False

    def _step(self) -> bool:
        if self._place is Place.VALUE:
            return self._read_value()
        mark = self.buffer.peek()
        if not mark:
            return False
        match self._place:
            case Place.START:
                return self._read_start(mark)
            case Place.ITEM:
                return self._read_item(mark)
            case Place.KEY:
                return self._read_key(mark)
            case Place.COLON:
                return self._read_colon(mark)
            case Place.OPENING:
                return self._read_opening(mark)
            case Place.AFTER:
                return self._read_after(mark)

    def _read_start(self, mark: str) -> bool:
        if mark == "[":
            self._in_list = True
            self.buffer.skip(1)
        elif mark != "{":
            return self._fail()
        self._place = Place.ITEM
        return True

    def _read_item(self, mark: str) -> bool:
        if mark != "{":
            return self._fail()
        self.buffer.skip(1)
        self._name, self._arguments, self._has_value = None, None, False
        self.is_complete = False
        self._place = Place.KEY
        return True

    def _read_key(self, mark: str) -> bool:
        if mark == "}":
            self.buffer.skip(1)
            return self._end_object()
        if mark == "," and self._has_value:
            self.buffer.skip(1)
            self._has_value = False
            return True
        if mark != '"' or self._has_value:
            return self._fail()
        key = self._string()
        if key is None:
            return False
        self._key = key
        self._place = Place.COLON
        return True

    def _read_colon(self, mark: str) -> bool:
        if mark != ":":
            return self._fail()
        self.buffer.skip(1)
        self._place = Place.OPENING
        return True

    def _read_opening(self, mark: str) -> bool:
        """The first character of a value decides how it is read."""
        if self._key == "name" and (mark != '"' or self._name is not None):
            return self._fail()
        if self._is_arguments and (mark not in '{"n' or self._arguments is not None):
            return self._fail()
        self._is_object = mark == "{"
        self._place = Place.VALUE
        return True

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _read_value(self) -> bool:
        if self._key == "name":
            name = self._string()
            if name is None:
                return False
            self._name = name
            if not self._begin_call(name):
                return False
            if self._arguments is not None:
                self.events.append(Arguments(strict_text(self._arguments)))
        else:
            sends = self._is_arguments and self._name is not None and self._is_object
            raw = self._value(sends)
            if raw is None:
                return False
            if self._is_arguments and not self._end_arguments(raw):
                return False
        self._has_value = True
        self._place = Place.KEY
        return True

    def _end_arguments(self, raw: str) -> bool:
        """Check complete arguments; those that are null, or a JSON object inside a string, are objects too."""
        text = raw
        if not self._is_object:
            try:
                inner = json.loads(raw)
            except (ValueError, RecursionError):
                return self._fail()
            text = "{}" if inner is None else str(inner)
            if self._name is not None:
                self.events.append(Arguments(strict_text(text)))
        if read_object(text) is None:
            return self._fail()
        self._arguments = text
        return True

    def _end_object(self) -> bool:
        if self._name is None or (not self._has_value and self._arguments is not None):
            return self._fail()
        if self._arguments is None:
            self.events.append(Arguments("{}"))
        self._place = Place.AFTER
        self.is_complete = not self._in_list
        return True

    def _read_after(self, mark: str) -> bool:
        if self._in_list and mark == "]":
            self.buffer.skip(1)
            self.is_complete = self.is_over = True
            return False
        if mark in ("," if self._in_list else self._separators):
            self.buffer.skip(1)
            self._place = Place.ITEM
            self.is_complete = False
            return True
        if self._in_list:
            return self._fail()
        self.is_over = True
        return False
