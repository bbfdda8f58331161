"""Reasoning of a model apart from its answer: `<think>...</think>` and its relatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bifolio.text.tools.events import AnswerReader, Content, Part, Reasoning, partial_length


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
        self._marks, self._inner = marks, inner
        self._state = "thinking" if is_open else "start"
        self._held = ""
        self._is_first = True  # no reasoning was returned

    def push(self, text: str) -> list[Part]:
        if self._state == "answer":
            return self._inner.push(text)
        self._held += text
        if self._state == "start" and not self._read_start():
            return []
        if self._state == "thinking":
            return self._read_thinking()
        if self._state == "gap":
            return self._read_gap()
        held, self._held = self._held, ""
        return self._inner.push(held)

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state == "thinking":
            return [Reasoning(held)] if held.strip() else []
        parts = self._inner.push(held) if held and self._state == "start" else []
        return [*parts, *self._inner.finish()]

    def _read_start(self) -> bool:
        """Whether it is known if the answer begins with reasoning."""
        begun, opening = self._held.lstrip(), self._marks.opening
        if begun.startswith(opening):
            self._held, self._state = begun[len(opening) :], "thinking"
            return True
        if opening.startswith(begun):
            return False
        self._state = "answer"
        return True

    def _read_thinking(self) -> list[Part]:
        if self._is_first:
            self._held = self._held.lstrip()
        end = self._held.find(self._marks.closing)
        body = self._held if end < 0 else self._held[:end]
        keep = 0
        if end < 0:
            certain = body[: len(body) - partial_length(body, (self._marks.closing,))].rstrip()
            keep = len(body) - len(certain)
            body = certain
        else:
            body = body.rstrip()
        parts: list[Part] = [Reasoning(body)] if body else []
        self._is_first = self._is_first and not body
        if end < 0:
            self._held = self._held[len(self._held) - keep :] if keep else ""
            return parts
        self._held, self._state = self._held[end + len(self._marks.closing) :], "gap"
        return [*parts, *self._read_gap()]

    def _read_gap(self) -> list[Part]:
        self._held = self._held.lstrip()
        if not self._held:
            return []
        held, self._held, self._state = self._held, "", "answer"
        return self._inner.push(held)


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
