"""Readers of answers look at each character a few times at most, whatever a model writes and however it is cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from tool_samples import TOOLS

from bifolio.text.reasoning import FORMATS as REASONING
from bifolio.text.reasoning import PlainReader, ReasoningReader, texts_of
from bifolio.text.tools import FORMATS, gemma, literals, pythonic
from bifolio.text.tools.blocks import MAX_AGAIN
from bifolio.text.tools.buffer import Buffer
from bifolio.text.tools.events import AnswerReader, Call, Content, merged

MEGABYTE = 1 << 20
MOST_VISITS = 12  # of each character by searches; blocks that are no calls are read again, up to a limit
MOST_VALUE_VISITS = 4  # of each character of a value by patterns
MOST_COPIES = 600  # of each character: a name of up to 512 characters is copied with every piece
JSON_CALL, TAG = '{"name": "write", "arguments": {"text": "', "<tool_call>"
FENCE = "```json\n"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions."
HARMONY = "<|channel|>commentary to=functions.write<|message|>"
GLM = "<tool_call>write<arg_key>text</arg_key><arg_value>"
CODER = "<tool_call><function=write><parameter=text>"
NAME = "n" * 500  # almost too long for a name

# Beginnings, and texts that are repeated after them up to the wanted length.
HOSTILE: dict[str, list[tuple[str, str]]] = {
    "hermes": [
        (TAG + JSON_CALL, "x"),
        ("", "<tool_cal"),
        (TAG, TAG),
        (TAG + JSON_CALL, "</tool_cal"),
        (TAG + JSON_CALL, '\\"'),
        (TAG + JSON_CALL, TAG + JSON_CALL),
        (TAG + '{"name": "now"}', " "),
        (TAG + '{"name": "now"}', "x "),
        (TAG, f'{{"{NAME}": 1, "'),
        (TAG, "["),
        (TAG + '{"name": "now", "a": ', "[["),
        (TAG + '{"name": "now", "a": ', "1"),
        ("", '<tool_call>{"name": "now"}</tool_call>'),
        (TAG + "{", f'"{NAME}": 1, '),
        ("", "```json\n"),
        ("", "```jso\n"),
        (FENCE + JSON_CALL, "x"),
        (FENCE + JSON_CALL, "```"),
        (FENCE + JSON_CALL, FENCE + JSON_CALL),
        (FENCE, '{"name": "now", "arguments": {}}\n'),
        (FENCE + '{"name": "now", "arguments": {}}', " "),
        (FENCE + '{"name": "now", "arguments": {}}', "\n``"),
        ("", '```json\n{"name": "now", "arguments": {}}\n```\n'),
        ("", '```json\n{"name": "now", "arguments": {}} x\n```\n'),
        (FENCE + "[", '{"name": "now", "arguments": {}}, '),
        (JSON_CALL, "x"),
        ("", '{"name": "now", "arguments": {}}\n'),
        ("x", "\n \n"),
    ],
    "qwen3_coder": [
        (CODER, "x"),
        (CODER, "</paramete"),
        (CODER, CODER),
        ("<tool_call><function=write>", f"<parameter={NAME}"),
        ("", "<tool_call><function=now></function></tool_call>"),
        ("<tool_call><function=now></function>", "< "),
        ("<tool_call><function=write>", "<parameter=a></parameter>"),
        ("<tool_call>", "<functio"),
    ],
    "glm": [
        (GLM, "x"),
        (GLM, "</arg_valu"),
        (GLM, GLM),
        ("<tool_call>write<arg_key>", "</arg_ke"),
        ("", "<tool_call>now</tool_call>"),
        ("<tool_call>write", f"<arg_key>{NAME}</arg_key><arg_value>1</arg_value>"),
        ("<tool_call>", "\n"),
    ],
    "gemma": [
        ('<|tool_call>call:write{text:<|"|>', "x"),
        ("<|tool_call>call:write{text:", "a b "),
        ("<|tool_call>call:write{text:", "a"),
        ('<|tool_call>call:write{text:<|"|>', '<|"'),
        ("<|tool_call>call:write{text:[", "a b,"),
        ("<|tool_call>call:write{text:", '<|"|>'),
        ("<|tool_call>call:write{", f"{NAME}:1,"),
        ("", "<|tool_call>call:now{}<tool_call|>"),
        ("<|tool_call>call:now{}", " x"),
        ("<|tool_call>call:write{", " "),
        ("<|tool_call>call:write{text:{", f"{NAME}  {NAME}:1,"),
    ],
    "kimi": [
        (KIMI + 'write:0<|tool_call_argument_begin|>{"text": "', "x"),
        (KIMI, "n"),
        ("", KIMI),
        (KIMI, "now:0<|tool_call_argu"),
    ],
    "deepseek": [
        (DEEPSEEK + "now<｜tool▁sep｜>{}", "```"),
        (DEEPSEEK + "now<｜tool▁sep｜>{}", "`` "),
        (DEEPSEEK + 'write<｜tool▁sep｜>{"text": "', "x"),
        (DEEPSEEK + 'write<｜tool▁sep｜>{"text": "', "<｜tool▁calls▁en"),
        (DEEPSEEK, "n"),
        ("", DEEPSEEK),
        (DEEPSEEK, "now<｜tool▁se"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        (DEEPSEEK + "function<｜tool▁sep｜>now", "\n``"),
    ],
    "mistral": [
        ('[TOOL_CALLS]write[ARGS]{"text": "', "x"),
        ("[TOOL_CALLS]", "now[ARG"),
        ("", "[TOOL_CALLS]now[ARGS]{}"),
        ("", "[TOOL_CALL"),
        ("[TOOL_CALLS]" + JSON_CALL, '\\"'),
        ("", "[TOOL_CALLS]"),
        ("[TOOL_CALLS][", '{"name": "now"}, '),
        ("[TOOL_CALLS]", " "),
    ],
    "granite": [
        ("<|tool_call|>[" + JSON_CALL, "x"),
        ("", '<|tool_call|>[{"name": "now"}]'),
        ("", "<|tool_call"),
        ("", "<tool_call>"),
        ("<|tool_call|>[", '{"name": "now"}, '),
    ],
    "phi": [
        ("functools[" + JSON_CALL, "x"),
        ("", 'functools[{"name": "now"}]'),
        ("", "functool"),
        ("", "functools"),
        ('functools[{"name": "now"}]', " "),
    ],
    "pythonic": [
        ("[write(text='", "x"),
        ("[write(text='", "\\'"),
        ("[write(", f"{NAME}=1, "),
        ("[", "n"),
        ("[write(text=", "a "),
        ("", " "),
        ("[write(text=[", "'a', "),
        ("[", "now(), "),
        ("[write(text=", "1"),
        ("<|python_start|>", "[now()"),
        ("", "<|python_star"),
    ],
    "llama3": [
        (JSON_CALL, "x"),
        ("", '{"name": "now"}; '),
        ("", " "),
        ("", "<|python_tag|>"),
        ("<|python_tag|>", '{"name": "now"}'),
        ("text ", '<|python_tag|>{"name": "now"} '),
    ],
    "harmony": [
        (HARMONY + '{"text": "', "x"),
        (HARMONY, "<|en"),
        ("", HARMONY + "{}<|call|>"),
        ("", "<|channel|>"),
        ("<|channel|>", "final "),
        ("", " "),
        ("", "<|end|>"),
        ("<|channel|>analysis<|message|>", "x"),
        ("<|start|>", " "),
        ("", "<|star"),
        ("", "<|channel|>final<|message|>x<|end|>"),
    ],
}
THINKING = [
    ("<think>", "x"),
    ("<think>", " "),
    ("<think>x", " \n"),
    ("<think>", "</thin"),
    ("", " "),
    ("<think>a</think>", " "),
    ("", "<think>"),
    ("<think>", "<think>x</thin k>"),
]
CASES = [(kind.name, *row) for kind in FORMATS for row in HOSTILE[kind.name]]


class Work(NamedTuple):
    """Characters that the buffers looked at, and those that they copied."""

    visited: list[int]
    copied: list[int]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Counts the work of all buffers: every scan of a reader is one of these methods."""
    done = Work([0], [0])

    def counted(name: str, count: Callable[..., tuple[int, int]]) -> None:
        original = getattr(Buffer, name)

        def method(self: Buffer, *arguments: Any) -> Any:
            before = self.at
            result = original(self, *arguments)
            visited, copied = count(self, before, result, *arguments)
            done.visited[0] += visited
            done.copied[0] += copied
            return result

        monkeypatch.setattr(Buffer, name, method)

    counted("append", lambda self, at, result, text: (0, len(self.text)))
    counted("unread", lambda self, at, result, text: (len(text), len(self.text) if self.at == 0 else 0))
    counted("take", lambda self, at, result, *_: (0, len(result)))
    counted("take_spaces", lambda self, at, result: (len(result) + 1, 0))
    counted("starts", lambda self, at, result, mark: (min(len(mark), len(self)), 0))
    counted("search", _searched)
    counted("_index", lambda self, at, found, mark, start, stop: (max(found if found >= 0 else stop, start) - start, 0))
    return done


def _searched(self: Buffer, at: int, found: Any, pattern: Any, start: int, stop: int | None = None) -> tuple[int, int]:
    end = len(self.text) if stop is None else stop
    return (end if found is None else found.end()) - start, 0


def hostile(head: str, repeated: str, length: int) -> str:
    return head + repeated * ((length - len(head)) // len(repeated))


def check(new_reader: Callable[[], AnswerReader], text: str, is_cut: bool, work: Work) -> str:
    """The content, after a check of the work for a text."""
    work.visited[0] = work.copied[0] = 0
    reader = new_reader()
    parts = [part for piece in (text if is_cut else [text]) for part in reader.push(piece)]
    parts += reader.finish()
    assert work.visited[0] <= MOST_VISITS * len(text) + 4 * MAX_AGAIN
    assert work.copied[0] <= MOST_COPIES * len(text)
    return "".join(texts_of(merged(parts)))


def reader_of(name: str, is_certain: bool = False) -> Callable[[], AnswerReader]:
    kind = next(kind for kind in FORMATS if kind.name == name)
    return lambda: kind().reader(TOOLS, is_certain)


@pytest.mark.sampled(4)
@pytest.mark.full
@pytest.mark.parametrize(("name", "head", "repeated"), CASES)
def test_work_of_tool_readers_is_linear(name: str, head: str, repeated: str, work: Work) -> None:
    check(reader_of(name), hostile(head, repeated, 40_000), False, work)
    cut = hostile(head, repeated, 5_000)
    for is_certain in (False, True):
        new_reader = reader_of(name, is_certain)
        assert check(new_reader, cut, True, work) == check(new_reader, cut, False, work)


@pytest.mark.full
@pytest.mark.parametrize(("head", "repeated"), THINKING)
def test_work_of_the_reasoning_reader_is_linear(head: str, repeated: str, work: Work) -> None:
    for is_open in (False, True):
        new_reader = lambda: ReasoningReader(REASONING[0], is_open, PlainReader())  # noqa: B023, E731
        check(new_reader, hostile(head, repeated, 100_000), False, work)
        cut = hostile(head, repeated, 5_000)
        assert check(new_reader, cut, True, work) == check(new_reader, cut, False, work)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_megabyte(name: str, work: Work) -> None:
    """Whole, and a quarter of it in single characters: a megabyte of them takes 20 s of CPU time for each format."""
    head, repeated = HOSTILE[name][0]
    check(reader_of(name), hostile(head, repeated, MEGABYTE), False, work)
    check(reader_of(name), hostile(head, repeated, MEGABYTE // 4), True, work)


class CountedPattern:
    """A pattern that counts the characters of its matches; one that finds nothing has looked at all of the text."""

    def __init__(self, pattern: re.Pattern[str], work: Work) -> None:
        self._pattern = pattern
        self._work = work

    def match(self, text: str, at: int) -> re.Match[str] | None:
        found = self._pattern.match(text, at)
        self._work.visited[0] += (len(text) if found is None else found.end()) - at
        return found

    def fullmatch(self, text: str) -> re.Match[str] | None:
        self._work.visited[0] += len(text)
        return self._pattern.fullmatch(text)


def check_value(
    module: ModuleType, to_json: Callable[[str], str | None], texts: list[str], patch: pytest.MonkeyPatch
) -> None:
    """Count the characters that the patterns of a reader of values look at; each match itself is linear.

    A match that went back at every word would take hours for these texts.
    """
    work = Work([0], [0])
    patch.setattr(module, "_PIECE", CountedPattern(module._PIECE, work))
    patch.setattr(literals, "_NUMBER", CountedPattern(literals._NUMBER, work))
    for text in texts:
        work.visited[0] = 0
        to_json(text)
        assert 0 < work.visited[0] <= MOST_VALUE_VISITS * len(text)


GEMMA_PARTS = ["true ", "a b ", "a", "1 ", "a  b:", "-", '<|"|>', '"', '"a ', "{a b ", "[true ", "true,", "a:"]
PYTHON_PARTS = ["True ", "a b ", "1 ", "'", '"', "\\'", "'a ", "[True ", "True,", "a:", "'\\"]


@pytest.mark.full
@pytest.mark.parametrize("repeated", GEMMA_PARTS)
def test_values_of_gemma_are_read_in_linear_time(repeated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = repeated * (MEGABYTE // 16 // len(repeated))
    check_value(gemma, gemma.gemma_to_json, [long, f"[{long}]", f"{{a:{long}}}", f'<|"|>{long}'], monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("repeated", PYTHON_PARTS)
def test_values_of_python_are_read_in_linear_time(repeated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = repeated * (MEGABYTE // 16 // len(repeated))
    check_value(pythonic, pythonic.python_to_json, [long, f"[{long}]", f"'{long}", f"'{long}'"], monkeypatch)


def test_words_of_a_value_are_one_constant_or_number() -> None:
    assert gemma.gemma_to_json(" [true , None, -2.5 ] ") == "[true, null, -2.5]"
    assert gemma.gemma_to_json("{s t : 1,u:{}}") == '{"s t": 1, "u": {}}'
    for text in ("1 2", "true false", "-", "1e5x", "[1 2]"):
        assert gemma.gemma_to_json(text) is None


def test_calls_nested_too_deeply_are_text() -> None:
    for name, head, tail in (
        ("hermes", '<tool_call>{"name": "write", "arguments": {"text": ', "}}</tool_call>"),
        ("mistral", '[TOOL_CALLS]write[ARGS]{"text": ', "}"),
        ("harmony", HARMONY + '{"text": ', "}<|call|>"),
    ):
        for depth, is_call in ((200, True), (300, False), (100_000, False)):
            text = head + "[" * depth + "]" * depth + tail
            for pieces in ([text], [text[:400], text[400:]]):
                reader = reader_of(name)()
                parts = merged([*(part for piece in pieces for part in reader.push(piece)), *reader.finish()])
                assert any(isinstance(part, Call) for part in parts) is is_call
                assert texts_of(parts)[1] == ("" if is_call else text)


def test_text_after_a_broken_call_that_a_grammar_enforced_does_not_depend_on_pieces() -> None:
    text = '<tool_call>{"name": "now", "arguments": [1]} x</tool_call> y'
    for pieces in ([text], list(text)):
        reader = reader_of("hermes", is_certain=True)()
        parts = merged([*(part for piece in pieces for part in reader.push(piece)), *reader.finish()])
        assert parts == [Call("now"), Content(" y")]
