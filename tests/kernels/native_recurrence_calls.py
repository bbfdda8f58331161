"""Valid calls of the entry points of recurrent layers; `native_calls.VALID` contains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bifolio.kernels import native

TOKENS, STATES, LAYERS = 6, 5, 2
HEADS, GROUPS, KEY, VALUE, TAPS = 4, 2, 8, 16, 4
CHANNELS, INNER = 2 * GROUPS * KEY + HEADS * VALUE, HEADS * VALUE
IN_FEATURES = CHANNELS + INNER + 2 * HEADS  # of the delta rule


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def parameters(**changes: Any) -> dict[str, Any]:
    valid = {
        "kind": 1,
        "width": TAPS,
        "channels": CHANNELS,
        "heads": HEADS,
        "groups": GROUPS,
        "key_size": KEY,
        "value_size": VALUE,
        "conv_weight": floats(CHANNELS, TAPS),
        "conv_bias": floats(CHANNELS),
        "decay": -np.abs(floats(HEADS)),
        "bias": floats(HEADS),
        "skip": None,
        "norm": native.library().Norm(floats(VALUE), None, 1e-5, False),
        "norm_first": True,
        "norm_groups": 1,
        "least_step": 0.0,
        "most_step": 1.0,
        "tiled": False,
        "rate_scale": 1.0,
        "decay_bound": 0.0,
    }
    return valid | changes


def recurrence() -> Any:
    return native.library().Recurrence(**parameters())


def state_arrays(**changes: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    arrays = {
        "windows": [floats(STATES, TAPS - 1, CHANNELS) for _ in range(LAYERS)],
        "states": [floats(STATES, HEADS, KEY, VALUE) for _ in range(LAYERS)],
    }
    return arrays | changes


def states() -> Any:
    return native.library().States(**state_arrays())


def use() -> dict[str, np.ndarray]:
    """Two sequences of one and five tokens, of which the second writes the state that it reads, and another."""
    return {"starts": ints(0, 1, TOKENS), "reads": ints(0, 2), "writes": ints(1, -1, 3, -1, -1, 2)}


def recording() -> dict[str, Any]:
    from native_calls import WIDTH, linear, recorded

    program, x = recorded()[:2]
    return {"self": program, "x": program.linear(x, linear(IN_FEATURES, WIDTH)), "layer": 1, "recurrence": recurrence()}


def recurrent_program(layer: int = 1) -> Any:
    """A program of one recurrent layer."""
    from native_calls import VOCAB, linear

    own = recording()
    program = own["self"]
    hidden = program.take(program.recur(own["x"], layer, own["recurrence"]))
    program.finish([program.logits(hidden, linear(VOCAB, INNER), 0.0)])
    return program


def scanning() -> dict[str, Any]:
    from native_calls import WIDTH, linear, recorded

    program, x = recorded()[:2]
    selective = {"kind": 3, "heads": 1, "groups": 1, "value_size": CHANNELS, "norm": None, "bias": None}
    arrays = {"decay": -np.abs(floats(KEY * CHANNELS)), "skip": floats(CHANNELS)}
    own = native.library().Recurrence(**parameters(**selective, **arrays))
    return {
        "self": program,
        "x": program.linear(x, linear(3 * CHANNELS + 2 * KEY, WIDTH)),
        "layer": 1,
        "recurrence": own,
    }


def shift_parameters(**changes: Any) -> dict[str, Any]:
    return {"factors": floats(6, CHANNELS), "column": CHANNELS, "window": 2 * CHANNELS} | changes


def rwkv_parameters(**changes: Any) -> dict[str, Any]:
    own = native.library().Norm(floats(INNER), floats(INNER), 1e-5, True)
    sizes = {"heads": HEADS, "key_size": KEY, "value_size": VALUE, "channels": CHANNELS}
    return {**sizes, "factors": floats(3 * HEADS * KEY), "norm": own, "mixes_values": True} | changes


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "Recurrence": parameters,
    "Recurrence.rwkv": rwkv_parameters,
    "Recurrence.shift": shift_parameters,
    "States": state_arrays,
    "Program.recur": recording,
    "Program.scan": scanning,
}
