"""Misuses of vocabularies: the changes to the valid arguments, and the error they raise."""

from __future__ import annotations

import numpy as np
from native_calls import codec, ints, strings
from native_misuses import misuses

from bifolio.kernels import native

UNORDERED = native.library().Codec(*strings("a", "b"), ints(1, 1))
BEYOND = np.array([0, 2**40], np.uint64)

MISUSES = [
    *misuses("string_starts", ("a negative position", {"position": -1}, "position is -1")),
    *misuses(
        "Codec",
        ("a start beyond the bytes", {"starts": BEYOND}, r"starts\[1\] is 1099511627776"),
        ("a string that ends after the bytes", {"starts": np.array([1, 0], np.uint64)}, "ends after"),
        ("too few types", {"types": ints(1)}, "types has 1 elements and must have 2"),
    ),
    *misuses("Codec.set_order", ("a token that does not exist", {"order": ints(0, 5)}, r"order\[1\] is 5")),
    *misuses("Codec.set_merges", ("a start beyond the bytes", {"merges": BEYOND}, r"merges\[1\] is 1099511627776")),
    *misuses(
        "Codec.encode_texts",
        ("a text that is no string", {"texts": [3]}, "texts must hold strings"),
        ("words of a byte-level vocabulary", {"self": codec(by_score=False)}, "use encode_words"),
        ("no order", {"self": UNORDERED}, "has no order"),
    ),
    *misuses(
        "Codec.encode_words",
        ("a word that is no string", {"words": [None]}, "texts must hold strings"),
        ("a vocabulary of scores", {"self": codec()}, "use encode_texts"),
    ),
    *misuses("Codec.cut_at_added", ("no order", {"self": UNORDERED}, "has no order")),
    *misuses(
        "Codec.decode",
        ("an id that is no integer", {"ids": ["a"]}, "incompatible", TypeError),
        ("no order", {"self": UNORDERED}, "has no order"),
    ),
    *misuses("Codec.find", ("bytes", {"text": b"ab"}, "incompatible", TypeError)),
]
