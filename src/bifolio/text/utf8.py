"""Text from bytes, and the sentence for text that is not UTF-8."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bifolio.errors import ConfigError

REMEDY = "convert it, for example with `iconv -f latin1 -t utf-8`"


def decoded(data: bytes, name: str) -> str:
    """Decode UTF-8; the error names the source and the first byte that does not fit."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 (byte {error.start}): {REMEDY}") from error


def read_text(path: Path, option: str = "") -> str:
    """The text of a file, plain or .xz; `option` is the name of the option that the file was passed to."""
    import lzma

    label = f"{option} {path}".strip()
    try:
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
    except FileNotFoundError:
        raise ConfigError(f"{label} does not exist: pass a text file, plain or .xz") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{label} cannot be read ({reason}): pass a text file, plain or .xz") from error
    return decoded(data, label)


def surrogate_problem(texts: Iterable[str]) -> str | None:
    """The first character that no UTF-8 text has, in words; None where every character is one."""
    for text in texts:
        for place, character in enumerate(text):
            if "\ud800" <= character <= "\udfff":
                start = len(text[:place].encode("utf-8", "surrogateescape"))
                if "\udc80" <= character <= "\udcff":  # Python's stand-in for a byte that it could not decode
                    return f"the text is not UTF-8 (byte {start} is 0x{ord(character) - 0xDC00:02X}): {REMEDY}"
                code = f"U+{ord(character):04X}"
                return f"the text has half of a surrogate pair ({code} at character {place}): write the whole character"
    return None
