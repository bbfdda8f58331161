"""The animated pictures of the documentation are drawn from the recordings in docs/data."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from xml.etree import ElementTree

import pytest
from doc_blocks import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from recordings.animation import Changes, shown
from recordings.screen import PLAIN, Screen
from recordings.terminal_svg import Recording, draw, frames

MAX_BYTES = 300_000


def script() -> ModuleType:
    loader = SourceFileLoader("record_docs", str(ROOT / "scripts" / "record-docs"))
    spec = importlib.util.spec_from_loader("record_docs", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_pictures_are_those_of_the_recordings() -> None:
    for path, text in script().pictures().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"run scripts/record-docs --draw: {path.name} is another picture"
        )
        assert len(text.encode()) < MAX_BYTES
        root = ElementTree.fromstring(text)
        assert root.findall(".//{http://www.w3.org/2000/svg}animate")
        assert 18 <= max(float(found) for found in re.findall(r'dur="([\d.]+)s"', text)) <= 26  # about 20 seconds


def text_of(screen: Screen) -> list[str]:
    return ["".join(text for text, _ in row) for row in screen.rows()]


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        ("one\r\ntwo", ["one", "two", ""]),
        ("abc\rX", ["Xbc", "", ""]),
        ("one\r\ntwo\x1b[1A\r\x1b[2Knew", ["new", "two", ""]),
        ("abcdefghXY", ["abcdefgh", "XY", ""]),
        ("1\r\n2\r\n3\r\n4", ["2", "3", "4"]),
        ("abc\x1b[2D\x1b[K", ["a", "", ""]),
        ("a\r\nb\r\nc\x1b[2;1H\x1b[J", ["a", "", ""]),
        ("\x1b[?2004hhi\x1b[?25l", ["hi", "", ""]),
    ],
)
def test_the_screen_follows_escape_sequences(written: str, rows: list[str]) -> None:
    screen = Screen(8, 3)
    screen.feed(written)
    assert text_of(screen) == rows


def test_the_screen_keeps_styles() -> None:
    screen = Screen(20, 1)
    screen.feed("a\x1b[1;31mb\x1b[0mc\x1b[38;5;16md\x1b[48;2;1;2;3me")
    (row,) = screen.rows()
    assert row[0] == ("a", PLAIN)
    assert (row[1][1].bold, row[1][1].colour) == (True, "#e06c75")
    assert row[2] == ("c", PLAIN)
    assert row[3][1].colour == "#000000"
    assert row[4][1].back == "#010203"


def test_a_frame_is_the_last_state_of_its_moment_and_every_row_is_written_once_for_each_text() -> None:
    recording = Recording(10, 2, [(0.0, "> "), (1.0, "h"), (1.01, "i"), (2.0, "\r\nyes")])
    assert [time for time, *_ in frames(recording)] == [0.0, 1.0, 2.0]
    picture = draw(recording, "title")
    moving = picture[picture.index('class="moving"') : picture.index('class="still"')]
    assert [found.strip() for found in re.findall(r"<tspan[^>]*>([^<]*)<", moving)] == ["&gt;", "&gt; hi", "yes"]
    assert draw(recording, "title") == picture


def test_times_of_an_animation_are_fractions_of_its_length() -> None:
    changes = Changes([(0.0, "a"), (1.0, "a"), (2.0, "b"), (9.0, "c")])
    assert 'keyTimes="0;0.5" values="a;b"' in changes.animate("fill", 4.0)
    assert shown(0.0, 4.0, 4.0) == ("", "")  # always visible
    hidden, animation = shown(1.0, 2.0, 4.0)
    assert "hidden" in hidden
    assert 'keyTimes="0;0.25;0.5" values="hidden;visible;hidden"' in animation
