"""bfloat16 for numpy, which has no such type: the upper 16 bits of an f32, kept as uint16."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BF16_NAN = np.uint16(0x7FC0)


def f32_to_bf16(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; infinities stay, a NaN stays a (quiet) NaN of its sign."""
    floats = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = floats.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)
    nans = np.isnan(floats)
    if nans.any():  # adding could carry a NaN's payload into infinity or the sign
        rounded = np.where(nans, (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)
    return rounded


def bf16_to_f32(bits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """The exact f32 value of each bfloat16."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
