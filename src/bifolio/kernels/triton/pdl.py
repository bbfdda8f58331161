# mypy: disallow-untyped-decorators=False
"""Kernels that begin before the one in front of them has ended.

A decode step is a chain of short kernels, and between two of them a GPU stands still for microseconds: the last
programs of one finish, the first of the next are fetched and find no data. With programmatic dependent launch the
next kernel's programs take the places that become free, do what depends on nobody (read weights, look up where their
work lies) and then wait:

    kernel n     |==== programs ====|..last ones..|
    kernel n+1                      |weights| wait |==== programs ====|

Every kernel launched with `OVERLAPPED` waits before it touches what others wrote or read, and only then lets its own
successor begin: so whatever came two kernels earlier is complete even before the wait.
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
    """From here on everything launched before is complete; what is launched next may begin."""
    if IS_POSSIBLE:
        gdc_wait()
        gdc_launch_dependents()
