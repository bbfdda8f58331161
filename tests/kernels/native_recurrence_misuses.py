"""Misuses of recurrent layers and their states."""

from __future__ import annotations

from typing import Any

from native_calls import norm, recorded
from native_misuses import NAN, misuses
from native_recurrence_calls import (
    CHANNELS,
    HEADS,
    INNER,
    KEY,
    STATES,
    TAPS,
    TOKENS,
    VALUE,
    floats,
    ints,
    recurrence,
    recurrent_program,
    state_arrays,
    states,
    use,
)

from bifolio.kernels import native

X = recorded().x
TWICE = ints(1, -1, 3, -1, 3, 2)
USES: list[tuple[Any, ...]] = [
    ("a state that does not exist", {"reads": ints(0, STATES)}, r"reads\[1\] is 5, which lies outside the states"),
    ("a negative state", {"reads": ints(-1, 2)}, r"reads\[0\] is -1"),
    ("a write of the empty state", {"writes": ints(0, -1, -1, -1, -1, -1)}, r"writes\[0\] is 0, which lies outside"),
    ("a write past the states", {"writes": ints(-1, -1, -1, -1, -1, 5)}, r"writes\[5\] is 5, which lies outside"),
    ("a write before none", {"writes": ints(-2, -1, -1, -1, -1, -1)}, r"writes\[0\] is -2"),
    ("two writes of a state", {"writes": TWICE}, r"writes\[4\] is 3, which is written twice in one batch"),
    ("a state of another's", {"reads": ints(3, 2)}, r"reads\[0\] is 3, which sequence 1 of the batch writes"),
    ("too few writes", {"writes": ints(-1)}, "writes has 1 elements and must have 6"),
    ("too few starts", {"starts": ints(0, TOKENS)}, "starts has 2 elements and must have 3"),
    ("a late start", {"starts": ints(1, 2, TOKENS)}, "starts must begin with 0 and end with 6"),
    ("an early end", {"starts": ints(0, 1, 5)}, "starts must begin with 0 and end with 6"),
    ("decreasing starts", {"starts": ints(0, 7, TOKENS)}, r"starts must not decrease, but \[1\] is 7"),
]
OTHER_STATES = native.library().States(**state_arrays(states=[floats(STATES, HEADS, VALUE, KEY)] * 2))
OTHER_WINDOWS = native.library().States(**state_arrays(windows=[floats(STATES, TAPS, CHANNELS)] * 2))
RUN = {"self": recurrent_program(), "states": states(), **use()}
MISUSES = [
    *misuses(
        "Recurrence",
        ("an unknown kind", {"kind": 7}, "kind is 7"),
        ("no taps", {"width": 0}, "width is 0"),
        ("a selective one with heads", {"kind": 3}, "must have one head of as many values as channels"),
        ("a linear unit with heads", {"kind": 5}, "a linear unit must have one head of as many values as channels"),
        (
            "a skip of lightning attention",
            {"kind": 4, "skip": floats(HEADS)},
            "skip must be None for the delta rule and",
        ),
        ("too many taps", {"width": 17}, "width is 17"),
        ("no channels", {"channels": 0}, "channels is 0"),
        ("a short convolution", {"conv_weight": floats(CHANNELS, 3)}, r"must have the shape \(96, 4\)"),
        ("a short bias of it", {"conv_bias": floats(3)}, "conv_bias has 3 elements and must have 96"),
        ("no heads", {"heads": 0}, "heads is 0"),
        ("groups of unequal sizes", {"groups": 3}, "heads is 4 and must be a multiple of groups, 3"),
        ("no keys", {"key_size": 0}, "key_size is 0"),
        ("huge values", {"value_size": 2**20}, "value_size is 1048576"),
        ("other channels", {"value_size": 8}, "channels is 96 and must be 64"),
        ("no decay", {"decay": None}, "decay is None and must have 4 elements"),
        ("a short decay", {"decay": floats(3)}, "decay has 3 elements and must have 4"),
        ("no bias", {"bias": None}, "bias is None"),
        ("a skip in the delta rule", {"skip": floats(HEADS)}, "skip must be None for the delta rule"),
        ("a long skip", {"skip": floats(HEADS + 1), "kind": 2}, "skip has 5 elements and must have 4"),
        ("a wide norm", {"norm": norm(INNER)}, "norm has 64 elements and must have 16"),
        ("a narrow norm", {"kind": 2}, "norm has 16 elements and must have 64"),
        ("a norm of uneven groups", {"norm_groups": 3}, "norm_groups is 3 and must divide 64"),
        ("limits in the wrong order", {"least_step": 2.0}, "the limits of steps are 2 and 1"),
        ("a NaN limit", {"most_step": NAN}, "the limits of steps are 0 and nan"),
        ("no rate", {"rate_scale": 0.0}, "rate_scale is 0 and must be a positive number"),
        ("a NaN bound", {"decay_bound": NAN}, "decay_bound is nan"),
        ("a bound of one decay", {"decay_bound": 5.0}, "decay_bound must be 0 for recurrences that are not keyed"),
    ),
    *misuses(
        "Recurrence.shift",
        ("a vector of factors", {"factors": floats(CHANNELS)}, "factors"),
        ("too many mixes", {"factors": floats(65, 4)}, "the number of mixes is 65"),
        ("a column past the window", {"column": CHANNELS + 1}, "column is 97"),
        ("a narrow window", {"window": CHANNELS - 1}, "window is 95"),
    ),
    *misuses(
        "Recurrence.rwkv",
        ("no heads", {"heads": 0}, "heads is 0"),
        ("no keys", {"key_size": 0}, "key_size is 0"),
        ("huge values", {"value_size": 2**20}, "value_size is 1048576"),
        ("no channels", {"channels": 0}, "channels is 0"),
        ("no factors", {"factors": None}, "factors is None and must have 96 elements"),
        ("short factors", {"factors": floats(95)}, "factors has 95 elements and must have 96"),
        ("a narrow norm", {"norm": norm(VALUE)}, "norm has 16 elements and must have 64"),
        ("an RMS norm", {"norm": norm(INNER)}, "norm must be a layer norm"),
    ),
    *misuses(
        "States",
        ("no layers", {"windows": [], "states": []}, "windows has no layers"),
        ("unequally many layers", {"windows": [floats(STATES, 3, CHANNELS)]}, "states has 2 layers and must have 1"),
        ("unequally many states", {"states": [floats(4, HEADS, KEY, VALUE)] * 2}, "layer 0 has 5 windows and 4 states"),
        ("no states", {"windows": [floats(0, 3, 1)] * 2, "states": [floats(0, 1, 1, 1)] * 2}, "at least one"),
    ),
    *misuses(
        "Program.recur",
        ("an unknown register", {"x": 99}, "x is register 99"),
        ("a narrow register", {"x": X}, "x is 64 wide and must be 168 wide"),
        ("a negative layer", {"layer": -1}, "layer is -1"),
    ),
    *misuses(
        "Program.scan",
        ("an unknown register", {"x": 99}, "x is register 99"),
        ("another recurrence", {"recurrence": recurrence()}, "scan takes a recurrence by channel"),
        ("a negative layer", {"layer": -1}, "layer is -1"),
    ),
    *misuses(
        "Program.run",
        ("no states", RUN | {"states": None}, "states is None and must be given"),
        ("no starts", RUN | {"starts": None}, "starts"),
        ("a layer without states", RUN | {"self": recurrent_program(2)}, "layer is 2"),
        ("other windows", RUN | {"states": OTHER_WINDOWS}, r"\(4, 96\) and must have the shape \(3, 96\)"),
        ("other states", RUN | {"states": OTHER_STATES}, r"\(4, 16, 8\) and must have the shape \(4, 8, 16\)"),
        *((name, RUN | changes, message) for name, changes, message in USES),
    ),
]
