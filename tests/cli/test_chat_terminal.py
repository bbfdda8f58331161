"""`bifolio chat` in a terminal: paste, history, markdown, the status line, typed keys, Ctrl-C."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from bifolio.cli.markdown_stream import MarkdownStream, complete_until
from bifolio.cli.terminal import History
from helpers import tiny_folder
from pty_session import ESCAPES, PtySession

ECHO = "{{ messages[-1].content }}"  # the model reads the last message alone
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_folder(tokenizer=True, chat_template=ECHO)


@pytest.fixture(scope="module")
def slow() -> Path:
    """A model that takes milliseconds for a token; its greedy answer to "Once upon a time" has over 1,000 tokens."""
    return tiny_folder(tokenizer=True, chat_template=ECHO, num_hidden_layers=48, hidden_size=256,
                       max_position_embeddings=8192, intermediate_size=1024, seed=4)  # fmt: skip


def session(folder: Path, tmp_path: Path, *options: str, **size: int) -> PtySession:
    environment = {"BIFOLIO_HISTORY": str(tmp_path / "history"), "BIFOLIO_CONFIG": "/dev/null"}
    arguments = ("chat", "-m", str(folder), "-t", "0", "-n", "8", *options)
    return PtySession.bifolio(*arguments, environment=environment, **size)


def test_a_pasted_text_is_one_message_and_history_outlives_the_program(folder: Path, tmp_path: Path) -> None:
    with session(folder, tmp_path) as terminal:
        terminal.expect("/help lists the commands")
        terminal.expect("> ")
        terminal.paste("Once upon\na time\nthere was")
        terminal.send("\r")
        terminal.expect("8 tokens, ")
        terminal.expect("> ")
        terminal.line("/bye")
        assert terminal.wait() == 0
    assert [json.loads(line) for line in (tmp_path / "history").read_text().splitlines()] == [
        "Once upon\na time\nthere was",
        "/bye",
    ]
    with session(folder, tmp_path) as terminal:
        terminal.expect("> ")
        terminal.send("\x1b[A\x1b[A\r")  # two messages back
        terminal.expect("8 tokens")
        terminal.expect("> ")
        terminal.send("\x04")  # Ctrl-D
        assert terminal.wait() == 0
    assert json.loads((tmp_path / "history").read_text().splitlines()[-1]) == "Once upon\na time\nthere was"


def test_keys_typed_during_an_answer_are_not_echoed_and_ctrl_c_ends_it(slow: Path, tmp_path: Path) -> None:
    with session(slow, tmp_path, "-n", "8000", "--no-markdown", "--stop", "never") as terminal:
        terminal.expect("> ")
        terminal.line("Once upon a time")
        terminal.expect("Once upon a time")
        terminal.listen(1.0)
        terminal.send("QZXQ")
        terminal.listen(0.5)
        terminal.interrupt()
        terminal.expect("[stopped]")
        assert "QZXQ" not in terminal.text.split("Once upon a time", 1)[1]
        terminal.expect("tok/s")
        terminal.expect("> ")


def test_the_status_line_shows_speed_and_the_context_in_use(slow: Path, tmp_path: Path) -> None:
    with session(slow, tmp_path, "-n", "80", "--max-model-len", "128", width=100) as terminal:
        terminal.expect("> ")
        terminal.line("Once upon a time")
        terminal.expect(" tokens, ")
        status = re.findall(r"([\d.]+) tok/s · context (\d+) of 128", terminal.text)  # drawn again while it streams
        summary = terminal.expect("> ")
    assert status
    held = [int(count) for _, count in status]
    assert held == sorted(held)
    assert re.search(r"context \d+ of 128, cache [\d.]+ % used", " ".join(summary.split()))


def test_markdown_is_rendered_and_words_are_wrapped() -> None:
    text = "Some **bold** words " + "and more words " * 10 + "\n\n- one\n- two\n\n```python\nprint(1)\n```\n\nThe *end*"
    console = Console(width=40, force_terminal=True, color_system="standard", file=io.StringIO())
    stream = MarkdownStream(console, lambda: "12 tok/s")
    for letter in text:
        stream.write(letter)
    stream.close()
    raw = console.file.getvalue()  # type: ignore[attr-defined]
    assert "12 tok/s" in raw
    raw = "\n".join(line for line in raw.splitlines() if "\r" not in line)  # without lines that were drawn again
    plain = ESCAPES.sub("", raw)
    assert "**" not in plain
    assert "• one" in plain
    assert "print(1)" in plain
    assert "```" not in plain
    assert plain.count("The end") == 1
    assert all(len(line) <= 40 for line in plain.splitlines())
    assert "\x1b[1mbold" in raw
    words = [line.split() for line in plain.splitlines()]
    assert {word for line in words for word in line if word.startswith(("wor", "mor"))} == {"words", "more"}  # none cut


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one line", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n```\na\n\nb\n", "one\n\n"),
        ("```py\na\n\nb\n```\nafter", "```py\na\n\nb\n```\n"),
        ("a\n\nb\n\n", "a\n\nb\n\n"),
    ],
)
def test_blocks_are_complete_at_blank_lines_outside_code(text: str, complete: str) -> None:
    assert text[: complete_until(text)] == complete


def test_a_history_that_cannot_be_read_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIFOLIO_HISTORY", str(tmp_path / "absent" / "history"))
    history = History()
    assert history.messages() == []
    history.add("one\ntwo")
    assert history.messages() == ["one\ntwo"]
    (tmp_path / "absent" / "history").write_text('broken\n"kept"\n')
    assert history.messages() == ["kept"]
