"""The text of a sequence, detokenised when it is read and not when its tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bifolio.text.stopping import StopChecker, StopDecision


class TextReader:
    """Reads the text of one sequence from its output tokens, whole or token by token.

    The engine calls `check` after every token of a request with stop texts, which may end the sequence. For all other
    requests the text is computed by the thread that reads it: the whole text at once, or piece by piece for a stream.
    """

    __slots__ = ("_checker", "_new_checker", "_pieces", "_whole")

    def __init__(self, new_checker: Callable[[], StopChecker]) -> None:
        self._new_checker = new_checker  # a stop checker at the start of the text
        self._checker: StopChecker | None = None
        self._pieces: list[str] = []  # the text that each token completed, for tokens that were read one by one
        self._whole = (0, "")  # number of tokens, and their text

    def check(self, token_id: int) -> StopDecision:
        """Add the next token and check the stop conditions."""
        decision = self._started().check(token_id)
        self._pieces.append(decision.text)
        return decision

    def peek(self, token_id: int) -> StopDecision:
        """The decision of `check` for this token, which is not added."""
        return self._started().fork().check(token_id)

    def text_of(self, token_ids: Sequence[int], number: int) -> str:
        """The text that token `number` of the output (from 1 on) completed."""
        while len(self._pieces) < number:
            self.check(token_ids[len(self._pieces)])
        return self._pieces[number - 1]

    def whole(self, token_ids: Sequence[int], first: int = 0) -> str:
        """The final text of these tokens, the sequence's whole output, from number `first` on."""
        count = len(token_ids)
        if first:
            self.text_of(token_ids, count)
            return "".join(self._pieces[first:count])
        if count != self._whole[0]:
            if self._pieces:
                self.text_of(token_ids, count)
                text = "".join(self._pieces[:count])
            else:
                checker = self._new_checker()
                end = checker.tokens.check(token_ids[-1], count)
                text = checker.text.push_all(token_ids, end)[1].text
            self._whole = (count, text)
        return self._whole[1]

    def fork(self) -> TextReader:
        """Copy the state for a forked sequence."""
        copy = TextReader(self._new_checker)
        copy._checker = None if self._checker is None else self._checker.fork()
        copy._pieces, copy._whole = self._pieces.copy(), self._whole
        return copy

    def _started(self) -> StopChecker:
        if self._checker is None:
            self._checker = self._new_checker()
        return self._checker
