"""A step may want no logits at all (a chunk that ends inside its prompt): nothing may be written for them."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.kernels.interface import Linear
from helpers import cpu_kernel_names, make_kernels


@pytest.mark.parametrize("name", cpu_kernel_names())
def test_a_matrix_product_of_no_rows(name: str) -> None:
    kernels = make_kernels(name)
    linear = kernels.prepare_linear(Linear((np.ones((61, 32), np.float32),), (None,)))
    nothing = kernels.from_host(np.zeros((0, 32), np.float32))
    assert kernels.to_host(kernels.logits(nothing, linear, 0.0)).shape == (0, 61)


@pytest.mark.skipif("native" not in cpu_kernel_names(), reason="the native library is not built")
def test_the_native_product_of_no_rows_writes_nothing() -> None:
    kernels = make_kernels("native")
    linear = kernels.prepare_linear(Linear((np.ones((61, 32), np.float32),), (None,)))
    memory = np.full((8, 61), 7, np.float32)
    program = kernels.native.Program()  # type: ignore[attr-defined]
    program.finish([program.linear(program.given(32), linear.prepared)])
    program.run(given=[np.zeros((0, 32), np.float32)], results=[memory[:0]])
    assert (memory == 7).all()
