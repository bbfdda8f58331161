"""Misuses of low-rank adapters."""

from __future__ import annotations

import numpy as np
from native_calls import WIDTH, linear, recorded, table
from native_misuses import misuses

from bifolio.kernels.native.library import library

X, TAKEN = recorded().x, recorded().taken
DOWN, UP = linear(8, WIDTH), linear(48, 8)
HALF = library().Table(1, np.zeros((8, 2 * WIDTH), np.uint8), WIDTH)
MISUSES = [
    *misuses(
        "Adapter",
        ("a part of three elements", {"products": [(3, DOWN, UP)]}, "products must hold tuples of 4 elements"),
        ("an expert of four", {"experts": [(3, 0, DOWN, UP)]}, "experts must hold tuples of 6 elements"),
        ("a text as the site", {"products": [("3", 0, DOWN, UP)]}, "tuples that begin with numbers"),
        ("a negative site", {"products": [(-1, 0, DOWN, UP)]}, "a site is -1"),
        ("a huge site", {"products": [(2**30, 0, DOWN, UP)]}, "a site is 1073741824"),
        ("a negative column", {"products": [(3, -1, DOWN, UP)]}, "a column is -1"),
        ("a negative expert", {"experts": [(3, -1, 0, 0, DOWN, UP)]}, "an expert is -1"),
        ("no weights", {"products": [(3, 0, 7, UP)]}, "down must be weights made by make_linear"),
        ("no matrix", {"products": [(3, 0, None, None)]}, "up must be weights made by make_linear"),
        ("no table", {"embedding": [(None, None)]}, "the table of an embedding must be a Table"),
        ("a matrix as a table", {"embedding": [(table(9, 8), DOWN)]}, "down of an embedding must be a Table"),
        ("other ranks of a table", {"embedding": [(table(9, 8), table(7, WIDTH))]}, "has 7 rows and must have 8"),
        ("a table of half floats", {"embedding": [(table(9, 8), HALF)]}, "down of an embedding must be in F32"),
        ("a table of three elements", {"embedding": [(table(), None, 3)]}, "embedding must hold tuples of 2 elements"),
        ("other ranks", {"products": [(3, 0, linear(9, WIDTH), UP)]}, "up has 8 inputs and must have 9"),
        ("no list", {"products": 3}, "incompatible", TypeError),
    ),
    *misuses(
        "Program.adapt_embedding",
        ("an unknown register", {"x": 99}, "x is register 99"),
        ("rows of logits", {"x": TAKEN}, "x has one row for each logit row"),
        ("a scale of NaN", {"scale": float("nan")}, "scale is nan"),
    ),
    *misuses(
        "Program.adapt",
        ("an unknown register", {"x": 99}, "x is register 99"),
        ("an unknown result", {"y": -1}, "y is register -1"),
        ("the input itself", {"y": X, "x": X}, "must be another than x"),
        ("unequal heights", {"x": TAKEN}, "one row for each token or both one for each logit row"),
        ("a negative site", {"site": -1}, "site is -1"),
    ),
]
