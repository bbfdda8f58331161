"""Misuses of the operations on streams: the changes to the valid arguments, and the error they raise."""

from __future__ import annotations

import numpy as np
from native_misuses import INFINITY, NAN, misuses
from native_stream_calls import ALL, SIZE, STREAMS, TOKENS, floats, norm

NO_REGISTER = "is register 99 and must be one of"
NO_MULTIPLE = "must be a multiple of"
_SHAPE = rf"out has the shape \({TOKENS}, 9\)"

ARRAYS = [
    *misuses(
        "AttentionShape.with_value_norm", ("a norm of other heads", {"norm": norm(9)}, "value_norm has 9 elements")
    ),
    *misuses("AttentionShape.of_queries", ("an argument", {"count": 1}, "incompatible", TypeError)),
    *misuses(
        "add_scaled",
        ("an infinite scale", {"scale": INFINITY}, "scale is inf"),
        ("another width", {"y": floats(TOKENS, 9)}, "y has the shape"),
        ("an output of another shape", {"out": floats(TOKENS, 9)}, _SHAPE),
    ),
    *misuses(
        "embed_known",
        ("a negative id", {"ids": np.array([0, -1, 2], np.int32)}, r"ids\[1\] is -1"),
        ("a NaN scale", {"scale": NAN}, "scale is nan"),
        ("an output of another shape", {"out": floats(3, 9)}, "out has the shape"),
    ),
    *misuses(
        "norm_groups",
        ("a part of a group", {"x": floats(TOKENS, 12), "out": floats(TOKENS, 12)}, NO_MULTIPLE),
        ("an output of another shape", {"out": floats(TOKENS, 9)}, _SHAPE),
    ),
    *misuses(
        "act_gate",
        ("a negative start", {"start": -1}, "start is -1"),
        ("columns past the end", {"start": ALL - SIZE + 1}, "inputs has 7 columns from start on and must have 8"),
        ("an unknown activation", {"activation": 5}, "activation is 5"),
        ("rows of another batch", {"inputs": floats(5, ALL)}, "inputs has the shape"),
    ),
    *misuses(
        "sparse_act_mul",
        ("an odd width", {"x": floats(TOKENS, 33)}, "must have an even width"),
        ("a NaN cutoff", {"deviations": NAN}, "deviations is nan"),
        ("an unknown activation", {"activation": -1}, "activation is -1"),
        ("an output of another shape", {"out": floats(TOKENS, 9)}, _SHAPE),
    ),
    *misuses(
        "mix_streams",
        ("no streams", {"streams": 0}, "streams is 0"),
        ("a part of a stream", {"streams": 5}, NO_MULTIPLE),
        ("too few coefficients", {"coefficients": floats(TOKENS, 3)}, NO_MULTIPLE),
        ("an output of another shape", {"out": floats(TOKENS, 9)}, _SHAPE),
    ),
    *misuses(
        "correct_streams",
        ("a part of a stream", {"y": floats(TOKENS, 7)}, NO_MULTIPLE),
        ("no columns", {"y": floats(TOKENS, 0)}, NO_MULTIPLE),
        ("a stream past the last", {"active": STREAMS}, "active is 4"),
        ("too many coefficients", {"coefficients": floats(TOKENS, 5)}, "coefficients has the shape"),
    ),
    *misuses(
        "add_to_streams",
        ("a part of a stream", {"y": floats(TOKENS, 7)}, NO_MULTIPLE),
        ("a stream past the last", {"first": STREAMS + 1}, "first is 5"),
        ("an output of another shape", {"out": floats(TOKENS, 9)}, _SHAPE),
    ),
    *misuses(
        "spread_streams",
        ("a part of a stream", {"y": floats(TOKENS, 9)}, NO_MULTIPLE),
        ("an output of another shape", {"out": floats(TOKENS, 9)}, _SHAPE),
    ),
    *misuses(
        "merge_streams",
        ("rows of another batch", {"y": floats(5, ALL)}, "y has the shape"),
        ("an output of another shape", {"out": floats(TOKENS, 9)}, _SHAPE),
    ),
]
RECORDING = [
    *misuses(
        "Program.add_scaled", ("an unknown register", {"y": 99}, NO_REGISTER), ("no scale", {"scale": NAN}, "nan")
    ),
    *misuses("Program.embed_known", ("an infinite scale", {"scale": INFINITY}, "scale is inf")),
    *misuses("Program.norm_groups", ("a part of a group", {"weights": norm(9)}, NO_MULTIPLE)),
    *misuses(
        "Program.columns",
        ("no columns", {"width": 0}, "x has 16 columns from start on and must have 0"),
        ("columns past the end", {"start": 32}, "x has 0 columns from start on and must have 8"),
        ("too many factors", {"factors": floats(9)}, "factors has 9 elements and must have 8"),
    ),
    *misuses(
        "Program.act_gate", ("an unknown register", {"inputs": 99}, NO_REGISTER), ("a start", {"start": 33}, "start")
    ),
    *misuses("Program.sparse_act_mul", ("an unknown register", {"x": 99}, NO_REGISTER)),
    *misuses("Program.mix_streams", ("a part of a stream", {"streams": 3}, NO_MULTIPLE)),
    *misuses("Program.correct_streams", ("a stream past the last", {"active": 4}, "active is 4")),
    *misuses("Program.add_to_streams", ("a stream past the last", {"first": 5}, "first is 5")),
    *misuses("Program.spread_streams", ("an unknown register", {"y": 99}, NO_REGISTER)),
    *misuses("Program.merge_streams", ("an unknown register", {"x": -1}, "x is register -1")),
]
MISUSES = [*ARRAYS, *RECORDING]
