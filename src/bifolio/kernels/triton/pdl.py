# mypy: disallow-untyped-decorators=False
"""Programmatic dependent launch (PDL): kernels that start before the preceding one has ended.

A decode step is a chain of short kernels, and between two of them a GPU is idle for microseconds: the last programs of
one finish while the next has not started. With PDL the next kernel's programs start as multiprocessors become free,
do the work that does not depend on earlier kernels (read weights, compute addresses) and then wait:

    kernel n     |==== programs ====|..last ones..|
    kernel n+1                      |weights| wait |==== programs ====|

Every kernel launched with `OVERLAPPED` waits before it accesses memory that earlier kernels read or write, and only
then allows the next kernel to start: so a kernel two launches earlier is complete even before the wait. The kernels in
CUDA C++ for one row (`kernels/cuda/row_*.cu`) are an exception: they allow the next kernel at once, so that the weights
of several products are on their way. A kernel that follows one of them reads no results of its own layer before its
wait. The first product of a pass is no exception, so that everything that a pass prepares before its layers
(positions, rotations, tables) is complete when later kernels start.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def _is_possible() -> bool:
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return bool(torch.cuda.get_device_capability() >= (9, 0))


IS_POSSIBLE = tl.constexpr(_is_possible())
OVERLAPPED: dict[str, bool] = {"launch_pdl": True} if IS_POSSIBLE.value else {}  # options of a launch


@triton.jit
def wait_for_inputs() -> None:
    """Wait until all earlier kernels are complete, then allow the next one to start."""
    if IS_POSSIBLE:
        gdc_wait()
        gdc_launch_dependents()
