"""Noise without state: a uniform number is a function of (seed, position, stream) and of nothing else.

A generator with state would tie a request's tokens to the order in which steps happened to run. Hashing the position
of the token instead makes preemption, chunking, speculation and neighbours invisible in the output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STREAM_DRAW = 0  # which token is drawn
STREAM_XTC = 1  # whether the likely tokens are excluded at this position
STREAM_ACCEPT = 2  # whether a drafted token is accepted
STREAM_CHILD = 3  # seeds of the further completions of one request

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio: the increment of splitmix64
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection in which every input bit changes about half of the output bits."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def _unsigned(value: Any) -> NDArray[np.uint64]:
    """Integers of either sign modulo 2**64, at least one-dimensional (numpy warns of overflow in scalars only)."""
    if isinstance(value, int):
        return np.array([value & _MASK], dtype=np.uint64)
    return np.atleast_1d(np.asarray(value)).astype(np.uint64)


def random_bits(seed: Any, position: Any, stream: int = STREAM_DRAW) -> NDArray[np.uint64]:
    """u64[r]: 64 random bits for each (seed, position); the arguments are integers or arrays that broadcast."""
    state = _mix(_unsigned(seed) + _GOLDEN)
    state = _mix((state ^ _unsigned(position)) + _GOLDEN)
    return _mix((state ^ _unsigned(stream)) + _GOLDEN)


def uniform(seed: Any, position: Any, stream: int = STREAM_DRAW) -> NDArray[np.float64]:
    """f64[r] in [0, 1): multiples of 2**-53, one for each (seed, position)."""
    return (random_bits(seed, position, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def child_seed(seed: int, index: int) -> int:
    """The seed of completion number `index` of a request; the first keeps the request's own."""
    return seed & _MASK if index == 0 else int(random_bits(seed, index, STREAM_CHILD)[0])
