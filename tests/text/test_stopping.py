"""When requests end: tokens, stop texts however they are cut, and limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.sampling_params import SamplingParams
from bifolio.text.detokenizer import IncrementalDetokenizer
from bifolio.text.reader import TextReader
from bifolio.text.stopping import OutputText, StopChecker, StopDecision, StopStringScanner, TokenStops

EOS = 0


class LetterDecoder:
    """Token id = code point; id 0 has no text."""

    def decode(self, ids, skip_special_tokens=True) -> str:
        return "".join(chr(i) for i in ids if i or not skip_special_tokens)


def run(text: str, params: SamplingParams, max_model_len: int = 1000, prompt: int = 10) -> tuple[str, StopDecision]:
    checker = StopChecker(params, {EOS}, prompt, max_model_len, IncrementalDetokenizer(LetterDecoder()))
    shown = ""
    for char in text:
        decision = checker.check(ord(char))
        shown += decision.text
        if decision.finish_reason is not None:
            return shown, decision
    return shown, StopDecision("")


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: read one character more until a stop text ends the text read so far; the longest counts."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.full
@given(
    text=st.text("ab.", max_size=20),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3, unique=True),
    include=st.booleans(),
    cuts=st.lists(st.integers(1, 4), min_size=20, max_size=20),
)
@settings(max_examples=500, deadline=None)
def test_scanner_is_independent_of_the_cuts(text: str, stops: list[str], include: bool, cuts: list[int]) -> None:
    scanner = StopStringScanner(stops, include)
    shown, found, start = "", None, 0
    for cut in cuts:
        piece, start = text[start : start + cut], start + cut
        final, found = scanner.push(piece)
        shown += final
        assert text.startswith(shown)
        if found:
            break
    else:
        shown += scanner.flush()
    assert (shown, found) == reference(text, stops, include)


def test_text_that_may_begin_a_stop_text_is_held_back() -> None:
    scanner = StopStringScanner(["\n\nUser:"])
    assert scanner.push("Hi\n") == ("Hi", None)
    assert scanner.push("\nUs") == ("", None)
    assert scanner.push("ed") == ("\n\nUsed", None)
    assert scanner.push("\n\nUser: x") == ("", "\n\nUser:")


@pytest.mark.parametrize(("include", "expected"), [(False, "abc"), (True, "abcSTOP")])
def test_stop_text_across_tokens(include: bool, expected: str) -> None:
    params = SamplingParams(stop="STOP", max_tokens=None, include_stop_str_in_output=include)
    shown, decision = run("abcSTOPdef", params)
    assert (shown, decision.finish_reason, decision.stop_reason) == (expected, "stop", "STOP")


def test_end_of_text_and_stop_ids() -> None:
    params = SamplingParams(max_tokens=50, stop_token_ids=[ord("x")])
    shown, decision = run("ab\0cd", params)
    assert (shown, decision.finish_reason, decision.stop_reason) == ("ab", "stop", None)
    shown, decision = run("abxcd", params)
    assert (shown, decision.finish_reason, decision.stop_reason) == ("ab", "stop", ord("x"))
    shown, _ = run("ab\0cd", SamplingParams(max_tokens=50, ignore_eos=True))
    assert shown == "abcd"
    included, _ = run(
        "abxcd", SamplingParams(max_tokens=50, stop_token_ids=[ord("x")], include_stop_str_in_output=True)
    )
    assert included == "abx"


def test_held_back_text_appears_at_the_end() -> None:
    shown, decision = run("abST", SamplingParams(stop="STOP", max_tokens=4))
    assert (shown, decision.finish_reason) == ("abST", "length")
    shown, decision = run("abST\0", SamplingParams(stop="STOP", max_tokens=50))
    assert (shown, decision.finish_reason) == ("abST", "stop")


def test_limits() -> None:
    shown, decision = run("abcdefgh", SamplingParams(max_tokens=3))
    assert (shown, decision.finish_reason) == ("abc", "length")
    shown, decision = run("abcdefgh", SamplingParams(max_tokens=None), max_model_len=15, prompt=10)
    assert (shown, decision.finish_reason) == ("abcde", "length")
    shown, decision = run("abcde", SamplingParams(max_tokens=5, stop="e"))
    assert (shown, decision.finish_reason) == ("abcd", "stop")


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (1, "a"), (2, "aXb"), (3, "aXb"), (4, "aXbXc")])
def test_nothing_stops_before_min_tokens(min_tokens: int, expected: str) -> None:
    params = SamplingParams(stop="X", min_tokens=min_tokens, max_tokens=None)
    assert run("aXbXcX", params)[0] == expected
    params = SamplingParams(stop_token_ids=[ord("X")], min_tokens=min_tokens, max_tokens=None)
    assert run("aXbXcX", params)[0] == expected


def test_without_a_detokenizer_there_is_no_text() -> None:
    checker = StopChecker(SamplingParams(max_tokens=2), {EOS}, 1, 10, None)
    assert checker.check(5) == StopDecision("")
    assert checker.check(6) == StopDecision("", "length")


def test_forks_and_aborts() -> None:
    params = SamplingParams(stop="STOP", max_tokens=None)
    checker = StopChecker(params, {EOS}, 1, 100, IncrementalDetokenizer(LetterDecoder()))
    assert [checker.check(ord(char)).text for char in "aST"] == ["a", "", ""]
    twin = checker.fork()
    assert twin.check(ord("x")).text == "STx"
    assert checker.flush() == "ST"
    assert (checker.num_output, twin.num_output) == (3, 4)


@pytest.mark.full
@given(
    text=st.text("abST\0.", max_size=40),
    cuts=st.lists(st.integers(1, 9), min_size=40, max_size=40),
    stops=st.lists(st.text("abST.", min_size=1, max_size=3), max_size=2, unique=True),
    options=st.fixed_dictionaries(
        {
            "include_stop_str_in_output": st.booleans(),
            "min_tokens": st.integers(0, 5),
            "max_tokens": st.integers(5, 45),
            "stop_token_ids": st.sampled_from([[], [ord("b")]]),
        }
    ),
)
@settings(max_examples=300, deadline=None)
def test_a_reader_behind_the_engine_decides_as_one_that_checks_every_token(
    text: str, cuts: list[int], stops: list[str], options: dict[str, object]
) -> None:
    """The engine ends by tokens alone and sends them in pieces; the reader cuts them at the first stop text."""
    params = SamplingParams(stop=stops, **options)
    shown, decision = run(text, params)
    expected_count = next(
        (n for n in range(1, len(text) + 1) if run(text[:n], params)[1].finish_reason is not None), len(text)
    )
    tokens, ends = [ord(char) for char in text], TokenStops(params, {EOS}, 10, 1000)
    sent = next((n for n, token in enumerate(tokens, 1) if ends.check(token, n) is not None), len(tokens))
    reader = OutputText(params, IncrementalDetokenizer(LetterDecoder()))
    start, seen, found, count = 0, "", StopDecision(""), 0
    for cut in cuts:
        piece = tokens[start : min(start + cut, sent)]
        start += len(piece)
        if not piece:
            break
        taken, found = reader.push_all(piece, ends.check(piece[-1], start))
        seen, count = seen + found.text, count + taken
        if found.finish_reason is not None:
            break
    assert (seen, count) == (shown, expected_count)
    assert (found.finish_reason, found.stop_reason) == (decision.finish_reason, decision.stop_reason)


@pytest.mark.parametrize("one_by_one", [0, 4, 20])
def test_a_text_is_the_same_however_it_is_read(one_by_one: int) -> None:
    params = SamplingParams(stop="STOP", max_tokens=12)
    tokens = [ord(char) for char in "abcSTxyzST_z"]

    def new_checker() -> StopChecker:
        return StopChecker(params, {EOS}, 1, 100, IncrementalDetokenizer(LetterDecoder()))

    reader = TextReader(new_checker)
    pieces = [reader.text_of(tokens, number) for number in range(1, min(one_by_one, len(tokens)) + 1)]
    assert "abcSTxyzST_z".startswith("".join(pieces))
    twin = reader.fork()
    assert reader.whole(tokens) == twin.whole(tokens) == "abcSTxyzST_z"
    assert reader.text_of(tokens, 6) == twin.text_of(tokens, 6) == "STx"
