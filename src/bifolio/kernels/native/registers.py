"""The values of a recorded program, and the numbers of activations in the extension module."""

from __future__ import annotations

from typing import NamedTuple


class Register(NamedTuple):
    """The result of an operation: float rows, whose number is set when the program runs."""

    number: int


ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu2": 3, "swiglu_clamped": 4, "tanh": 5}
