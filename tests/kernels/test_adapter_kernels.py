"""Adapters in the kernel sets: those of experts, and the bits of a row in any company."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
from adapter_cases import DEPTH, WIDTHS, expert_adapter, mixed_with_adapters, new_adapters, rows_of
from case_table import normal, worst_error
from expert_cases import new_experts, spread_logits
from network_cases import new_linear

from bifolio.errors import KernelArgumentError
from bifolio.kernels.interface import AdapterUse, Router
from bifolio.kernels.reference import ReferenceKernels
from helpers import cpu_kernel_names, make_kernels

needs_native = pytest.mark.skipif("native" not in cpu_kernel_names(), reason="the native kernels are not built")


@pytest.mark.parametrize("name", cpu_kernel_names())
def test_experts_with_adapters_equal_the_reference(name: str) -> None:
    both = [mixed_with_adapters(each, np.random.default_rng(crc32(b"experts"))) for each in
            (make_kernels(name), ReferenceKernels())]  # fmt: skip
    for result, expected in zip(*both, strict=True):
        assert worst_error(result, expected) < 2e-5


@needs_native
def test_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    kernels, rng = make_kernels("native"), np.random.default_rng(4)
    adapters = tuple(kernels.prepare_adapter(each) for each in new_adapters(rng))
    linear = kernels.prepare_linear(new_linear(rng, WIDTHS, DEPTH))
    x, rows = normal(rng, 150, DEPTH), rows_of(rng, 150, 3)
    whole = kernels.adapt(kernels.linear(x, linear), x, 3, AdapterUse(adapters, rows))
    for start in range(0, 150, 7):
        for count in (1, 2, 13):
            part = slice(start, start + count)
            use = AdapterUse(adapters[::-1], np.where(rows[part] < 0, -1, 2 - rows[part]).astype(np.int32))
            again = kernels.adapt(kernels.linear(x[part], linear), x[part], 3, use)
            np.testing.assert_array_equal(again, whole[part])


@needs_native
def test_experts_have_the_same_bits_alone_and_beside_tokens_with_adapters() -> None:
    kernels, rng = make_kernels("native"), np.random.default_rng(5)
    experts = kernels.prepare_experts(replace(new_experts(rng, 64, 64), site=7))
    adapters = tuple(kernels.prepare_adapter(expert_adapter(rng, 64, 64)) for _ in range(2))
    x, logits, rows = normal(rng, 40, 64), spread_logits(rng, 40), rows_of(rng, 40, 2)
    router = Router(3, renormalise=True)
    whole = kernels.mix_experts(x, kernels.route(logits, router), experts, AdapterUse(adapters, rows))
    for token in range(40):
        one = slice(token, token + 1)
        use = None if rows[token] < 0 else AdapterUse((adapters[rows[token]],), np.zeros(1, np.int32))
        alone = kernels.mix_experts(x[one], kernels.route(logits[one], router), experts, use)
        np.testing.assert_array_equal(alone, whole[one])


@needs_native
def test_adapters_that_do_not_fit_are_refused_before_memory_is_touched() -> None:
    kernels, rng = make_kernels("native"), np.random.default_rng(6)
    adapter = kernels.prepare_adapter(new_adapters(rng)[0])
    x, y = normal(rng, 2, DEPTH), normal(rng, 2, sum(WIDTHS))
    zeros = np.zeros(2, np.int32)
    with pytest.raises(KernelArgumentError, match="ends at column 95 of site 3, which has 94"):
        kernels.adapt(y[:, :-1].copy(), x, 3, AdapterUse((adapter,), zeros))
    with pytest.raises(KernelArgumentError, match="has 64 inputs at site 3 and must have 63"):
        kernels.adapt(y, x[:, :-1].copy(), 3, AdapterUse((adapter,), zeros))
    with pytest.raises(KernelArgumentError, match=r"adapter_rows\[1\] is 1 and must be -1 or below 1"):
        kernels.adapt(y, x, 3, AdapterUse((adapter,), np.array([0, 1], np.int32)))
    with pytest.raises(KernelArgumentError, match="adapter_rows has 1 elements and must have 2"):
        kernels.adapt(y, x, 3, AdapterUse((adapter,), zeros[:1]))
    with pytest.raises(KernelArgumentError, match="site is -2"):
        kernels.adapt(y, x, -2, AdapterUse((adapter,), zeros))
