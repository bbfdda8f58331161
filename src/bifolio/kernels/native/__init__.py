"""The CPU kernels in C++ (`native/`): weights packed at load, one call for a whole step."""

from bifolio.kernels.native.kernel_set import NativeKernels
from bifolio.kernels.native.library import (
    available_isas,
    isa,
    library,
    num_threads,
    product_rate,
    read_bandwidth,
    set_isa,
    set_num_threads,
    shared_tokens,
)

__all__ = [
    "NativeKernels",
    "available_isas",
    "isa",
    "library",
    "num_threads",
    "product_rate",
    "read_bandwidth",
    "set_isa",
    "set_num_threads",
    "shared_tokens",
]
