"""Channels of gpt-oss: `<|channel|>analysis<|message|>...<|end|>`, `final`, and `commentary to=functions.NAME`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bifolio.text.strict_json import StrictJsonText, strict_text
from bifolio.text.tools.buffer import Buffer, Marks
from bifolio.text.tools.events import (
    AnswerReader,
    Arguments,
    Call,
    Content,
    Part,
    Reasoning,
    Tools,
    ToolSpec,
)
from bifolio.text.tools.format import LarkWriter, ToolFormat
from bifolio.text.tools.readers import read_object

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, END, CALL, RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
_ENDS = Marks(END, CALL, RETURN, START, CHANNEL)
_MAX_HEADER_CHARS = 1024
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.\-]+)")
_HEADER_STARTS = (CHANNEL, START)


class HarmonyReader:
    """Reads messages: a header up to `<|message|>`, then a body up to a marker that ends it.

    A call whose arguments are no JSON object, and a header that is none, are text for the user.
    """

    def __init__(self, tools: Tools, is_certain: bool = False) -> None:
        self._tools, self._is_certain = tools, is_certain
        self._buffer = Buffer()
        self._state = "between"
        self._space: list[str] = []  # before a message without a header
        self._header = ""
        self._kind = ""  # of the body: reasoning, content, call, or unknown for a call of another tool
        self._body: list[str] = []  # of a call that is held back
        self._name = ""
        self._strict = StrictJsonText()  # the arguments of a call that is sent as it arrives

    def push(self, text: str) -> list[Part]:
        self._buffer.append(text)
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        held = self._buffer.take()
        if self._state == "body":
            self._take(held, parts)
            self._end_body(parts, "")
        elif self._state == "header" or held:
            parts.append(Content("".join([*self._space, held])))
        return [part for part in parts if not isinstance(part, Content | Reasoning | Arguments) or part.text]

    def _step(self, parts: list[Part]) -> bool:
        if self._state == "header":
            return self._read_header(parts)
        if self._state == "body":
            return self._read_body(parts)
        return self._read_between(parts)

    def _read_between(self, parts: list[Part]) -> bool:
        """Between messages: a header, or text without one."""
        self._space.append(self._buffer.take_spaces())
        if not len(self._buffer):
            return False
        starts = [self._buffer.starts(marker) for marker in _HEADER_STARTS]
        if True in starts:
            self._state, self._space = "header", []
            return True
        if None in starts:
            return False
        self._state, self._kind, self._header = "body", "content", ""
        space, self._space = "".join(self._space), []
        self._take(space, parts)
        return True

    def _read_header(self, parts: list[Part]) -> bool:
        end = self._buffer.find(MESSAGE, _MAX_HEADER_CHARS + len(MESSAGE))
        if end < 0:
            if len(self._buffer) >= _MAX_HEADER_CHARS + len(MESSAGE):
                parts.append(Content(self._buffer.take(_MAX_HEADER_CHARS)))
                self._state = "between"
                return True
            return False
        self._header = self._buffer.take(end + len(MESSAGE))
        channel, recipient = _NAME.search(self._header), _RECIPIENT.search(self._header)
        self._state, self._body = "body", []
        if recipient is not None and recipient[1] in self._tools:
            self._kind, self._name = "call", recipient[1]
            if self._is_certain:
                parts.append(Call(self._name))
                self._strict = StrictJsonText()
        elif channel is not None and " to=" not in self._header:
            self._kind = "reasoning" if channel[1] == "analysis" else "content"
        else:  # a call of a tool that the request does not have
            self._kind = "unknown"
            parts.append(Content(self._header))
        return True

    def _read_body(self, parts: list[Part]) -> bool:
        text, marker = self._buffer.take_before(_ENDS)
        self._take(text, parts)
        if not marker:
            return False
        if marker in _HEADER_STARTS:
            self._buffer.unread(marker)
            marker = ""
        self._end_body(parts, marker)
        return True

    def _take(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._kind == "call" and self._is_certain:
            parts.append(Arguments(self._strict.push(text)))
        elif self._kind == "call":
            self._body.append(text)
        else:
            parts.append(Reasoning(text) if self._kind == "reasoning" else Content(text))

    def _end_body(self, parts: list[Part], marker: str) -> None:
        if self._kind == "call" and self._is_certain:
            parts.append(Arguments(self._strict.finish()))
        elif self._kind == "call":
            body = "".join(self._body)
            if read_object(body) is not None:
                parts += [Call(self._name), Arguments(strict_text(body.strip()))]
            else:
                parts.append(Content(self._header + body + marker))
        elif self._kind == "unknown" and marker:
            parts.append(Content(marker))
        self._state, self._body = "between", []


class Harmony(ToolFormat):
    name = "harmony"
    has_channels = True
    markers = (CHANNEL, MESSAGE, CONSTRAIN, START, END, CALL, RETURN)

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        return cls() if CHANNEL in template and MESSAGE in template else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        return HarmonyReader(tools, is_certain)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        """One call ends the answer: the model waits for its result."""
        channel, message, constrain = map(lark.marker, (CHANNEL, MESSAGE, CONSTRAIN))
        thought = f'{channel} ("analysis" | "commentary") {message} {lark.after_text(END)} {lark.marker(START)}'
        lark.rule("thought", f'{thought} "assistant"')
        calls = []
        for tool in tools:
            recipient = lark.text(f"commentary to=functions.{tool.name} ")
            calls.append(f'{channel} {recipient} {constrain} "json" {message} {lark.arguments(tool)}')
        call = lark.calls(calls)
        lark.rule("final", f'{channel} "final" {message} TEXT')
        lark.rule("start", f"thought* {call}" if must_call else f"thought* ({call} | final)")
