"""Misuses of programs, while they are recorded and when they run."""

from __future__ import annotations

import numpy as np
from native_calls import VALID, VOCAB, complete, floats, ints, linear, longs, recorded, shape, table, tapped
from native_misuses import INFINITY, NAN, Misuse, misuses, wrong_segments

from bifolio.kernels import native

X, ODD, QKV, COSINE, SINE, TAKEN = recorded()[1:]
RECORDING_METHODS = [
    method
    for group, _, method in (entry.partition(".") for entry in VALID)
    if group == "Program" and method not in ("", "run", "width", "of_logit_rows")
]
NO_REGISTER = "is register 99 and must be one of the 6 recorded so far"
RECORDING = [
    *misuses("Program", ("an argument", {"size": 1}, "incompatible", TypeError)),
    *misuses(
        "Program.embed",
        ("an infinite scale", {"scale": INFINITY}, "scale is inf"),
        ("an unknown source", {"source": 3}, "source is 3"),
    ),
    *misuses(
        "Program.norm",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("a negative register", {"x": -1}, "x is register -1"),
        ("a register of parts of the weight", {"x": ODD}, "x is 33 wide and must be a multiple of the length"),
    ),
    *misuses(
        "Program.add",
        ("a NaN scale", {"scale": NAN}, "scale is nan"),
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("another unknown register", {"y": 99}, NO_REGISTER),
        ("unequal widths", {"y": ODD}, "y is 33 wide and must be 64 wide"),
        ("unequal heights", {"y": TAKEN}, "one row for each token or both one for each logit row"),
    ),
    *misuses(
        "Program.add_norm",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("an unknown delta", {"delta": -1}, "delta is register -1"),
        ("x of parts of the weight", {"x": ODD, "delta": ODD}, "x is 33 wide and must be a multiple of the length"),
        ("unequal widths", {"delta": ODD}, "delta is 33 wide and must be 64 wide"),
        ("unequal heights", {"delta": TAKEN}, "one row for each token or both one for each logit row"),
    ),
    *misuses(
        "Program.linear",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("a register wider than the weights", {"x": QKV}, "x is 256 wide and must be 64 wide"),
    ),
    *misuses(
        "Program.rotation",
        ("no frequencies", {"frequencies": floats(0)}, "the length of frequencies is 0"),
        ("a NaN frequency", {"frequencies": np.full(16, np.nan, np.float32)}, r"frequencies\[0\] is nan"),
        ("a NaN scale", {"scale": NAN}, "scale is nan"),
    ),
    *misuses(
        "Program.rope_and_write",
        ("an unknown register", {"qkv": 99}, NO_REGISTER),
        ("a narrow register", {"qkv": X}, "qkv is 64 wide and must be 256 wide"),
        ("logit rows", {"qkv": TAKEN, "shape": shape(2, 1, 16)}, "must have one for each token"),
        ("cosine alone", {"sine": -1}, "must both be registers or both be -1"),
        ("an unknown rotation", {"cosine": 99, "sine": 99}, NO_REGISTER),
        ("a negative rotation", {"cosine": -2, "sine": -2}, "cosine is register -2"),
        ("a rotation wider than the head", {"cosine": ODD, "sine": ODD}, "the width of cosine is 33"),
        ("unequal widths of the rotation", {"sine": X}, "sine is 64 wide and must be 16 wide"),
        ("a negative layer", {"layer": -1}, "layer is -1"),
        ("a huge layer", {"layer": 2**40}, "layer is 1099511627776"),
    ),
    *misuses(
        "Program.attend",
        ("an unknown register", {"query": 99}, NO_REGISTER),
        ("a narrow register", {"query": X}, "query is 64 wide and must be 256 wide"),
        ("logit rows", {"query": TAKEN, "shape": shape(2, 1, 16)}, "must have one for each token"),
        ("a negative layer", {"layer": -1}, "layer is -1"),
    ),
    *misuses(
        "Program.finish",
        ("an unknown register", {"results": [99]}, NO_REGISTER),
        ("a register twice", {"results": [X, X]}, "twice and must be one once"),
        ("a given register", {"self": (own := native.library().Program()), "results": [own.given(8)]}, "no given one"),
    ),
    *misuses(
        "Program.act",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("an unknown activation", {"activation": 4}, "activation is 4"),
    ),
    *misuses(
        "Program.xielu",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("an infinite coefficient", {"most": float("inf")}, "a coefficient"),
    ),
    *misuses(
        "Program.clamp",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("too few bounds", {"least": floats(63)}, "least has 63 elements and must have 64"),
        ("too many bounds", {"most": floats(65)}, "most has 65 elements and must have 64"),
        ("bounds in the wrong order", {"least": np.full(64, 2, np.float32)}, "least is 2 in column 0 and most is 1"),
        ("a NaN bound", {"most": np.full(64, np.nan, np.float32)}, "and most is nan"),
    ),
    *misuses(
        "Program.act_mul",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("an unknown activation", {"activation": -1}, "activation is -1"),
        ("an odd width", {"x": ODD}, "x is 33 wide and must have an even width"),
        ("a NaN cutoff", {"cutoff": NAN}, "cutoff is nan"),
    ),
    *misuses(
        "Program.all_gather",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("widths of other ranks", {"widths": [64, 64]}, "widths has 2 elements and must have 1"),
        ("another width", {"widths": [63]}, "x is 64 wide and must be 63 wide"),
        ("no width", {"widths": [0]}, "a width is 0"),
    ),
    *misuses(
        "Program.join_columns",
        ("an unknown register", {"parts": [99, X]}, NO_REGISTER),
        ("logit rows", {"parts": [X, TAKEN]}, "must have one for each token"),
        ("no parts", {"parts": [], "starts": [], "stops": []}, "at least 1"),
        ("a missing start", {"starts": [0]}, "must have the same number"),
        ("a negative start", {"starts": [-1, 8]}, "a start is -1"),
        ("a start behind the end", {"starts": [0, 64]}, "a start is 64"),
        ("a stop behind the end", {"stops": [4, 65]}, "a stop is 65"),
        ("an empty part", {"stops": [0, 64]}, "a stop is 0"),
        ("too many factors", {"factors": floats(61)}, "factors has 61 elements and must have 60"),
    ),
    *misuses("Program.all_reduce", ("an unknown register", {"x": 99}, NO_REGISTER)),
    *misuses(
        "Program.take",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("logit rows", {"x": TAKEN}, "must have one for each token"),
    ),
    *misuses("Program.given", ("no width", {"width": 0}, "width is 0"), ("a huge width", {"width": 2**40}, "width is")),
    *misuses(
        "Program.tap",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("logit rows", {"x": TAKEN}, "must have one for each token"),
        ("a negative column", {"column": -1}, "column is -1"),
        ("a huge column", {"column": 2**40}, "column is"),
    ),
    *misuses(
        "Program.logits",
        ("an unknown register", {"x": 99}, NO_REGISTER),
        ("a register narrower than the head", {"head": linear(VOCAB, 65)}, "x is 64 wide and must be 65 wide"),
        ("a NaN softcap", {"softcap": NAN}, "softcap is nan"),
        ("a negative softcap", {"softcap": -1.0}, "softcap is -1"),
    ),
    *[
        Misuse(f"Program.{method}", "a complete program", {"self": complete()}, "record nothing after finish")
        for method in RECORDING_METHODS
    ],
]

RUNNING = [
    *misuses(
        "Program.run",
        ("before logits are recorded", {"self": recorded().program}, "record finish before it is run"),
        ("no tokens", {"ids": ints()}, "ids is empty"),
        ("too few positions", {"positions": ints(1, 2)}, "positions has 2 elements and must have 6"),
        ("too few slots", {"slots": longs(16, 17)}, "slots has 2 elements and must have 6"),
        ("an id past the vocabulary", {"ids": ints(1, 2, 3, 4, 5, VOCAB)}, r"ids\[5\] is 50, which lies outside"),
        ("a negative id", {"ids": ints(-1, 2, 3, 4, 5, 6)}, r"ids\[0\] is -1"),
        ("a position past the table", {"positions": ints(1, 2, 3, 4, 5, VOCAB)}, r"positions\[5\] is 50"),
        ("a negative position", {"positions": ints(-1, 2, 3, 4, 5, 6)}, r"positions\[0\] is -1"),
        ("a slot past the cache", {"slots": longs(80, 53, 54, 55, 56, 57)}, r"slots\[0\] is 80"),
        ("a negative slot", {"slots": longs(-1, 53, 54, 55, 56, 57)}, r"slots\[0\] is -1"),
        ("a logit row past the batch", {"logit_rows": ints(0, 6)}, r"logit_rows\[1\] is 6, which lies outside"),
        ("a negative logit row", {"logit_rows": ints(-1, 5)}, r"logit_rows\[0\] is -1"),
        ("too many logits", {"results": [floats(3, VOCAB)]}, r"results has the shape \(3, 50\)"),
        ("too few logits", {"logit_rows": None}, r"must have the shape \(6, 50\)"),
        ("logits of another vocabulary", {"results": [floats(2, VOCAB - 1)]}, r"results has the shape \(2, 49\)"),
        ("logits twice", {"results": [floats(2, VOCAB)] * 2}, "results has 2 arrays and must have 1"),
        ("a cache of too few layers", {"self": complete(layer=2)}, "layer is 2 and must be between 0 and 1"),
        ("a cache of other kv heads", {"self": complete(heads=6, kv_heads=1)}, "1 kv heads and must have 2"),
        ("a cache of another head_dim", {"self": complete(heads=12, dim=16)}, "head_dim of 16 and must have 32"),
        ("rows that no operation reads", {"given": [floats(6, 8)]}, "given has 1 arrays and must have 0"),
        ("taps that no operation writes", {"taps": floats(6, 8)}, "taps is for programs that record tap"),
        ("no given rows", {"self": tapped()}, "given has 0 arrays and must have 1"),
        ("given rows of another width", {"self": tapped(), "given": [floats(6, 9)]}, r"given has the shape \(6, 9\)"),
        ("too few given rows", {"self": tapped(), "given": [floats(5, 8)]}, r"given has the shape \(5, 8\)"),
        (
            "narrow taps",
            {"self": tapped(), "given": [floats(6, 8)], "taps": floats(6, 9)},
            r"taps has the shape \(6, 9\)",
        ),
        ("no cache", {"cache": None}, "cache is None and must be given: the program attends"),
        ("slots and no cache", {"self": tapped(), "given": [floats(6, 8)], "cache": None}, "slots is for batches with"),
        ("a table as the cache", {"cache": table()}, "incompatible", TypeError),
    ),
    *wrong_segments("Program.run"),
]


MISUSES = [*RECORDING, *RUNNING]
