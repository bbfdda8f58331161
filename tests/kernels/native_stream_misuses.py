"""Misuses of the operations on streams: the changes to the valid arguments, and the error they raise."""

from __future__ import annotations

from native_misuses import misuses
from native_stream_calls import ALL, STREAMS, TOKENS, floats, norm

NO_REGISTER = "is register 99 and must be one of"
NO_MULTIPLE = "must be a multiple of"
_SHAPE = rf"out has the shape \({TOKENS}, 9\)"

ARRAYS = [
    *misuses(
        "AttentionShape.with_value_norm", ("a norm of other heads", {"norm": norm(9)}, "value_norm has 9 elements")
    ),
    *misuses("AttentionShape.of_queries", ("an argument", {"count": 1}, "incompatible", TypeError)),
    *misuses(
        "mix_streams",
        ("no streams", {"streams": 0}, "streams is 0"),
        ("a part of a stream", {"streams": 5}, NO_MULTIPLE),
        ("too few coefficients", {"coefficients": floats(TOKENS, 3)}, NO_MULTIPLE),
        ("an output of another shape", {"out": floats(TOKENS, 9)}, _SHAPE),
    ),
    *misuses(
        "add_to_streams",
        ("a part of a stream", {"y": floats(TOKENS, 7)}, NO_MULTIPLE),
        ("no columns", {"y": floats(TOKENS, 0)}, NO_MULTIPLE),
        ("too many coefficients", {"coefficients": floats(TOKENS, 5)}, "coefficients is 5 wide and must be 4 wide"),
        ("coefficients of other rows", {"coefficients": floats(5, STREAMS)}, "coefficients has the shape"),
        ("an output of another shape", {"out": floats(TOKENS, 9)}, _SHAPE),
    ),
    *misuses(
        "match_streams",
        ("a part of a stream", {"y": floats(TOKENS, 9)}, NO_MULTIPLE),
        ("rows of another batch", {"y": floats(5, ALL)}, "y has the shape"),
        ("an output of another shape", {"out": floats(TOKENS, 9)}, _SHAPE),
    ),
]
RECORDING = [
    *misuses(
        "Program.mix_streams",
        ("no streams", {"streams": 0}, "streams is 0"),
        ("a part of a stream", {"streams": 3}, NO_MULTIPLE),
    ),
    *misuses(
        "Program.add_to_streams",
        ("an unknown register", {"y": 99}, NO_REGISTER),
        ("unknown coefficients", {"coefficients": 99}, NO_REGISTER),
        ("too few coefficients", {"coefficients": [1.0]}, "coefficients is 1 wide and must be 4 wide"),
        ("no coefficients", {"coefficients": None}, "incompatible", TypeError),
    ),
    *misuses(
        "Program.match_streams",
        ("a negative register", {"x": -1}, "x is register -1"),
        ("an unknown register", {"y": 99}, NO_REGISTER),
        ("a part of a stream", {"x": 1, "y": 0}, NO_MULTIPLE),
    ),
]
MISUSES = [*ARRAYS, *RECORDING]
