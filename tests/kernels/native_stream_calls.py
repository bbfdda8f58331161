"""Valid calls of the operations on streams; `native_calls.VALID` contains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bifolio.kernels import native

SIZE, STREAMS, VOCAB = 8, 4, 50
ALL = STREAMS * SIZE


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def norm(size: int = SIZE) -> Any:
    return native.library().Norm(floats(size), None, 1e-5, False)


def recorded(**arguments: int | Any) -> dict[str, Any]:
    """Arguments of a recording method; a register is given by its width."""
    program = native.library().Program()
    names = ("x", "y", "coefficients")

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
    "Program.mix_streams": lambda: recorded(x=ALL, coefficients=STREAMS * STREAMS, streams=STREAMS),
    "Program.add_to_streams": lambda: recorded(x=ALL, y=SIZE, coefficients=STREAMS),
    "Program.match_streams": lambda: recorded(x=SIZE, y=ALL),
}
