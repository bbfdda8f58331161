"""Answers that are put together from pieces."""

from __future__ import annotations

from bifolio.serve.http.generation import Piece
from bifolio.serve.http.whole_answers import Answer


class Counted(str):
    """A text that counts the characters of sums that it is a part of."""

    num_copied = 0

    def __add__(self, other: str) -> Counted:
        Counted.num_copied += len(self) + len(other)
        return Counted(str.__add__(self, other))

    def __radd__(self, other: str) -> Counted:
        Counted.num_copied += len(self) + len(other)
        return Counted(str.__add__(other, self))


def test_a_piece_does_not_copy_the_text_before_it() -> None:
    Counted.num_copied = 0
    answer = Answer()
    for number in range(1000):
        answer.add(Piece(0, Counted(f"{number} "), [number]))
    answer.add(Piece(0, "", [], finish_reason="stop"))
    assert Counted.num_copied == 0
    assert answer.text == "".join(f"{number} " for number in range(1000))
    assert answer.token_ids == list(range(1000))
    assert answer.finish_reason == "stop"
