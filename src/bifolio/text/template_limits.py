"""Limits on the time of a chat template and on the size of the values that it builds."""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from bifolio.errors import ChatTemplateError

MAX_OUTPUT_CHARS = 4 << 20  # of one value, and of the whole text
MAX_BUILT_CHARS = 64 << 20  # of all values that one rendering builds
MAX_SECONDS = 2.0
MAX_NUMBER = 100_000  # loop iterations; widths, counts and indents
ITEM_CHARS = 16  # an item of a list counts as so many characters
WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)|\{[^}]*\d{5}|\{[^}]*\{")  # padding of 10,000 and more, or computed
SPREADING = {"list", "sort", "unique", "batch", "slice", "groupby"}  # filters that make a list of a text's characters
PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "slice", "batch", "tojson", "wordwrap", "round"}


class Limits:
    """Time and size limits of one rendering."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self.built = 0

    def tick(self) -> None:
        if time.monotonic() > self.deadline:
            raise ChatTemplateError(f"the chat template ran longer than {MAX_SECONDS:g} seconds")

    def count(self, value: Any) -> Any:
        """Add the size of a value to the total and return the value if it is within the limits."""
        if isinstance(value, str | list | tuple):
            self.allow(len(value))
            self.built += len(value) if isinstance(value, str) else ITEM_CHARS * len(value)
            if self.built > MAX_BUILT_CHARS:
                raise ChatTemplateError(f"the chat template built texts of more than {MAX_BUILT_CHARS} characters")
            self.tick()
        return value

    def allow(self, size: int) -> None:
        if size > MAX_OUTPUT_CHARS:
            raise ChatTemplateError(f"the chat template built a text of more than {MAX_OUTPUT_CHARS} characters")

    def allow_spelled(self, value: Any) -> Any:
        """Return the value if its string form is within the limits, including lists that repeat one long text."""
        size, left, turns = 0, [value], 0
        while left:
            item = left.pop()
            turns += 1
            if not turns % 4096:
                self.tick()
            if isinstance(item, Mapping):
                left.extend(item.keys())
                left.extend(item.values())
            elif isinstance(item, list | tuple | set | KeysView | ValuesView | ItemsView):
                left.extend(item)
            elif type(item).__name__ == "Namespace":  # of jinja2; it is spelled as the dict of its attributes
                left.append(object.__getattribute__(item, "_Namespace__attrs"))
            size += len(item) if isinstance(item, str) else 4
            self.allow(size)
        return value

    def check_call(self, name: str, arguments: Sequence[Any]) -> None:
        """Reject arguments that would build a large value; `arguments` begin with the object of a method."""
        for value in arguments:
            self.allow_spelled(value)
            if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER and name in PADDING:
                raise ChatTemplateError(f"the chat template calls {name!r} with {value}, which is not allowed")
        if name in SPREADING and isinstance(arguments[0], str):
            self.allow(ITEM_CHARS * len(arguments[0]))
        if name in ("format", "format_map", "%") and WIDE_FIELD.search(re.sub(r"\{\{|\}\}", "", str(arguments[0]))):
            raise ChatTemplateError("the chat template uses format fields of a width that is not allowed")
        if name == "%":
            sizes = [len(str(value)) for value in _format_values(arguments[1])] if len(arguments) > 1 else []
            self.allow(len(str(arguments[0])) + str(arguments[0]).count("%") * max(sizes, default=0))
        if name == "replace" and len(arguments) >= 3:
            text, old, new = (str(value) for value in arguments[:3])
            self.allow(len(text) + text.count(old) * len(new))

    def join(self, separator: str, items: Iterable[Any]) -> str:
        pieces: list[str] = []
        size = 0
        for item in items:
            pieces.append(str(self.allow_spelled(item)))
            size += len(pieces[-1]) + len(separator)
            self.allow(size)
        return str(self.count(separator.join(pieces)))


def _format_values(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, tuple | list) else [value]
