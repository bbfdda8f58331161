"""The screen of a terminal: text with escape sequences goes in, rows of styled characters come out.

Knows the sequences that `bifolio` writes: colours and weights, movement of the cursor, clearing of lines and of the
screen. Other sequences are read and ignored.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|\x1b[()][A-Z0-9]|\x1b[=>78]|\x1b\][^\x07]*\x07")
BASIC = ("#1f2428", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#dcdfe4")
BRIGHT = ("#7f848e", "#ff7b86", "#b5e08d", "#ffd68a", "#7cc4ff", "#e29bf5", "#7fd6e0", "#ffffff")


class Style(NamedTuple):
    """How a character looks; colours are those of CSS, None is the terminal's own."""

    colour: str | None = None
    back: str | None = None
    bold: bool = False
    dim: bool = False
    italic: bool = False
    underline: bool = False


PLAIN = Style()
Row = tuple[tuple[str, Style], ...]  # runs of one style, from left to right; empty at the right end


class Screen:
    """`height` rows of `width` characters and a cursor."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._rows = [self._blank() for _ in range(height)]
        self._x = self._y = 0
        self._style = PLAIN

    def _blank(self) -> list[tuple[str, Style]]:
        return [(" ", PLAIN)] * self.width

    def rows(self) -> tuple[Row, ...]:
        return tuple(_runs(row) for row in self._rows)

    @property
    def cursor(self) -> tuple[int, int]:
        return min(self._x, self.width - 1), self._y

    def feed(self, text: str) -> None:
        place = 0
        for match in SEQUENCE.finditer(text):
            self._write(text[place : match.start()])
            if match[2] is not None:
                self._control(match[1], match[2])
            place = match.end()
        self._write(text[place:])

    def _write(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._down()
            elif character == "\r":
                self._x = 0
            elif character == "\b":
                self._x = max(0, self._x - 1)
            elif character == "\t":
                self._x = min(self.width - 1, (self._x // 8 + 1) * 8)
            elif character >= " ":
                if self._x >= self.width:  # a full line continues on the next one
                    self._x = 0
                    self._down()
                self._rows[self._y][self._x] = (character, self._style)
                self._x += 1

    def _down(self) -> None:
        if self._y + 1 < self.height:
            self._y += 1
        else:
            self._rows = [*self._rows[1:], self._blank()]

    def _control(self, parameters: str, letter: str) -> None:
        numbers = [int(number) if number.isdigit() else 0 for number in parameters.split(";")]
        count = max(1, numbers[0])
        if letter == "m":
            self._style = _styled(self._style, numbers)
        elif letter in "AB":
            self._y = min(self.height - 1, max(0, self._y + (count if letter == "B" else -count)))
        elif letter in "CD":
            self._x = min(self.width - 1, max(0, self._x + (count if letter == "C" else -count)))
        elif letter == "G":
            self._x = min(self.width, count) - 1
        elif letter in "Hf":
            self._y = min(self.height, count) - 1
            self._x = min(self.width, max(1, numbers[1] if len(numbers) > 1 else 1)) - 1
        elif letter == "K":
            self._clear(self._y, *self._part(numbers[0], self._x, self.width))
        elif letter == "J":
            self._clear(self._y, *self._part(numbers[0], self._x, self.width))
            first, last = self._part(numbers[0], self._y, self.height)
            for y in range(first, last):
                if y != self._y:
                    self._clear(y, 0, self.width)

    @staticmethod
    def _part(kind: int, place: int, size: int) -> tuple[int, int]:
        """The range that an erasing sequence means: after the cursor, before it, or everything."""
        return {0: (place, size), 1: (0, place + 1)}.get(kind, (0, size))

    def _clear(self, y: int, first: int, last: int) -> None:
        self._rows[y][first:last] = [(" ", PLAIN)] * (min(last, self.width) - min(first, self.width))


def _runs(row: list[tuple[str, Style]]) -> Row:
    length = len(row)
    while length and row[length - 1][0] == " " and row[length - 1][1].back is None:
        length -= 1
    runs: list[tuple[str, Style]] = []
    for character, style in row[:length]:
        if runs and runs[-1][1] == style:
            runs[-1] = (runs[-1][0] + character, style)
        else:
            runs.append((character, style))
    return tuple(runs)


def _styled(style: Style, numbers: list[int]) -> Style:
    """The style after an SGR sequence."""
    flags = {1: "bold", 2: "dim", 3: "italic", 4: "underline"}
    place = 0
    while place < len(numbers):
        number = numbers[place]
        if number == 0:
            style = PLAIN
        elif number in flags:
            style = style._replace(**{flags[number]: True})
        elif number == 22:
            style = style._replace(bold=False, dim=False)
        elif number in (23, 24):
            style = style._replace(**{flags[number - 20]: False})
        elif number in (38, 48):
            colour, used = _colour(numbers[place + 1 :])
            style = style._replace(colour=colour) if number == 38 else style._replace(back=colour)
            place += used
        elif number in (39, 49):
            style = style._replace(colour=None) if number == 39 else style._replace(back=None)
        elif 30 <= number <= 37 or 90 <= number <= 97:
            style = style._replace(colour=(BASIC if number < 90 else BRIGHT)[number % 10])
        elif 40 <= number <= 47 or 100 <= number <= 107:
            style = style._replace(back=(BASIC if number < 100 else BRIGHT)[number % 10])
        place += 1
    return style


def _colour(numbers: list[int]) -> tuple[str | None, int]:
    """The colour of `5;N` or `2;R;G;B`, and the numbers that it takes."""
    if numbers[:1] == [2] and len(numbers) >= 4:
        return "#{:02x}{:02x}{:02x}".format(*numbers[1:4]), 4
    if numbers[:1] != [5] or len(numbers) < 2:
        return None, len(numbers)
    code = numbers[1]
    if code < 16:
        return (BASIC + BRIGHT)[code], 2
    if code >= 232:
        return "#" + f"{8 + 10 * (code - 232):02x}" * 3, 2
    levels = (0, 95, 135, 175, 215, 255)
    parts = (levels[(code - 16) // 36], levels[(code - 16) // 6 % 6], levels[(code - 16) % 6])
    return "#{:02x}{:02x}{:02x}".format(*parts), 2
