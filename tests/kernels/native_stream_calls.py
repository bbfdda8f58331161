"""Valid calls of the operations on streams; `native_calls.VALID` contains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bifolio.kernels import native

TOKENS, SIZE, STREAMS, VOCAB = 6, 8, 4, 50
ALL = STREAMS * SIZE


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def table() -> Any:
    return native.library().Table(0, floats(VOCAB, SIZE).view(np.uint8), SIZE)


def norm(size: int = SIZE) -> Any:
    return native.library().Norm(floats(size), None, 1e-5, False)


def recorded(**arguments: int | Any) -> dict[str, Any]:
    """Arguments of a recording method; a register is given by its width."""
    program = native.library().Program()
    names = ("x", "y", "coefficients", "inputs")

    def register(width: int) -> int:
        rows = native.library().Table(0, floats(VOCAB, width).view(np.uint8), width)
        return int(program.embed(rows, 1.0, False))

    return {"self": program} | {k: register(v) if k in names else v for k, v in arguments.items()}


STREAM_CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "AttentionShape.with_value_norm": lambda: {
        "self": native.library().AttentionShape(4, 2, SIZE, 1.0, 0, False, None, None),
        "norm": norm(),
    },
    "AttentionShape.of_queries": lambda: {
        "self": native.library().AttentionShape(4, 2, SIZE, 1.0, 0, False, None, None)
    },
    "add_scaled": lambda: {
        "x": floats(TOKENS, SIZE),
        "y": floats(TOKENS, SIZE),
        "scale": 0.5,
        "out": floats(TOKENS, SIZE),
    },
    "embed_known": lambda: {
        "table": table(),
        "ids": np.array([1, 2, 99], np.int32),
        "scale": 1.0,
        "out": floats(3, SIZE),
    },
    "norm_groups": lambda: {"x": floats(TOKENS, ALL), "weights": norm(), "out": floats(TOKENS, ALL)},
    "act_gate": lambda: {
        "x": floats(TOKENS, SIZE),
        "inputs": floats(TOKENS, ALL),
        "start": 16,
        "activation": 1,
        "out": floats(TOKENS, SIZE),
    },
    "sparse_act_mul": lambda: {
        "x": floats(TOKENS, ALL),
        "deviations": 0.5,
        "activation": 1,
        "out": floats(TOKENS, ALL // 2),
    },
    "mix_streams": lambda: {
        "x": floats(TOKENS, ALL),
        "coefficients": floats(TOKENS, STREAMS * STREAMS),
        "streams": STREAMS,
        "out": floats(TOKENS, ALL),
    },
    "correct_streams": lambda: {
        "x": floats(TOKENS, ALL),
        "y": floats(TOKENS, SIZE),
        "coefficients": floats(TOKENS, STREAMS),
        "active": 1,
        "out": floats(TOKENS, ALL),
    },
    "add_to_streams": lambda: {
        "x": floats(TOKENS, ALL),
        "y": floats(TOKENS, SIZE),
        "first": 1,
        "out": floats(TOKENS, ALL),
    },
    "spread_streams": lambda: {
        "x": floats(TOKENS, SIZE),
        "y": floats(TOKENS, ALL),
        "out": floats(TOKENS, SIZE + ALL),
    },
    "merge_streams": lambda: {"x": floats(TOKENS, SIZE), "y": floats(TOKENS, ALL), "out": floats(TOKENS, SIZE)},
    "Program.add_scaled": lambda: recorded(x=SIZE, y=SIZE, scale=0.5),
    "Program.embed_known": lambda: recorded(table=table(), scale=1.0),
    "Program.norm_groups": lambda: recorded(x=ALL, weights=norm()),
    "Program.columns": lambda: recorded(x=ALL, start=16, width=SIZE, factors=floats(SIZE)),
    "Program.act_gate": lambda: recorded(x=SIZE, inputs=ALL, start=16, activation=1),
    "Program.sparse_act_mul": lambda: recorded(x=ALL, deviations=0.5, activation=1),
    "Program.mix_streams": lambda: recorded(x=ALL, coefficients=STREAMS * STREAMS, streams=STREAMS),
    "Program.correct_streams": lambda: recorded(x=ALL, y=SIZE, coefficients=STREAMS, active=1),
    "Program.add_to_streams": lambda: recorded(x=ALL, y=SIZE, first=1),
    "Program.spread_streams": lambda: recorded(x=SIZE, y=ALL),
    "Program.merge_streams": lambda: recorded(x=SIZE, y=ALL),
}
