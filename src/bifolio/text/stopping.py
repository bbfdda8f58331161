"""Stop conditions of a request: stop tokens and limits, which need no text, and stop texts.

    TokenStops   end-of-text tokens, stop token ids, limits         the engine checks these after every token
    OutputText   the text of the tokens and the stop texts in it    the reader of the text checks these

`StopChecker` is both for one sequence. The reader may be another process: the engine then runs a few tokens further
than a stop text, and the reader cuts them off.
"""

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


class TokenEnd(NamedTuple):
    """The end of a sequence by its last token or by a limit."""

    finish_reason: Literal["stop", "length"]
    stop_reason: int | None = None  # the stop token id; None for the end of text and for a limit


class TokenStops:
    """The stop conditions that need no text: end-of-text tokens, stop token ids, `max_tokens` and the context."""

    __slots__ = ("_stop_ids", "end_ids", "limit", "min_tokens")

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], num_prompt_tokens: int, max_model_len: int
    ) -> None:
        room = max_model_len - num_prompt_tokens
        self._stop_ids = frozenset(params.stop_token_ids)
        self.end_ids = self._stop_ids if params.ignore_eos else self._stop_ids | frozenset(eos_token_ids)
        self.limit = room if params.max_tokens is None else min(room, params.max_tokens)  # output tokens
        self.min_tokens = params.min_tokens

    def check(self, token_id: int, num_output: int) -> TokenEnd | None:
        """The end that comes with output token number `num_output` (from 1 on), if any."""
        if token_id in self.end_ids and num_output > self.min_tokens:
            return TokenEnd("stop", token_id if token_id in self._stop_ids else None)
        return TokenEnd("length") if num_output >= self.limit else None


class StopStringScanner:
    """Finds the first stop text in text that arrives in pieces of any size.

    The result equals that of scanning character by character: the stop text that completes first ends the request (the
    longest, if several end at the same character). A tail that may begin a stop text is held back until it is decided.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
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
        copy = object.__new__(StopStringScanner)
        copy._stops, copy._include, copy._held = self._stops, self._include, self._held
        return copy

    @property
    def has_stops(self) -> bool:
        return bool(self._stops)

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
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            if start >= 0:
                longest = max(longest, len(text) - start)
        return longest


class OutputText:
    """The text of one sequence: detokenises its tokens and ends at the first stop text.

    The token that ends a sequence and, by default, the stop text are not part of the text. Before `min_tokens` tokens
    stop texts are ordinary text.
    """

    __slots__ = ("_detokenizer", "_include", "_min_tokens", "_scanner", "num_tokens")

    def __init__(self, params: SamplingParams, detokenizer: IncrementalDetokenizer | None) -> None:
        """Without a detokenizer there is no text: `StopDecision.text` is empty and stop texts cannot be found."""
        self._detokenizer = detokenizer
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._scanner = StopStringScanner(params.stop, params.include_stop_str_in_output)
        self.num_tokens = 0

    def push(self, token_id: int, end: TokenEnd | None) -> StopDecision:
        """Add one token; `end` says that the sequence ends with it whatever the text is."""
        self.num_tokens += 1
        is_stop = end is not None and end.finish_reason == "stop"
        if end is not None and is_stop and not (self._include and end.stop_reason is not None):
            text, stop = "", None
        else:
            text, stop = self._read([token_id], self.num_tokens > self._min_tokens)
        if end is not None and is_stop:
            return StopDecision(text if stop is not None else text + self.flush(), "stop", end.stop_reason)
        if stop is not None:
            return StopDecision(text, "stop", stop)
        if end is not None:
            return StopDecision(text + self.flush(), "length")
        return StopDecision(text) if text else CONTINUE

    def push_all(self, token_ids: Sequence[int], end: TokenEnd | None) -> tuple[int, StopDecision]:
        """Add tokens, the last of which has this `end`: (number of tokens up to the end, decision over all of them).

        The result is that of `push` for each token. The tokens are detokenised together, and one by one only where
        a stop text has to be attributed to a token.
        """
        count = len(token_ids)
        plain = count if end is None else count - 1
        text = self._push_plain(token_ids[:plain]) if plain > 1 else None
        if text is None:
            text, plain = "", 0
        for number in range(plain, count):
            decision = self.push(token_ids[number], end if number == count - 1 else None)
            text += decision.text
            if decision.finish_reason is not None:
                return number + 1, decision._replace(text=text)
        return count, StopDecision(text) if text else CONTINUE

    def _push_plain(self, token_ids: Sequence[int]) -> str | None:
        """The text of tokens without an end; None, with no state changed, if they must be added one by one."""
        if not self._scanner.has_stops:
            self.num_tokens += len(token_ids)
            return self._read(token_ids, armed=False)[0]
        if self.num_tokens < self._min_tokens:
            return None
        ahead = self.fork()
        text, stop = ahead._read(token_ids, armed=True)
        if stop is not None:
            return None
        self._detokenizer, self._scanner = ahead._detokenizer, ahead._scanner
        self.num_tokens += len(token_ids)
        return text

    def flush(self) -> str:
        """Return the text held back: no further token follows."""
        tail = "" if self._detokenizer is None else self._detokenizer.finish()
        return self._scanner.push(tail, armed=False)[0] + self._scanner.flush()

    def fork(self) -> OutputText:
        """Copy the state for a forked sequence."""
        copy = object.__new__(OutputText)
        copy._include, copy._min_tokens, copy.num_tokens = self._include, self._min_tokens, self.num_tokens
        copy._detokenizer = None if self._detokenizer is None else self._detokenizer.fork()
        copy._scanner = self._scanner.fork()
        return copy

    def _read(self, token_ids: Sequence[int], armed: bool) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        return self._scanner.push(self._detokenizer.push_all(token_ids), armed)


class StopChecker:
    """Both kinds of stop conditions for one sequence.

    In order of precedence: the end-of-text token or a stop token id, a stop text, then the limits (`max_tokens`, the
    model's context). Before `min_tokens` output tokens only the limits apply. The ending token stays in the list of
    token ids.
    """

    __slots__ = ("text", "tokens")

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        num_prompt_tokens: int,
        max_model_len: int,
        detokenizer: IncrementalDetokenizer | None,
    ) -> None:
        self.tokens = TokenStops(params, eos_token_ids, num_prompt_tokens, max_model_len)
        self.text = OutputText(params, detokenizer)

    @property
    def num_output(self) -> int:
        return self.text.num_tokens

    def check(self, token_id: int) -> StopDecision:
        """Check one new token; after a decision with a finish reason no further token is allowed."""
        return self.text.push(token_id, self.tokens.check(token_id, self.text.num_tokens + 1))

    def fork(self) -> StopChecker:
        """Copy the state for a forked sequence."""
        copy = object.__new__(StopChecker)
        copy.tokens, copy.text = self.tokens, self.text.fork()
        return copy

    def flush(self) -> str:
        """Return the text held back, for a sequence that ends without a stop decision (an abort)."""
        return self.text.flush()
