"""Files of texts, one on each line, for `bifolio embed` and `bifolio rerank`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bifolio.cli import commands


def read_texts(name: str) -> list[str]:
    """The lines of a file that are not blank, of JSON lines the texts in them; -: of standard input."""
    from bifolio.text.utf8 import read_text

    path = Path(name).expanduser()
    if name != "-" and not path.is_file():
        raise commands.BadParameter(f"{name} does not exist: pass a file with a text on each line, or -")
    content = sys.stdin.read() if name == "-" else read_text(path)
    lines = [(number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
    texts = [_text(f"{name}:{number}", line) if path.suffix == ".jsonl" else line for number, line in lines]
    if not texts:
        raise commands.BadParameter(f"{name} has no text: write one on each line")
    return texts


def _text(place: str, line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise commands.BadParameter(f"{place}: not JSON ({error}): write one object a line") from error
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise commands.BadParameter(f'{place}: every line is an object such as {{"text": "Hello"}}')
    return text
