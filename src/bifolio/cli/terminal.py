"""Input and output of `bifolio chat`: a terminal with editing, history, paste and markdown, or a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAX_HISTORY = 1000  # messages that are remembered
QUOTES = '"""'  # begin and end a message of several lines


class Terminal:
    """Turns come from standard input and answers go to standard output; notes go to standard error."""

    def __init__(self, interactive: bool, markdown: bool = True) -> None:
        self.interactive = interactive
        from rich.console import Console

        self._notes = Console(stderr=True, highlight=False)
        self._answers = Console(highlight=False)
        self._markdown = markdown and interactive and not self._answers.is_dumb_terminal

    def welcome(self, text: str) -> None:
        if self.interactive:
            self.note(f"{text}. /help lists the commands.")

    def note(self, text: str) -> None:
        """Print a remark about the conversation: dim, on standard error."""
        self._notes.print(text, style="dim", markup=False)

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    @contextlib.contextmanager
    def answer(self, status: Callable[[], str]) -> Iterator[Callable[[str], None]]:
        """A function that writes pieces of an answer; keys that are typed meanwhile are not echoed."""
        with no_echo() if self.interactive else contextlib.nullcontext():
            if not self._markdown:
                yield self.write
                self.write("\n")
                return
            from bifolio.cli.markdown_stream import MarkdownStream

            stream = MarkdownStream(self._answers, status)
            try:
                yield stream.write
            finally:
                stream.close()

    # -- input -------------------------------------------------------------------------------------------------------
    def lines(self) -> Iterator[str]:
        """Messages and commands, without blank ones, until the input ends."""
        read = self._ask if self.interactive else sys.stdin.readline
        history = History() if self.interactive else None
        while (line := read()) != "":
            if line.strip().startswith(QUOTES):
                line = self._quoted(line, read)
            if line.strip():
                if history is not None:
                    history.add(line.strip())
                yield line.strip()

    def _quoted(self, line: str, read: Callable[[], str]) -> str:
        """A message of several lines between triple quotes."""
        text = line.strip().removeprefix(QUOTES) + "\n"
        while not text.rstrip().endswith(QUOTES) and (line := read()) != "":
            text += line
        return text.rstrip().removesuffix(QUOTES)

    def _ask(self) -> str:
        """One message with editing and history; "" at Ctrl-D; Ctrl-C clears the line."""
        while True:
            try:
                return input("\n> ") + "\n"
            except EOFError:
                self.write("\n")
                return ""
            except KeyboardInterrupt:
                self.write("\n")


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Switch off the echo of the terminal on standard input; Ctrl-C still works."""
    try:
        import termios

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, AttributeError):
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def history_path() -> Path:
    """$BIFOLIO_HISTORY, or chat_history in the user's state folder."""
    if override := os.environ.get("BIFOLIO_HISTORY"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "bifolio" / "chat_history"


class History:
    """Earlier messages for the arrow keys, kept in a file: one JSON string a line, since messages have lines too."""

    def __init__(self) -> None:
        self._path = history_path()
        self._readline = enable_editing()
        if self._readline is None:
            return
        self._readline.set_auto_history(False)
        self._readline.clear_history()
        for message in self.messages():
            self._readline.add_history(message)

    def messages(self) -> list[str]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()[-MAX_HISTORY:]
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(str(json.loads(line)))
        return found

    def add(self, message: str) -> None:
        """Remember a message. A file that cannot be written is no reason to end a conversation."""
        if self._readline is not None:
            self._readline.add_history(message)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(message, ensure_ascii=False) + "\n")


def enable_editing() -> Any:
    """GNU readline with bracketed paste: pasted lines stay one message. None where the platform has no readline."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_history_length(MAX_HISTORY)
    readline.parse_and_bind("tab: self-insert")
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off for its own prompt
    return readline
