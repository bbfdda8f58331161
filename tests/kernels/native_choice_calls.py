"""Valid calls of the choice of positions and of attention to them; `native_calls.VALID` contains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bifolio.kernels import native

HEADS, DIM, TOP_K, TOKENS = 4, 32, 3, 6


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def plain_shape(kv_heads: int = 1, window: int = 0) -> Any:
    return native.library().AttentionShape(HEADS, kv_heads, DIM, 0.2, window, False, None, None)


def choosing_shape(top_k: int = TOP_K) -> Any:
    return plain_shape().choosing(top_k)


def given(**arguments: int | Any) -> dict[str, Any]:
    """Arguments of a recording method; a register is a given one, by its width."""
    program = native.library().Program()
    return {"self": program} | {
        name: program.given(value) if isinstance(value, int) else value for name, value in arguments.items()
    }


def attending() -> Any:
    """A program that attends to given positions."""
    program = native.library().Program()
    query, chosen = program.given(HEADS * DIM), program.given(TOP_K)
    program.finish([program.attend_chosen(query, chosen, 0, choosing_shape())])
    return program


def choice(number: int = 0) -> np.ndarray:
    """The same positions for every token, as bits of floats."""
    return np.tile(np.array([0, 2, number], np.int32), (TOKENS, 1)).view(np.float32)


def attended(**changes: Any) -> dict[str, Any]:
    """Arguments that run it: two sequences of one and five tokens with contexts of 20 and 10."""
    keys = [floats(5, 1, 16, DIM)]
    starts, lengths = np.array([0, 1, TOKENS], np.int32), np.array([20, 10], np.int32)
    tables = np.array([[1, 2], [3, 0]], np.int32)
    nothing = dict.fromkeys(("ids", "positions", "slots", "logit_rows"))
    return nothing | {
        "self": attending(),
        "cache": native.library().Cache(keys, keys, 0, [DIM]),
        "segments": [(0, 0, starts, lengths, tables, True)],
        "given": [floats(TOKENS, HEADS * DIM), choice(5)],
        "results": [floats(TOKENS, HEADS * DIM)],
    } | changes  # fmt: skip


CHOICE_CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "AttentionShape.choosing": lambda: {"self": plain_shape(), "top_k": TOP_K},
    "Program.choose": lambda: given(query=HEADS * DIM, weights=HEADS) | {"layer": 0, "shape": choosing_shape()},
    "Program.attend_chosen": lambda: given(query=HEADS * DIM, chosen=TOP_K) | {"layer": 0, "shape": choosing_shape()},
}
