"""Experts that the stream of a device calls: a function and its argument, without Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from bifolio.errors import KernelArgumentError
from bifolio.kernels.interface import Experts, Linear, Routing
from bifolio.kernels.native import NativeKernels

D, HIDDEN, COUNT, CHOICES, ROWS = 64, 96, 6, 3, 5


def experts_of(kernels: NativeKernels) -> Experts:
    rng = np.random.default_rng(0)

    def linear(out: int, width: int) -> Linear:
        return Linear((rng.normal(0, width**-0.5, (out, width)).astype(np.float32),), (None,))

    up, down = (tuple(linear(*size) for _ in range(COUNT)) for size in ((2 * HIDDEN, D), (D, HIDDEN)))
    return kernels.prepare_experts(Experts(up, down, "silu"))


def call_of(kernels: NativeKernels, experts: Experts, sent: np.ndarray, mixed: np.ndarray) -> tuple[Any, Any]:
    native: Any = kernels.native
    room = native.HostRoom()
    return room, native.ExpertCall(experts.prepared, room, sent, mixed, kernels.pool)


def inputs() -> tuple[np.ndarray, Routing, np.ndarray]:
    """Rows, their routing, and both side by side."""
    rng = np.random.default_rng(1)
    x, weights = rng.normal(size=(ROWS, D)).astype(np.float32), rng.random((ROWS, CHOICES)).astype(np.float32)
    chosen = np.stack([rng.permutation(COUNT)[:CHOICES] for _ in range(ROWS)]).astype(np.int32)
    return x, Routing(chosen, weights), np.concatenate([x, chosen.view(np.float32), weights], axis=1)


def run(call: Any) -> None:
    """As a stream calls it."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call.function)(call.argument)


def test_a_call_writes_the_sum_of_the_experts() -> None:
    kernels = NativeKernels(threads=2)
    experts = experts_of(kernels)
    x, routing, sent = inputs()
    mixed = np.full((ROWS, D), 7.0, np.float32)
    _, call = call_of(kernels, experts, sent, mixed)
    for _ in range(2):
        run(call)
        np.testing.assert_array_equal(mixed, kernels.mix_experts(x, routing, experts))
        sent[:, :D] = x = x[::-1].copy()


def test_an_expert_that_does_not_exist_gives_a_row_without_numbers() -> None:
    kernels = NativeKernels(threads=1)
    experts = experts_of(kernels)
    x, routing, sent = inputs()
    expected = kernels.mix_experts(x, routing, experts)
    mixed = np.zeros((ROWS, D), np.float32)
    _, call = call_of(kernels, experts, sent, mixed)
    numbers = sent[:, D : D + CHOICES].view(np.int32)
    numbers[1, 0], numbers[3, 2] = -1, COUNT
    run(call)
    assert np.isnan(mixed[[1, 3]]).all()
    np.testing.assert_array_equal(mixed[[0, 2, 4]], expected[[0, 2, 4]])


def test_an_idle_host_answers_with_zeros() -> None:
    kernels = NativeKernels(threads=1)
    *_, sent = inputs()
    mixed = np.ones((ROWS, D), np.float32)
    room, call = call_of(kernels, experts_of(kernels), sent, mixed)
    room.is_idle = True
    run(call)
    assert not mixed.any()
    room.is_idle = False
    run(call)
    assert mixed.any()


@pytest.mark.parametrize(
    ("width", "outputs", "problem"),
    [
        (D, D, "inputs is"),
        (D + 1, D, "inputs is"),
        (D + 2 * COUNT + 2, D, "the number of experts"),
        (D + 2, D - 1, "outputs"),
    ],
)
def test_wrong_shapes_are_refused(width: int, outputs: int, problem: str) -> None:
    kernels = NativeKernels(threads=1)
    sent, mixed = np.zeros((ROWS, width), np.float32), np.zeros((ROWS, outputs), np.float32)
    with pytest.raises(KernelArgumentError, match=problem):
        call_of(kernels, experts_of(kernels), sent, mixed)
