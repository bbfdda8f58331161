"""Misuses of operations, classes and settings: the changes to the valid arguments, and the error they raise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from native_calls import (
    BLOCK_SIZE,
    BLOCKS,
    DIM,
    HEADS,
    KV_HEADS,
    TOKENS,
    WIDTH,
    Arguments,
    floats,
    ints,
    kv_arrays,
    norm,
    segment,
)

from bifolio.errors import KernelArgumentError

NAN, INFINITY = math.nan, math.inf
TALLER, WIDER = floats(TOKENS + 1, WIDTH), floats(TOKENS, WIDTH + 1)
BOTH = floats(2 * TOKENS, WIDTH)  # overlapping arrays are cut from it
KV_SHAPE = (BLOCKS, KV_HEADS, BLOCK_SIZE, DIM)


@dataclass
class Misuse:
    entry: str
    misuse: str
    changes: Arguments
    match: str
    error: type[Exception] = KernelArgumentError

    def __str__(self) -> str:
        return f"{self.entry}-{self.misuse}".replace(" ", "_")


def misuses(entry: str, *cases: tuple[Any, ...]) -> list[Misuse]:
    return [Misuse(entry, *case) for case in cases]


def wrong_segments(entry: str) -> list[Misuse]:
    tables = np.array([[1, 2], [3, 0]], np.int32)

    def changed(**fields: Any) -> Arguments:
        return {"segments": [segment(**fields)]}

    return misuses(
        entry,
        ("no segments", {"segments": []}, "cover 0 tokens and must cover 6"),
        ("segments that are a tuple", {"segments": (segment(),)}, "incompatible", TypeError),
        ("a segment with a field less", {"segments": [segment()[:-1]]}, "must be a tuple"),
        ("a segment that is a list", {"segments": [list(segment())]}, "must be a tuple"),
        ("a causal that is a number", changed(causal=1), "must be a tuple"),
        ("a segment twice", {"segments": [segment(), segment()]}, "token_start is 0 and must be 6"),
        ("an unknown phase", changed(phase=2), "phase is 2 and must be 0"),
        ("a negative phase", changed(phase=-1), "phase is -1"),
        ("a phase that is text", changed(phase="decode"), "must be a tuple"),
        ("a gap before the segment", changed(token_start=1), "token_start is 1 and must be 0"),
        ("a negative token_start", changed(token_start=-1), "token_start is -1 and must be 0"),
        ("a token_start that is text", changed(token_start="0"), "must be a tuple"),
        ("query_starts that begin late", changed(query_starts=ints(1, 2, 6)), r"query_starts\[0\] is 1"),
        ("negative query_starts", changed(query_starts=ints(-1, 1, 6)), r"query_starts\[0\] is -1"),
        ("query_starts that decrease", changed(query_starts=ints(0, 7, 6)), "must not decrease|at least 7"),
        ("query_starts that wrap", changed(query_starts=ints(0, 5, -(2**31))), "must not decrease"),
        ("query_starts past the batch", changed(query_starts=ints(0, 1, 7)), "behind the last of 6 tokens"),
        ("query_starts before its end", changed(query_starts=ints(0, 1, 5)), "cover 5 tokens and must cover 6"),
        ("too few query_starts", changed(query_starts=ints(0, 6)), "query_starts has 2 elements and must have 3"),
        ("no query_starts", changed(query_starts=ints()), "query_starts has 0 elements and must have 3"),
        ("no sequences", changed(context_lens=ints()), "context_lens is empty"),
        ("contexts shorter than the queries", changed(context_lens=ints(20, 4)), r"context_lens\[1\] is 4"),
        ("negative contexts", changed(context_lens=ints(-20, 10)), r"context_lens\[0\] is -20"),
        ("contexts past the table", changed(context_lens=ints(33, 10)), "does not fit its block table of 2 blocks"),
        ("too few tables", changed(block_tables=tables[:1]), "block_tables has 1 rows and must have 2"),
        ("tables of no blocks", changed(block_tables=tables[:, :0].copy()), "does not fit its block table"),
        ("a block past the cache", changed(block_tables=tables + np.int32(3)), "block 5, which does not exist"),
        ("a negative block", changed(block_tables=-tables), "block -1, which does not exist"),
    )


SAMPLING = [
    *misuses(
        "weights",
        ("no columns", {"x": floats(6, 0)}, "x has no columns"),
        ("too few maxima", {"highest": floats(5)}, "highest has 5 elements and must have 6"),
        ("too few factors", {"warmth": floats(5)}, "warmth has 5 elements and must have 6"),
        ("a narrow output", {"out": np.zeros((6, 3), np.int64)}, "out is 6 by 3 and must be 6 by 64"),
    ),
]

CLASSES = [
    *misuses(
        "Norm",
        ("an empty weight", {"weight": floats(0), "bias": None}, "the length of weight is 0"),
        ("a bias of another length", {"bias": floats(WIDTH - 1)}, "bias has 63 elements and must have 64"),
        ("a NaN eps", {"eps": NAN}, "eps is nan"),
        ("a negative eps", {"eps": -1.0}, "eps is -1"),
    ),
    *misuses(
        "Table",
        ("an unknown format", {"format": 26}, "format is 26"),
        ("a negative format", {"format": -1}, "format is -1"),
        ("another width", {"width": WIDTH + 1}, "bytes is 256 wide and must be 260 wide"),
        ("no width", {"width": 0}, "width is 0"),
        ("a negative width", {"width": -64}, "width is -64"),
        ("a width that wraps", {"width": 2**62 + 64}, "width is 4611686018427387968"),
        ("a part of a block", {"format": 3, "bytes": np.zeros((2, 34), np.uint8), "width": 40}, "multiple of 32"),
        ("no rows", {"bytes": np.zeros((0, 256), np.uint8)}, "bytes has no rows"),
    ),
    *misuses(
        "make_linear",
        ("no parts", {"parts": []}, "parts is empty"),
        ("a part that is an array", {"parts": [np.zeros((2, 256), np.uint8)]}, "must hold pairs"),
        ("a part of three", {"parts": [(0, np.zeros((2, 256), np.uint8), 1)]}, "must hold pairs"),
        ("an unknown format", {"parts": [(26, np.zeros((2, 256), np.uint8))]}, "format is 26"),
        ("parts of unequal widths", {"parts": [(0, np.zeros((2, w), np.uint8)) for w in (256, 260)]}, "260 wide"),
        ("a part of a block", {"parts": [(4, np.zeros((2, 18), np.uint8))], "k": 40, "bias": None}, "multiple of 32"),
        ("a part of no rows", {"parts": [(0, np.zeros((0, 256), np.uint8))]}, "has no rows"),
        ("another k", {"k": WIDTH - 1}, "is 256 wide and must be 252 wide"),
        ("no k", {"k": 0}, "k is 0"),
        ("a k that wraps", {"k": 2**62 + 64}, "k is 4611686018427387968"),
        ("a short bias", {"bias": floats(63)}, "bias has 63 elements and must have 64"),
        ("no planes", {"planes": 0}, "planes is 0"),
        ("three planes", {"planes": 3}, "planes is 3"),
    ),
    *misuses(
        "join_pairs",
        ("tokens that are a tuple", {"tokens": ("a", "b")}, "incompatible", TypeError),
        ("a token that is no string", {"tokens": ["a", "b", 3]}, "tokens must be strings"),
        ("a token that does not exist", {"order": ints(0, 3)}, "a number in order is 3"),
        ("a negative token", {"order": ints(0, -1)}, "a number in order is -1"),
    ),
    *misuses("file_formats", ("an argument", {"format": 1}, "incompatible", TypeError)),
    *misuses("needs_grid", ("an unknown format", {"format": 26}, "format is 26")),
    *misuses(
        "packed_bytes",
        ("an unknown format", {"format": -1}, "format is -1"),
        ("no rows", {"n": 0}, "n is 0"),
        ("a k that wraps", {"k": 2**62 + 64}, "k is 4611686018427387968"),
        ("a part of a block", {"k": 288}, "k is 288 and must be a multiple of 256"),
    ),
    *misuses(
        "set_grid",
        ("a format without a grid", {"format": 10}, "which has no grid"),
        ("too few rows", {"bytes": np.zeros((255, 8), np.uint8)}, r"the shape \(255, 8\) and must have \(256, 8\)"),
        ("narrow rows", {"bytes": np.zeros((256, 4), np.uint8)}, r"the shape \(256, 4\)"),
        ("a large number", {"bytes": np.full((256, 8), 8, np.uint8)}, "bytes holds 8"),
    ),
    *misuses(
        "dequantize",
        ("an unknown format", {"format": 26}, "format is 26"),
        ("a part of a block", {"width": 32}, "width is 32 and must be a multiple of 256"),
        ("another width", {"width": 256}, "bytes is 288 wide and must be 144 wide"),
        ("fewer rows of results", {"out": floats(2, 512)}, "out has 2 rows and must have 3"),
        ("narrow results", {"out": floats(3, 256)}, "out is 256 wide and must be 512 wide"),
    ),
    *misuses(
        "decode_fp8",
        ("no height", {"height": 0}, "height is 0"),
        ("a negative width", {"width": -4}, "width is -4"),
        ("other blocks", {"height": 2}, r"scales has the shape \(2, 2\)"),
        ("fewer rows of results", {"out": np.zeros((4, 14), np.uint8)}, "out has 4 rows and must have 5"),
        ("narrow results", {"out": np.zeros((5, 7), np.uint8)}, "out is 7 wide and must be 14 wide"),
    ),
    *misuses(
        "resample",
        ("grey pixels", {"pixels": np.zeros((4, 5, 1), np.uint8)}, "pixels is 1 wide and must be 3 wide"),
        ("a row before the first", {"row_first": ints(-1, 2)}, r"row_first\[0\] is -1"),
        ("a row behind the last", {"row_first": ints(0, 3)}, "must be at most 2"),
        ("a column behind the last", {"column_first": ints(0, 1, 3)}, "must be at most 2"),
        ("more inputs than weights", {"row_count": ints(2, 4)}, r"row_count\[1\] is 4"),
        ("fewer counts", {"row_count": ints(2)}, "row_count has 1"),
        ("weights of other outputs", {"row_weights": np.ones((3, 3), np.int32)}, "row_weights has 3 rows"),
        ("sums beyond 32 bits", {"row_weights": np.full((2, 3), 1 << 23, np.int32)}, "8388608"),
        ("fewer rows of results", {"out": np.zeros((1, 3, 3), np.uint8)}, "out has 1"),
        ("narrow results", {"out": np.zeros((2, 2, 3), np.uint8)}, "out has 2"),
    ),
    *misuses("checksum", ("fewer lanes", {"out": np.zeros(7, np.uint64)}, "out has 7")),
    *misuses(
        "pack_codes",
        ("an unknown order", {"order": 3}, "order is 3"),
        ("another header", {"header_bytes": 3}, "header_bytes is 3 and must be 2 or 4"),
        ("a part of a block", {"out": np.zeros((5, 35), np.uint8)}, "out is 35 wide and must be a multiple of 18"),
        ("no block", {"out": np.zeros((5, 0), np.uint8)}, "out"),
        ("groups of a part of a block", {"headers": np.zeros((5, 6), np.uint8)}, "headers is 6 wide"),
        ("fewer headers", {"headers": np.zeros((4, 4), np.uint8)}, "headers has 4 rows and must have 5"),
        ("fewer words", {"bytes": np.zeros((7, 20), np.uint8)}, "bytes has 7 rows and must have 8"),
        ("narrow words", {"bytes": np.zeros((8, 16), np.uint8)}, "bytes is 16 wide and must be 20 wide"),
        ("rows without a word of their own", {"order": 2}, "out has 5 rows and must have a multiple of 8"),
    ),
    *misuses(
        "encode",
        ("an unknown format", {"format": 26}, "format is 26"),
        ("a format that cannot be written", {"format": 19}, "cannot be written"),
        ("a part of a block", {"x": floats(3, 288)}, "multiple of 256"),
        ("fewer rows of results", {"bytes": np.zeros((2, 288), np.uint8)}, "bytes has 2 rows and must have 3"),
        ("narrow results", {"bytes": np.zeros((3, 144), np.uint8)}, "bytes is 144 wide and must be 288 wide"),
        ("a short importance", {"importance": floats(256)}, "importance has 256 elements and must have 512"),
    ),
    *misuses("Linear", ("a constructor", {"k": 1}, "constructor", TypeError)),
    *misuses(
        "Cache",
        ("an unknown type", {"kv_type": 4}, "kv_type is 4"),
        ("a negative type", {"kv_type": -1}, "kv_type is -1"),
        ("a type of other numbers", {"kv_type": 1}, r"keys\[0\] must be an array of float16"),
        ("no layers", {"keys": [], "values": []}, "keys has no layers"),
        ("fewer values than keys", {"values": kv_arrays(1)}, "values has 1 layers and must have 2"),
        ("another head_dim", {"head_dims": [16, 32]}, r"keys\[0\] has rows of 32 elements and must have rows of 16"),
        ("no head_dim", {"head_dims": [32, 0]}, "head_dim is 0"),
        ("too few sizes", {"head_dims": [32]}, "head_dims has 1 entries and must have 2"),
        ("a huge head_dim", {"head_dims": [2**40] * 2}, "head_dim is 1099511627776"),
        ("layers of unequal shapes", {"keys": [*kv_arrays(1), floats(4, *KV_SHAPE[1:])]}, r"keys\[1\] has 4 elements"),
        ("values of another shape", {"values": [floats(4, *KV_SHAPE[1:])] * 2}, r"values\[0\] has 4 elements"),
        ("as many numbers in another shape", {"values": [floats(5, 16, 2, 32)] * 2}, "along dimension 1"),
        ("no blocks", {n: [floats(0, *KV_SHAPE[1:])] * 2 for n in ("keys", "values")}, "along dimension 0"),
        (
            "a q8_0 head_dim that is no multiple of 32",
            {n: [np.zeros((5, 2, 16, 42), np.uint8)] for n in ("keys", "values")} | {"kv_type": 3, "head_dims": [40]},
            "head_dim is 40 and must be a multiple of 32",
        ),
        ("keys that are a tuple", {"keys": tuple(kv_arrays())}, "incompatible", TypeError),
    ),
    *misuses(
        "AttentionShape",
        ("no heads", {"heads": 0}, "heads is 0"),
        ("negative kv heads", {"kv_heads": -2}, "kv_heads is -2"),
        ("huge heads", {"heads": 2**62}, "heads is 4611686018427387904"),
        ("heads that are no multiple", {"kv_heads": 3}, "heads is 4 and must be a multiple of kv_heads, 3"),
        ("more heads than a unit holds", {"heads": 129, "kv_heads": 1}, "at most 128 times"),
        ("no head_dim", {"head_dim": 0}, "head_dim is 0"),
        ("a NaN scale", {"scale": NAN}, "scale is nan"),
        ("a negative window", {"window": -1}, "window is -1"),
        ("a query norm of another size", {"query_norm": norm(16)}, "query_norm has 16 elements and must have 32"),
        ("a key norm of another size", {"key_norm": norm(48)}, "key_norm has 48 elements and must have 32"),
        ("a negative soft cap", {"softcap": -1.0}, "softcap is -1 and must be a finite number of at least 0"),
        ("a temperature without end", {"temperature": float("inf")}, "temperature is inf"),
        ("a period of no positions", {"temperature_period": 0}, "temperature_period is 0 and must be at least 1"),
    ),
    *misuses("AttentionShape.both_ways", ("an argument", {"window": 1}, "incompatible", TypeError)),
    *misuses("AttentionShape.of_earlier", ("an argument", {"window": 1}, "incompatible", TypeError)),
    *misuses(
        "AttentionShape.with_bias",
        ("biases of fewer heads", {"bias": floats(HEADS - 1, 9)}, "bias has 3 rows and must have 4, one for each head"),
        ("no bias of the distance 0", {"bias": floats(HEADS, 8)}, "bias has rows of 8 elements and must have an odd"),
    ),
]

SETTINGS = [
    *misuses("set_isa", ("an unknown name", {"name": "mmx"}, "no instruction set mmx: choose one of")),
    *misuses(
        "Pool",
        ("a negative count", {"count": -1}, "count is -1 and must be between 0 and 1024"),
        ("a huge count", {"count": 10**6}, "count is 1000000"),
    ),
    *misuses(
        "set_num_threads",
        ("a negative count", {"count": -1}, "count is -1 and must be between 0 and 1024"),
        ("a huge count", {"count": 10**6}, "count is 1000000"),
    ),
    *misuses(
        "read_bandwidth",
        ("no bytes", {"bytes": 0}, "bytes is 0"),
        ("negative bytes", {"bytes": -1}, "bytes is -1"),
        ("more bytes than memory", {"bytes": 2**60}, "bytes is 1152921504606846976"),
    ),
    *misuses("product_rate", ("a number", {"bytes": 2}, "incompatible", TypeError)),
    *[
        Misuse(entry, "an argument", {"extra": 1}, "incompatible", TypeError)
        for entry in ("isa", "available_isas", "num_threads", "shared_tokens")
    ],
]

MISUSES = [*SAMPLING, *CLASSES, *SETTINGS]
