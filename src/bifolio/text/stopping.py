"""Stop conditions of a request, checked after each new token: stop tokens, stop texts and limits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from bifolio.sampling_params import SamplingParams
from bifolio.text.detokenizer import IncrementalDetokenizer


class StopDecision(NamedTuple):
    """The result of checking one token."""

    text: str = ""  # text that is now final and can be sent
    finish_reason: Literal["stop", "length"] | None = None  # None: continue
    stop_reason: str | int | None = None  # the stop text or stop token id that ended it; None for the end of text


CONTINUE = StopDecision()


class StopStringScanner:
    """Finds the first stop text in text that arrives in pieces of any size.

    The result equals that of scanning character by character: the stop text that completes first ends the request (the
    longest, if several end at the same character). A tail that may begin a stop text is held back until it is decided.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._longest = max((len(stop) for stop in stops), default=0)
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(final text, stop text found or None). Unless `armed`, stop texts are treated as ordinary text."""
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
        """Return the text held back; the output ends here, so no stop text can complete."""
        text, self._held = self._held, ""
        return text

    def fork(self) -> StopStringScanner:
        copy = StopStringScanner(self._stops, self._include)
        copy._held = self._held
        return copy

    def _find(self, text: str, known: int) -> tuple[int, str] | None:
        """(start, stop text) of the match that ends first, beyond the first `known` characters."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0] + len(best[1])):
                best = (start, stop)
        return best

    def _partial(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop text."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class StopChecker:
    """Detokenises one sequence and checks its stop conditions.

    In order of precedence: the end-of-text token or a stop token id, a stop text, then the limits (`max_tokens`, the
    model's context). Before `min_tokens` output tokens only the limits apply. The stop token and, by default, the stop
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
        """Check one new token; after a decision with a finish reason no further token is allowed."""
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
        return StopDecision(text) if text else CONTINUE

    def fork(self) -> StopChecker:
        """Copy the state for a forked sequence."""
        copy = object.__new__(StopChecker)
        copy._params, copy._eos, copy._stop_ids = self._params, self._eos, self._stop_ids
        copy._limit, copy.num_output = self._limit, self.num_output
        copy._detokenizer = None if self._detokenizer is None else self._detokenizer.fork()
        copy._scanner = self._scanner.fork()
        return copy

    def flush(self) -> str:
        """Return the text held back, for a sequence that ends without a stop decision (an abort)."""
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
