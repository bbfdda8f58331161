"""Functions and facts of the CPU kernels beside `KernelSet`: formats, conversion of files, rates, vocabularies.

Packages outside `kernels/` import these names from here; the modules of a kernel set are private to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import MissingDependencyError
from bifolio.kernels.native.encode import SEARCHED_FORMATS, decode_fp8, encoded, pack_codes, quickly_converted
from bifolio.kernels.native.formats import NATIVE_FORMATS, PACKINGS
from bifolio.kernels.native.kernel_set import NativeKernels
from bifolio.kernels.native.library import available_isas, isa, library, product_rate
from bifolio.kernels.native.ranks import MAX_RANKS, SharedMemoryRanks, anonymous_file, new_memory

CPU_KERNELS = NativeKernels.name
CPU_FORMATS = NATIVE_FORMATS  # multiplied as they lie in a file, with the bits of a value in memory

__all__ = [
    "CPU_FORMATS",
    "CPU_KERNELS",
    "MAX_RANKS",
    "PACKINGS",
    "SEARCHED_FORMATS",
    "SharedMemoryRanks",
    "anonymous_file",
    "available_isas",
    "checksum",
    "decode_fp8",
    "encoded",
    "isa",
    "join_pairs",
    "new_codec",
    "new_memory",
    "pack_codes",
    "product_rate",
    "quickly_converted",
    "resample",
    "string_starts",
]


def checksum(content: NDArray[np.uint8]) -> bytes | None:
    """64 bytes that change with every damage of `content`, at the speed of memory; None without the native kernels."""
    try:
        native = library()
    except MissingDependencyError:
        return None
    lanes = np.empty(8, np.uint64)
    native.checksum(content, lanes)
    return lanes.tobytes()


def join_pairs(tokens: list[str], order: NDArray[np.int32]) -> list[tuple[str, str]]:
    """For each token that `order` numbers, every way to cut it into two others, the longest left part first.

    Raises MissingDependencyError if the native kernels are not built.
    """
    pairs: list[tuple[str, str]] = library().join_pairs(tokens, order)
    return pairs


def new_codec(data: Any, starts: NDArray[np.uint64], types: NDArray[np.int32]) -> Any:
    """The native tokenizer over a vocabulary that lies in a file: strings, where each begins, their types.

    Raises MissingDependencyError if the native kernels are not built.
    """
    return library().Codec(data, starts, types)


def resample(
    pixels: NDArray[np.uint8],  # u8[h, w, 3]
    rows: tuple[NDArray[np.int32], ...],  # first input, number of inputs and their weights, for each row of the result
    columns: tuple[NDArray[np.int32], ...],
    height: int,
    width: int,
) -> NDArray[np.uint8] | None:
    """u8[height, width, 3]: weighted sums of pixels, first along rows; None without the native kernels.

    Weights are multiples of 2^-22. An edge without weights stays as it is.
    """
    try:
        native = library()
    except MissingDependencyError:
        return None
    out = np.empty((height, width, 3), np.uint8)
    native.resample(pixels, *rows, *columns, out)
    return out


def string_starts(data: Any, position: int, starts: NDArray[np.uint64]) -> int:
    """Find where each string of a GGUF array begins; returns the position after the last.

    Raises MissingDependencyError if the native kernels are not built.
    """
    return int(library().string_starts(data, position, starts))
