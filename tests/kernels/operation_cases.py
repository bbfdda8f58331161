"""Every operation of a kernel set against the reference: the table, and the comparison.

The ordinary suite, the run in Triton's interpreter and the run on a GPU share these cases.
"""

from __future__ import annotations

from zlib import crc32

import adapter_cases
import attention_cases
import device_cases
import entry_cases
import expert_cases
import latent_cases
import network_cases
import numpy as np
import recurrence_cases
import stream_cases
from case_table import CASES, TOLERANCE, worst_error

from bifolio.kernels.interface import KernelSet
from bifolio.kernels.reference import ReferenceKernels

__all__ = [
    "CASES",
    "adapter_cases",
    "attention_cases",
    "check_operation",
    "device_cases",
    "entry_cases",
    "expert_cases",
    "latent_cases",
    "network_cases",
    "recurrence_cases",
    "stream_cases",
]


def check_operation(name: str, kernels: KernelSet) -> None:
    """Run a case on the set and on the reference, with the same inputs, and compare all outputs."""
    _, run, rounding = CASES[name]
    results, expected = (
        run(each, np.random.default_rng(crc32(name.encode()))) for each in (kernels, ReferenceKernels())
    )
    assert len(results) == len(expected)
    tolerance = max(TOLERANCE[kernels.kv_dtype], rounding)
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        error = worst_error(result, wanted)
        assert error <= tolerance, f"{name}, output {number}: {error:.2e} of the largest value, {tolerance} is allowed"
