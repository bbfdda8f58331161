"""Misuses of the memory of ranks: the changes to the valid arguments, and the error they raise."""

from __future__ import annotations

from native_calls import floats, rank_memory
from native_misuses import misuses

MISUSES = [
    *misuses(
        "rank_memory_bytes", ("no rank", {"size": 0}, "size is 0"), ("too many ranks", {"size": 65}, "size is 65")
    ),
    *misuses(
        "Ranks",
        ("a rank past the last", {"rank": 1}, "rank is 1 and must be between 0 and 0"),
        ("no ranks", {"size": 0}, "size is 0"),
        ("memory of one rank for two", {"size": 2}, "and must have"),
        ("memory off a cache line", {"memory": rank_memory()[8:]}, "memory"),
    ),
    *misuses(
        "Ranks.gather",
        ("widths of other ranks", {"widths": [4, 4]}, "widths has 2 elements and must have 1"),
        ("another width", {"widths": [7]}, "x is 8 wide and must be 7 wide"),
        ("a negative width", {"widths": [-8]}, "a width is -8"),
        ("a row that is too wide", {"widths": [1 << 40]}, "a width is"),
        ("an output of another shape", {"out": floats(3, 9)}, r"out has the shape \(3, 9\)"),
    ),
    *misuses("Ranks.reduce", ("no columns", {"x": floats(3, 0)}, "the width of x is 0")),
    *misuses("Ranks.post", ("an unknown signal", {"signal": 66}, "signal is 66")),
    *misuses("Ranks.read", ("a negative signal", {"signal": -1}, "signal is -1")),
    *misuses("Ranks.wait", ("an unknown signal", {"signal": 1 << 20}, "signal is 1048576")),
]
