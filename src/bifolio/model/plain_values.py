"""Types of values in the files of models."""

from __future__ import annotations

import sys
from typing import Any

LARGEST = sys.float_info.max


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold: neither infinite nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def shown(value: Any) -> str:
    """The value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
