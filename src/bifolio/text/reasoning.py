"""Reasoning of a model apart from its answer: `<think>...</think>` and its relatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bifolio.text.tools.buffer import Buffer, Marks
from bifolio.text.tools.events import AnswerReader, Content, Part, Reasoning


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning."""

    opening: str
    closing: str
    first: str = ""  # the special token with which `opening` begins, where it is longer than one

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are special tokens in some vocabularies, and are kept in the answer."""
        return (self.first or self.opening, self.closing)

    def is_open(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside the reasoning, so that the answer begins in it."""
        return prompt.rstrip().endswith(self.opening)


FORMATS = (
    ReasoningFormat("<think>", "</think>"),  # Qwen 3, DeepSeek R1, GLM, SmolLM3, Hunyuan, EXAONE
    ReasoningFormat("[THINK]", "[/THINK]"),  # Magistral
    ReasoningFormat("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningFormat("<|channel>thought", "<channel|>", "<|channel>"),  # Gemma 4
)


def reasoning_format(template: str | None) -> ReasoningFormat | None:
    """The marks that a chat template contains."""
    return next((known for known in FORMATS if known.closing in (template or "")), None)


class ReasoningReader:
    """Splits an answer into reasoning and the text behind it, which another reader takes.

    Reasoning stands at the start of an answer alone. Spaces inside the marks' edges and behind them are dropped.
    """

    def __init__(self, marks: ReasoningFormat, is_open: bool, inner: AnswerReader) -> None:
        self._opening, self._closing, self._inner = marks.opening, Marks(marks.closing), inner
        self._state = "thinking" if is_open else "start"
        self._buffer = Buffer()
        self._space: list[str] = []  # before text that has not come
        self._is_first = True  # no reasoning was returned

    def push(self, text: str) -> list[Part]:
        if self._state == "answer":
            return self._inner.push(text)
        self._buffer.append(text)
        if self._state == "start" and not self._read_start():
            return []
        if self._state == "answer":
            return self._inner.push("".join([*self._space, self._buffer.take()]))
        return self._read_thinking() if self._state == "thinking" else self._read_gap()

    def finish(self) -> list[Part]:
        held = self._buffer.take()
        if self._state == "thinking":
            space = [] if self._is_first else self._space
            return [Reasoning("".join([*space, held]))] if held else []
        parts = self._inner.push("".join([*self._space, held])) if self._state == "start" else []
        return [*parts, *self._inner.finish()]

    def _read_start(self) -> bool:
        """Whether it is known if the answer begins with reasoning."""
        self._space.append(self._buffer.take_spaces())
        is_opened = self._buffer.starts(self._opening)
        if is_opened is None:
            return False
        self._state = "thinking" if is_opened else "answer"
        if is_opened:
            self._buffer.skip(len(self._opening))
            self._space = []
        return True

    def _read_thinking(self) -> list[Part]:
        text, closing = self._buffer.take_before(self._closing)
        body = text.rstrip()
        parts: list[Part] = []
        if body:
            body = body.lstrip() if self._is_first else body
            parts = [Reasoning("".join([*([] if self._is_first else self._space), body]))]
            self._is_first, self._space = False, []
        self._space.append(text[len(text.rstrip()) :])
        if not closing:
            return parts
        self._state, self._space = "gap", []
        return [*parts, *self._read_gap()]

    def _read_gap(self) -> list[Part]:
        if not self._buffer.peek():
            return []
        self._state = "answer"
        return self._inner.push(self._buffer.take())


class PlainReader:
    """An answer that is text alone."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def texts_of(parts: Sequence[Part]) -> tuple[str, str]:
    """(reasoning, content) of all parts together."""
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return reasoning, "".join(part.text for part in parts if isinstance(part, Content))
