"""When a request ends: its tokens, its text and its limits, looked at after each new token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from bifolio.sampling_params import SamplingParams
from bifolio.text.detokenizer import IncrementalDetokenizer


class StopDecision(NamedTuple):
    """The consequence of one token for its sequence."""

    text: str = ""  # text that is now final and may be shown
    finish_reason: Literal["stop", "length"] | None = None  # None: go on
    stop_reason: str | int | None = None  # the stop text or stop token id that ended it; None for the end of text


GO_ON = StopDecision()


class StopStringScanner:
    """Finds the first stop text in text that arrives in pieces, however it is cut.

    The result is that of reading character by character: the stop text that is complete first ends the request (the
    longest, if several end there). A tail that may be the beginning of a stop text is held back until that is decided.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._longest = max((len(stop) for stop in stops), default=0)
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that is final, the stop text found or None). Unless `armed`, a complete stop text is only text."""
        if not self._stops or not text:
            return text, None
        known = len(self._held)
        text = self._held + text
        found = self._find(text, known) if armed else None
        if found is not None:
            start, stop = found
            self._held = ""
            return text[: start + len(stop) if self._include else start], stop
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back: the text ends here, so it was no stop text."""
        text, self._held = self._held, ""
        return text

    def fork(self) -> StopStringScanner:
        twin = StopStringScanner(self._stops, self._include)
        twin._held = self._held
        return twin

    def _find(self, text: str, known: int) -> tuple[int, str] | None:
        """(start, stop text) of the match that ends first, beyond the first `known` characters."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0] + len(best[1])):
                best = (start, stop)
        return best

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop text without completing it."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class StopChecker:
    """Follows one sequence: turns its tokens into text and says when it is finished.

    In order of precedence: the end of text or a stop token id, a stop text, then the limits (`max_tokens`, the model's
    length). Until `min_tokens` tokens are out only the limits count. The stop token and, unless asked for, the stop
    text are not part of the text; the token stays in the list of token ids.
    """

    __slots__ = ("_detokenizer", "_eos", "_limit", "_params", "_scanner", "_stop_ids", "num_output")

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        num_prompt_tokens: int,
        max_model_len: int,
        detokenizer: IncrementalDetokenizer | None,
    ) -> None:
        """Without a detokenizer there is no text: `StopDecision.text` is empty and stop texts cannot be found."""
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        room = max_model_len - num_prompt_tokens
        self._limit = room if params.max_tokens is None else min(room, params.max_tokens)
        self._detokenizer = detokenizer
        self._scanner = StopStringScanner(params.stop, params.include_stop_str_in_output)
        self.num_output = 0

    def check(self, token_id: int) -> StopDecision:
        """Take one new token; after a decision with a finish reason no further token may come."""
        self.num_output += 1
        armed = self.num_output > self._params.min_tokens
        ends = armed and (token_id in self._stop_ids or token_id in self._eos)
        if ends and not (self._params.include_stop_str_in_output and token_id in self._stop_ids):
            text, stop = "", None
        else:
            text, stop = self._read(token_id, armed)
        if ends:
            return self._end(text, stop, "stop", token_id if token_id in self._stop_ids else None)
        if stop is not None:
            return StopDecision(text, "stop", stop)
        if self.num_output >= self._limit:
            return self._end(text, stop, "length", None)
        return StopDecision(text) if text else GO_ON

    def fork(self) -> StopChecker:
        """An independent copy, for a sequence that continues in several ways."""
        twin = object.__new__(StopChecker)
        twin._params, twin._eos, twin._stop_ids = self._params, self._eos, self._stop_ids
        twin._limit, twin.num_output = self._limit, self.num_output
        twin._detokenizer = None if self._detokenizer is None else self._detokenizer.fork()
        twin._scanner = self._scanner.fork()
        return twin

    def flush(self) -> str:
        """The text still held back, for a sequence that ends for a reason outside (an abort)."""
        tail = "" if self._detokenizer is None else self._detokenizer.finish()
        return self._scanner.push(tail, armed=False)[0] + self._scanner.flush()

    def _read(self, token_id: int, armed: bool) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        return self._scanner.push(self._detokenizer.push(token_id), armed)

    def _end(
        self, text: str, stop: str | None, reason: Literal["stop", "length"], stop_reason: int | None
    ) -> StopDecision:
        return StopDecision(text if stop is not None else text + self.flush(), reason, stop_reason)
