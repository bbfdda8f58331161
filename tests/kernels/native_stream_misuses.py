"""Misuses of the operations on streams: the changes to the valid arguments, and the error they raise."""

from __future__ import annotations

from native_misuses import misuses
from native_stream_calls import norm

NO_REGISTER = "is register 99 and must be one of"
NO_MULTIPLE = "must be a multiple of"

CLASSES = [
    *misuses(
        "AttentionShape.with_value_norm", ("a norm of other heads", {"norm": norm(9)}, "value_norm has 9 elements")
    ),
    *misuses("AttentionShape.of_queries", ("an argument", {"count": 1}, "incompatible", TypeError)),
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
MISUSES = [*CLASSES, *RECORDING]
