"""Paths of images that a terminal writes when files are dropped on it: quoted, with escaped spaces, or as URLs."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

WORD = re.compile(r"""\s*('[^']*'|"[^"]*"|(?:\\.|[^\\\s])+)(?=\s|$)""")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif")


def dropped_images(line: str) -> tuple[list[Path], str]:
    """The images at the start of a message, by their full paths, and the text behind them."""
    found: list[Path] = []
    end = 0
    while (word := WORD.match(line, end)) is not None:
        path = path_of(word[1])
        if not path.is_absolute() or path.suffix.lower() not in ENDINGS or not _is_file(path):
            break
        found.append(path)
        end = word.end()
    return found, line[end:].strip()


def path_of(word: str) -> Path:
    """The path that a terminal or a person wrote."""
    if word[:1] in ("'", '"') and word[-1:] == word[:1]:
        word = word[1:-1]
    elif not _is_file(Path(word).expanduser()):
        word = re.sub(r"\\(.)", r"\1", word)
    if word.startswith("file://"):
        word = unquote(word.removeprefix("file://").removeprefix("localhost"))
    return Path(word).expanduser()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a zero byte: a text
        return False
