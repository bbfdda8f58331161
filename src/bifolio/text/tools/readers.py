"""Readers of calls in one block of text: a buffer, the scanner of JSON values, and calls written as JSON objects."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import Any

from bifolio.text.strict_json import StrictJsonText, strict_text, write_json
from bifolio.text.tools.events import Arguments, Call, Part, Tools

_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOTABLE = re.compile(r'["\\{}\[\]]')
_SCALAR_END = re.compile(r"[,;}\])\s]")
MAX_NAME_CHARS = 512  # of the name of a tool, with all that stands around it


class ValueScanner:
    """Finds the end of one JSON value in text that arrives in pieces."""

    __slots__ = ("_depth", "_in_string", "_is_escaped", "_is_scalar", "_started")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = self._is_scalar = self._started = False

    def scan(self, text: str, start: int) -> int | None:
        """The position behind the value, which continues at `start`; None if the text ends before."""
        at = start
        if not self._started and at < len(text):
            self._started = True
            self._is_scalar = text[at] not in '{["'
        if self._is_scalar:
            found = _SCALAR_END.search(text, at)
            return None if found is None else found.start()
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = _NOTABLE.search(text, at)
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
            if not self._in_string and self._depth <= 0:
                return at
        return None


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is; None if it is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Reader(ABC):
    """Reads the calls of one block. Subclasses read one element in `_step` and say whether another may follow.

    |<-- read -->|<-- unread: self.text[self.at:] -->|
    """

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.text, self.at = "", 0
        self.events: list[Part] = []
        self.num_calls = 0
        self.is_broken = False  # the text is no call
        self.is_complete = False  # the text so far is one or more whole calls
        self.is_over = False  # text from `at` on is no part of the block

    def feed(self, text: str) -> list[Part]:
        """Read on; the new parts."""
        self.text = self.text[self.at :] + text
        self.at = 0
        while not self.is_broken and not self.is_over and self._step():
            pass
        events, self.events = self.events, []
        return events

    def close(self) -> list[Part]:
        """No further text belongs to the block; the last parts."""
        return []

    @property
    def rest(self) -> str:
        """Text that was not read."""
        return self.text[self.at :]

    @abstractmethod
    def _step(self) -> bool:
        """Read one element; whether another may follow."""

    # -- elements ------------------------------------------------------------------------------------------------------
    def _fail(self) -> bool:
        self.is_broken = True
        return False

    def _peek(self) -> str:
        """The next character that is no space; empty if it has not come."""
        found = _SPACE.match(self.text, self.at)
        self.at = self.at if found is None else found.end()
        return self.text[self.at : self.at + 1]

    def _until(self, marker: str, most: int | None = None) -> str | None:
        """The text before a marker, which is skipped; None if it has not come. Fails beyond `most` characters."""
        end = self.text.find(marker, self.at)
        if end < 0 or (most is not None and end - self.at > most):
            if most is not None and len(self.text) - self.at > most + len(marker):
                self.is_broken = True
            return None
        found = self.text[self.at : end]
        self.at = end + len(marker)
        return found

    def _string(self) -> str | None:
        """A JSON string; None if it is not complete."""
        found = _STRING.match(self.text, self.at)
        if found is None:
            self.is_broken = len(self.text) - self.at > MAX_NAME_CHARS
            return None
        self.at = found.end()
        try:
            value = json.loads(found.group())
        except ValueError:
            self.is_broken = True
            return None
        return str(value)

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

    def _whole_value(self, start: int, end: int) -> str:
        """The pieces of the value, of which the last one lies here; reading continues behind it."""
        self._value.append(self.text[start:end])
        self.at = end
        return "".join(self._value).strip()


class JsonValueReader(Reader):
    """A reader with one JSON value under way, which is returned as arguments or kept until the name is known."""

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
        end = self._scanner.scan(self.text, self.at)
        stop = len(self.text) if end is None else end
        if stop > self.at:
            self._raw.append(self.text[self.at : stop])
            self.at = stop
            if self._strict is not None:
                self.events.append(Arguments(self._strict.push(self._raw[-1])))
        if end is None:
            return None
        self._scanner = self._strict = None
        return "".join(self._raw)

    def close(self) -> list[Part]:
        """The rest of a value that was cut."""
        strict, self._strict = self._strict, None
        return [] if strict is None else [Arguments(strict.finish())]


class JsonCallsReader(JsonValueReader):
    """Reads `{"name": ..., "arguments": {...}}`, one object, objects with separators, or a list of them."""

    def __init__(self, tools: Tools, separators: str = ",") -> None:
        super().__init__(tools)
        self._separators = separators  # between objects that are not in a list
        self._state = "start"
        self._in_list = False
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # complete
        self._has_value = False

    def _step(self) -> bool:
        if self._state == "value":
            return self._read_value()
        mark = self._peek()
        if not mark:
            return False
        return bool(getattr(self, f"_read_{self._state}")(mark))

    def _read_start(self, mark: str) -> bool:
        if mark == "[":
            self._in_list = True
            self.at += 1
        elif mark != "{":
            return self._fail()
        self._state = "item"
        return True

    def _read_item(self, mark: str) -> bool:
        if mark != "{":
            return self._fail()
        self.at += 1
        self._name, self._arguments, self._has_value = None, None, False
        self.is_complete = False
        self._state = "key"
        return True

    def _read_key(self, mark: str) -> bool:
        if mark == "}":
            self.at += 1
            return self._end_object()
        if mark == "," and self._has_value:
            self.at += 1
            self._has_value = False
            return True
        if mark != '"' or self._has_value:
            return self._fail()
        key = self._string()
        if key is None:
            return False
        self._key = key
        self._state = "colon"
        return True

    def _read_colon(self, mark: str) -> bool:
        if mark != ":":
            return self._fail()
        self.at += 1
        self._state = "opening"
        return True

    def _read_opening(self, mark: str) -> bool:
        """The first character of a value decides how it is read."""
        if self._key == "name" and (mark != '"' or self._name is not None):
            return self._fail()
        if self._is_arguments and (mark not in '{"n' or self._arguments is not None):
            return self._fail()
        self._is_object = mark == "{"
        self._state = "value"
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
        self._state = "key"
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
        self._state = "after"
        self.is_complete = not self._in_list
        return True

    def _read_after(self, mark: str) -> bool:
        if self._in_list and mark == "]":
            self.at += 1
            self.is_complete = self.is_over = True
            return False
        if mark in ("," if self._in_list else self._separators):
            self.at += 1
            self._state = "item"
            self.is_complete = False
            return True
        if self._in_list:
            return self._fail()
        self.is_over = True
        return False
